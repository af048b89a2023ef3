"""The engine's side: one HTTP/1.1 connection to a replica, and the making of one.

httptools parses; what it finds is handed to the exchange after each read, never from inside the parser.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from llmgw.gateway.headers import RESPONSE_SPECIAL
from llmgw.gateway.target import Target

HIGH_WATER_BYTES = 64 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
JOINED_BYTES = 64 * 1024
"""A body up to this size is sent in one write with its head; copying a larger one would cost more than a write."""


class Reader(Protocol):
    """Who reads the answer. Called after a read has been parsed."""

    stirred: bool
    """Set at each read: the engine has said something."""

    def on_head(self, connection: EngineConnection) -> None:
        """The head is complete: ``status``, ``header_lines`` and so on are set. Sets ``connection.sink``."""

    def on_end(self, connection: EngineConnection) -> None:
        """The answer is complete. The connection is already back in its pool, or closed."""

    def on_broken(self, connection: EngineConnection, why: str) -> None:
        """The connection was lost, or what came is not HTTP."""


def _no_sink(piece: bytes) -> None:
    raise AssertionError("an answer's body came before its head was taken")


class EngineConnection(asyncio.Protocol):
    __slots__ = (
        "_chunked",
        "_head_bytes",
        "_head_complete",
        "_head_told",
        "_keep",
        "_large",
        "_parser",
        "_paused",
        "_pieces",
        "complete",
        "content_encoding",
        "content_length",
        "content_type",
        "header_lines",
        "idle_since",
        "reader",
        "retry_after",
        "served",
        "sink",
        "status",
        "target",
        "transport",
    )

    def __init__(self, target: Target) -> None:
        self.target = target
        self.transport = cast(asyncio.Transport, None)
        self.reader: Reader | None = None
        self.sink: Callable[[bytes], None] = _no_sink
        self.served = 0
        """Answers that it has carried: a used connection may be closed by the engine just when it is used again."""
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._paused = False
        self._large = False
        """The request may still be in the transport's buffer when its answer has come."""
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.header_lines: list[bytes] = []
        """Of each header to pass on but content-length and content-type: name, colon, value, CRLF."""
        self.content_type = b""
        self.content_length: bytes | None = None
        self.content_encoding = b""
        self.retry_after: bytes | None = None
        self._chunked = False
        self._head_bytes = 0
        self._head_complete = self._head_told = self.complete = self._keep = False

    # What the exchange does with it

    def send(self, reader: Reader, head: bytes, body: bytes) -> None:
        self.reader = reader
        self._large = len(body) > JOINED_BYTES
        if self._large:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head + body)

    def pause(self) -> None:
        """Reads no more until ``resume``: the client takes its answer more slowly than the engine gives it."""
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def abandon(self) -> None:
        """Ends it at once, whatever is under way: the engine sees its client gone."""
        self.reader = None
        self.sink = _no_sink
        self.transport.abort()

    def close(self) -> None:
        self.reader = None
        self.transport.close()

    def park(self) -> None:
        """Into the pool, unused."""
        if self.target.gone or self.transport.is_closing():
            self.transport.close()
        else:
            self.idle_since = time.monotonic()
            self.target.idle.append(self)

    def take_body(self) -> bytes:
        """The body of an answer that is ``complete``, instead of its being given to the sink."""
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    @property
    def has_more(self) -> bool:
        """While the head is handed over: whether a part of the body, or the end, came with it."""
        return bool(self._pieces) or self.complete

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        reader = self.reader
        if reader is None:
            self._unsolicited()
            return
        reader.stirred = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("it switched to another protocol")
            return
        except httptools.HttpParserError as error:
            if not self.complete:
                self._break(f"its answer is not HTTP/1.1: {error}")
                return
            self._keep = False  # more came than one answer
        if not self._head_told:
            if not self._head_complete:
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_LIMIT_BYTES:
                    self._break(f"the head of its answer is larger than {HEAD_LIMIT_BYTES} bytes")
                return
            self._head_told = True
            reader.on_head(self)
            if self.reader is not reader:
                return
        pieces = self._pieces
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self.sink(piece)
            if self.reader is not reader:
                return
        if self.complete:
            self._finish(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        reader, self.reader = self.reader, None
        if reader is None:
            if self in self.target.idle:
                self.target.idle.remove(self)
            return
        if self._head_told and self.content_length is None and not self._chunked and exc is None:
            # An answer without a length ends with the connection.
            self.sink = _no_sink
            reader.on_end(self)
        else:
            reader.on_broken(self, _lost(exc))

    # httptools' callbacks: they note, and nothing else

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # trailers are not passed on
        lowered = name.lower()
        if lowered not in RESPONSE_SPECIAL:
            self.header_lines.extend((name, b": ", value, b"\r\n"))
        elif lowered == b"content-type":
            self.content_type = value
        elif lowered == b"content-length":
            self.content_length = value
        elif lowered == b"transfer-encoding":
            self._chunked = True
        elif lowered == b"content-encoding":
            self.content_encoding = value
            self.header_lines.extend((name, b": ", value, b"\r\n"))
        elif lowered == b"retry-after":
            self.retry_after = value

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._keep = self._parser.should_keep_alive()
            self._head_complete = True

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.complete:
            self._keep = False  # a second answer to one request: this connection can't be trusted with another
        elif self._head_complete:
            self.complete = True
        else:
            self._reset()  # an interim answer, such as 100

    # Ends

    def _finish(self, reader: Reader) -> None:
        self.reader = None
        self.sink = _no_sink
        if self._keep and not self.target.gone and (not self._large or not self.transport.get_write_buffer_size()):
            if self._paused:
                self.resume()
            self.served += 1
            self.idle_since = time.monotonic()
            self.target.idle.append(self)
        else:
            self.transport.close()
        reader.on_end(self)
        self._reset()

    def _break(self, why: str) -> None:
        reader, self.reader = self.reader, None
        self.sink = _no_sink
        self.transport.abort()
        if reader is not None:
            reader.on_broken(self, why)

    def _unsolicited(self) -> None:
        if self in self.target.idle:
            self.target.idle.remove(self)
        self.transport.abort()


def _lost(exc: Exception | None) -> str:
    return "it closed the connection" if exc is None else f"the connection was lost: {exc}"


class Caller(Protocol):
    """Who asked for a connection."""

    def connected(self, connection: EngineConnection) -> None: ...

    def unreachable(self, target: Target, why: str) -> None: ...


class Connector:
    """Opens connections to replicas, and owns the tasks that do."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(self, target: Target, caller: Caller) -> None:
        """Calls ``caller.connected`` or ``caller.unreachable``, later."""
        target.connecting(time.monotonic(), self._connect_s)
        task = asyncio.get_running_loop().create_task(self._connect(target, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, target: Target, caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(lambda: EngineConnection(target), target.host, target.port)
        except TimeoutError:
            caller.unreachable(target, f"no connection within {self._connect_s:g} s")
        except (OSError, UnicodeError) as error:
            caller.unreachable(target, _unreachable(error))
        else:
            target.connected(time.monotonic())
            caller.connected(connection)

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unreachable(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"no connection: {getattr(error, 'strerror', None) or error}"
