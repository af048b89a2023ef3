"""A scripted engine: a real listener that answers each request as a test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DEADLINE_S = 10.0


def chunk(text: str = "hi", finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    delta = {"content": text} if text else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    document = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
}


class Call:
    """One request that an engine has received, and the way to answer it."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        self.head = head
        self.body = body
        lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, self.version = lines[0].split(" ", 2)
        self.headers = [(n.lower(), v.strip()) for n, v in (line.split(":", 1) for line in lines[1:] if line)]
        self.connection = number
        """Of the connection it came on, from 1."""
        self.gone = asyncio.Event()
        """The caller has closed the connection."""
        self._writer = writer

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known == name), None)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(
        self, status: int, body: bytes, *headers: bytes, content_type: bytes = b"application/json"
    ) -> None:
        lines = b"".join(line + b"\r\n" for line in headers)
        if content_type:
            lines += b"Content-Type: " + content_type + b"\r\n"
        await self.send(b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, lines, len(body), body))

    async def json(self, status: int, document: object, *headers: bytes) -> None:
        await self.answer(status, json.dumps(document).encode(), *headers)

    async def stream(self, head: bytes = SSE_HEAD) -> None:
        await self.send(head)

    async def piece(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Ends the connection with RST, as a killed process' kernel does."""
        handle = self._writer.get_extra_info("socket")
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def until_gone(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.gone.wait()


Script = Callable[[Call], Awaitable[None]]


async def completion(call: Call) -> None:
    await call.json(200, COMPLETION)


class Engine:
    """Serves on loopback. ``script`` is run for each request; ``calls`` are the requests so far."""

    def __init__(self, script: Script = completion) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.connections = 0
        self.closed = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._arrived = asyncio.Condition()
        self._taken = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._scripts: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the listener: on the same port, if it had one before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**20, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the listener and every connection at once."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            for script in list(self._scripts):
                script.cancel()
            await self._server.wait_closed()
            async with asyncio.timeout(DEADLINE_S), self._arrived:
                await self._arrived.wait_for(lambda: not self._writers)
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def call(self) -> Call:
        """The next request that no one has taken yet."""
        async with asyncio.timeout(DEADLINE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) > self._taken)
        self._taken += 1
        return self.calls[self._taken - 1]

    async def received(self, count: int) -> None:
        """Returns when that many requests have come, ever."""
        async with asyncio.timeout(DEADLINE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self._writers.add(writer)
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, BrokenPipeError):
            pass
        finally:
            self.closed += 1
            writer.close()
            self._writers.discard(writer)
            async with self._arrived:
                self._arrived.notify_all()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        call = Call(head[:-4], b"", writer, number)
        call.body = await reader.readexactly(int(call.header("content-length") or 0))
        async with self._arrived:
            self.calls.append(call)
            self._arrived.notify_all()
        script = asyncio.ensure_future(self.script(call))
        self._scripts.add(script)
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((script, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                call.gone.set()
        finally:
            if not call.gone.is_set():
                watch.cancel()
            results = await asyncio.gather(script, watch, return_exceptions=True)
            self._scripts.discard(script)
        failure = results[0]
        if isinstance(failure, BaseException) and not isinstance(failure, ConnectionError | asyncio.CancelledError):
            raise failure
        return not writer.is_closing() and not call.gone.is_set()


@contextlib.asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """An address that takes no connection and refuses none, as a machine without power: its URL."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # fill its backlog; what comes after is left without an answer
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
