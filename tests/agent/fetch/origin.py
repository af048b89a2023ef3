"""A server of one file on loopback, which misbehaves as it is told."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext

from llmgw.agent.fetch.artifact import Artifact


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How one request is answered."""

    status: int | None = None
    content: bytes | None = None
    """Instead of the origin's."""
    etag: str | None = '"one"'
    ranges: bool = True
    """Whether it knows them; else every answer is the whole file."""
    cut_at: int | None = None
    """Closes the connection after so many bytes of the body."""
    hold_at: int | None = None
    """Sends nothing after so many bytes, until released."""
    bytes_per_s: int | None = None
    length: int | None = None
    """A Content-Length that is not true."""
    chunked: bool = False
    endless: bool = False
    location: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    path: str
    host: str
    headers: Mapping[str, str]


@dataclass
class Origin:
    content: bytes
    name: str = "file.tar.gz"
    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    """One for each request in turn; the last one stays."""
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Other paths: type and content."""
    requests: list[Request] = field(default_factory=list)
    sent_bytes: int = 0
    holding: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def artifact(self, *, size: bool = True, **changed: object) -> Artifact:
        values = {
            "name": self.name,
            "url": f"{self.url}/{self.name}",
            "sha256": self.sha256,
            "size_bytes": len(self.content) if size else None,
            **changed,
        }
        return Artifact(**values)  # type: ignore[arg-type]

    @property
    def ranges(self) -> list[str | None]:
        return [request.headers.get("range") for request in self.requests]

    def next(self) -> Answer:
        if not self.answers:
            return Answer()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def _handler(origin: Origin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            origin.requests.append(Request(path=self.path, host=headers.get("host", ""), headers=headers))
            self.close_connection = True
            path = self.path.partition("?")[0]
            if path in origin.pages:
                kind, content = origin.pages[path]
                self._send(Answer(ranges=False, headers={"Content-Type": kind}, content=content))
                return
            self._send(origin.next())

        def _send(self, answer: Answer) -> None:
            content = origin.content if answer.content is None else answer.content
            start, status = self._range(answer, content)
            if status == 416:
                self._head(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
                return
            headers = dict(answer.headers)
            if answer.etag is not None:
                headers["ETag"] = answer.etag
            if answer.location is not None:
                self._head(status, {**headers, "Location": answer.location, "Content-Length": "0"})
                return
            if status == 206:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            body = content[start:]
            if answer.chunked:
                headers["Transfer-Encoding"] = "chunked"
            elif not answer.endless:
                headers["Content-Length"] = str(len(body) if answer.length is None else answer.length)
            self._head(status, headers)
            with suppress(OSError):
                self._body(answer, body)

        def _range(self, answer: Answer, content: bytes) -> tuple[int, int]:
            asked = self.headers.get("Range")
            condition = self.headers.get("If-Range")
            if answer.status is not None:
                return 0, answer.status
            if asked is None or not answer.ranges or (condition is not None and condition != answer.etag):
                return 0, 200
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            return (start, 206) if start < len(content) else (start, 416)

        def _head(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _body(self, answer: Answer, body: bytes) -> None:
            if answer.endless:
                while True:
                    self._write(answer, body)
            if answer.hold_at is not None:
                self._write(answer, body[: answer.hold_at])
                origin.holding.set()
                origin.released.wait(30)
                return
            if answer.bytes_per_s is not None:
                for at in range(0, len(body), max(1, answer.bytes_per_s // 20)):
                    if origin.released.is_set():
                        return
                    self._write(answer, body[at : at + max(1, answer.bytes_per_s // 20)])
                    time.sleep(0.05)
                return
            self._write(answer, body[: answer.cut_at])
            if answer.chunked and answer.cut_at is None:
                self.wfile.write(b"0\r\n\r\n")

        def _write(self, answer: Answer, piece: bytes) -> None:
            if answer.chunked:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            else:
                self.wfile.write(piece)
            origin.sent_bytes += len(piece)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(origin: Origin, *, tls: SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Origin]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(origin))
    server.daemon_threads = False
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    origin.url = f"{'http' if tls is None else 'https'}://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield origin
    finally:
        origin.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
