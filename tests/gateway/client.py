"""A client on a raw socket, so that tests see the bytes as they came."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

DEADLINE_S = 10.0
KEY = "sk-test"


class Torn(Exception):
    """The connection ended within an answer. ``so_far`` is the part of the body that came."""

    def __init__(self, so_far: bytes) -> None:
        super().__init__(f"torn after {len(so_far)} bytes")
        self.so_far = so_far


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    lines: list[tuple[str, str]]
    body: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    """The HTTP chunks, where it was chunked."""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json()["error"]
        assert isinstance(found["message"], str)
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


def request(
    body: object = None,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: tuple[str, ...] = (),
    key: str | None = KEY,
    version: str = "1.1",
) -> bytes:
    """A request's bytes. ``body``: bytes as they are, or a JSON document."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: gateway", *headers]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if data:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def ask(stream: bool = False, model: str = "m", **more: object) -> dict[str, object]:
    document: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
    if stream:
        document["stream"] = True
    return document


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1", **how: Any) -> Client:
        async with asyncio.timeout(DEADLINE_S):
            return cls(*await asyncio.open_connection(host, port, limit=2**24, **how))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.writer.wait_closed()
        except (ConnectionError, TimeoutError):
            pass

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            await self.writer.drain()

    async def ask(self, body: object = None, **how: Any) -> Answer:
        await self.send(request(body, **how))
        return await self.answer()

    async def head(self) -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 "), raw
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = [(n.lower(), v.strip()) for n, v in (line.split(":", 1) for line in lines)]
        return Answer(int(first.split(" ")[1]), dict(pairs), pairs)

    async def piece(self) -> bytes:
        """The next HTTP chunk; b"" at the end."""
        async with asyncio.timeout(DEADLINE_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def answer(self) -> Answer:
        """The whole answer; raises Torn where the connection ends first."""
        answer = await self.head()
        try:
            await self._body(answer)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            part = getattr(error, "partial", b"")
            raise Torn(b"".join(answer.pieces) + (part if "content-length" in answer.headers else b"")) from None
        return answer

    async def _body(self, answer: Answer) -> None:
        if answer.headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in answer.headers
            while piece := await self.piece():
                answer.pieces.append(piece)
            answer.body = b"".join(answer.pieces)
        elif "content-length" in answer.headers:
            async with asyncio.timeout(DEADLINE_S):
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        elif answer.status != 204:
            async with asyncio.timeout(DEADLINE_S):
                answer.body = await self.reader.read()

    async def ended(self) -> bytes:
        """What comes until the gateway closes the connection."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""
