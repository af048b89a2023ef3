"""From an engine's answer to the client: what is written, how it is framed, and how it ends.

The narrow interface between the exchange (policy, once per request) and the moving of bytes (once per read): a relay is
made with the head, is given the body piece by piece, and is told how it ended. A relay written in C can stand here.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from llmgw.gateway import sse

LAST_CHUNK = b"0\r\n\r\n"


class Client(Protocol):
    """What a relay needs of the client's connection."""

    def write(self, data: bytes) -> None: ...


class Framing(Enum):
    LENGTH = "length"
    """The engine stated the length; it is passed on."""
    CHUNKED = "chunked"
    CLOSE = "close"
    """For HTTP/1.0: the answer ends with the connection."""


# A class' attributes are slow to look up where the class is an Enum.
LENGTH, CHUNKED, CLOSE = Framing


class Ending(Enum):
    WHOLE = "whole"
    TRUNCATED = "truncated"
    """An error event says so to the client; the connection is whole."""
    CUT = "cut"
    """Nothing could be said any more: the connection must be cut, so that the client does not take it for an end."""


WHOLE, TRUNCATED, CUT = Ending


class Relay(Protocol):
    begun: bool
    """The body's first byte has come."""

    def feed(self, piece: bytes) -> None:
        """A part of the body, never empty."""

    def flush(self) -> None:
        """Nothing more is there for now: send what has been held for the sake of fewer writes."""

    def end(self) -> Ending:
        """The engine ended its answer, by the rules of HTTP."""

    def broken(self, why: str, code: str) -> Ending:
        """The answer will not be completed."""


def framed(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class PlainRelay:
    """Bytes as they come."""

    __slots__ = ("_chunked", "_client", "_head", "begun")

    def __init__(self, client: Client, head: bytes, framing: Framing) -> None:
        self.begun = False
        self._client = client
        self._head = head
        self._chunked = framing is CHUNKED

    def feed(self, piece: bytes) -> None:
        self.begun = True
        if self._chunked:
            piece = framed(piece)
        if self._head:
            # Most answers come whole in one read, and leave in one write.
            piece = self._head + piece
            self._head = b""
        self._client.write(piece)

    def flush(self) -> None:
        if self._head:
            self._client.write(self._head)
            self._head = b""

    def end(self) -> Ending:
        self.flush()
        if self._chunked:
            self._client.write(LAST_CHUNK)
        return WHOLE

    def broken(self, why: str, code: str) -> Ending:
        return CUT


class StreamRelay:
    """Server-sent events, whole ones as soon as they are whole; an end that is none becomes an error event."""

    __slots__ = ("_before_last", "_chunked", "_client", "_failed", "_last", "_part", "_torn", "begun")

    def __init__(self, client: Client, head: bytes, framing: Framing) -> None:
        self.begun = True  # it is made with it
        self._client = client
        self._chunked = framing is CHUNKED
        self._part = b""
        """The beginning of an event that has not ended."""
        self._last = self._before_last = b""
        self._torn = False
        """An event larger than may be held was passed on in parts."""
        self._failed = False
        """The engine itself reported an error in the stream."""
        client.write(head)

    def feed(self, piece: bytes) -> None:
        if self._part:
            piece = self._part + piece
            self._part = b""
        if not piece.endswith(b"\n\n"):
            piece = self._whole(piece)
            if not piece:
                return
        if b'"error"' in piece:
            piece, failed = sse.with_errors_normalised(piece)
            self._failed = self._failed or failed
        self._before_last = self._last
        self._last = piece
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._client.write(piece)

    def _whole(self, piece: bytes) -> bytes:
        whole, part = sse.split(piece)
        if whole:
            self._torn = False
        if len(part) > sse.HELD_LIMIT:
            self._torn = True
            return piece
        self._part = part
        return whole

    def flush(self) -> None:
        pass

    def end(self) -> Ending:
        last = self._last + self._part
        if self._failed or sse.says_done(last) or sse.says_finished(self._before_last + last):
            self._write(self._part)
            self._finish()
            return WHOLE
        if self._part.endswith((b"\n", b"\r")):
            # Whole but for its blank line.
            self._write(self._part + b"\n")
        return self.broken("the engine ended its answer before it was complete", "truncated")

    def broken(self, why: str, code: str) -> Ending:
        if self._torn and not self._last.endswith(b"\n\n"):
            self._write(b"\n\n")
        self._write(sse.error_event(f"{why}; what came until here is not the whole answer", code))
        self._finish()
        return TRUNCATED

    def _write(self, data: bytes) -> None:
        if data:
            self._client.write(framed(data) if self._chunked else data)

    def _finish(self) -> None:
        if self._chunked:
            self._client.write(LAST_CHUNK)


class Collector:
    """Holds the body of an answer that may not be passed on, up to ``limit`` bytes."""

    __slots__ = ("_limit", "_pieces", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)

    @property
    def over(self) -> bool:
        return self._size > self._limit

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)


class Answer:
    """An engine's error answer, whole, kept in case no other replica does better."""

    __slots__ = ("body", "lines", "retry_after", "status")

    def __init__(self, status: int, lines: list[bytes], body: bytes, retry_after: bytes | None) -> None:
        self.status = status
        self.lines = lines
        self.body = body
        self.retry_after = retry_after
