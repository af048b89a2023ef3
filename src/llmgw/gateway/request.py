"""A client's request as the gateway holds it, and the head of what is answered to it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from os import urandom

from llmgw.gateway.errors import REASONS, ApiError
from llmgw.gateway.relay import CHUNKED, CLOSE, Framing
from llmgw.link.messages import RoutesKey

_PROCESS = urandom(6).hex().encode()
_NUMBERS = count(1)

CORS = b"access-control-allow-origin: *\r\naccess-control-expose-headers: x-request-id, retry-after, x-should-retry\r\n"


def new_request_id() -> bytes:
    return b"req-%b-%x" % (_PROCESS, next(_NUMBERS))


@dataclass(frozen=True, slots=True)
class Api:
    """A route of the OpenAI API. ``proxied`` routes go to an engine under the same path."""

    path: bytes
    method: bytes
    proxied: bool
    streams: bool = False
    """Whether ``stream: true`` makes it answer with server-sent events."""


class Request:
    __slots__ = (
        "accept_encoding",
        "api",
        "body",
        "content_length",
        "cors",
        "error",
        "expects_continue",
        "forward",
        "http10",
        "keep_alive",
        "key",
        "method",
        "path",
        "preflight_headers",
        "query",
        "request_id",
        "token",
    )

    def __init__(self, method: bytes, path: bytes, query: bytes, forward: list[bytes]) -> None:
        self.method = method
        self.path = path
        self.query = query
        """With its question mark, or empty."""
        self.forward = forward
        """Headers for the engine, in parts: name, colon, value, CRLF."""
        self.accept_encoding: bytes | None = None
        self.content_length: int | None = None
        self.cors = False
        self.preflight_headers: bytes | None = None
        self.expects_continue = False
        self.http10 = False
        self.keep_alive = True
        self.request_id = b""
        self.token = b""
        """The API key as it was sent; empty where there was none."""
        self.api: Api | None = None
        self.key: RoutesKey | None = None
        self.error: ApiError | None = None
        """Why it is refused, known from its head."""
        self.body = b""

    @property
    def stream_framing(self) -> Framing:
        """For a body of unknown length."""
        return CLOSE if self.http10 else CHUNKED

    def head(self, status: int, lines: list[bytes], framing: Framing) -> bytes:
        """An answer's head, complete with its blank line. ``lines``: parts of its headers, each line ended by CRLF."""
        if framing is CHUNKED:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif framing is CLOSE:
            self.keep_alive = False
        if self.cors:
            lines.append(CORS)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self.http10:
            lines.append(b"connection: keep-alive\r\n")
        first = _FIRST_LINES.get(status) or b"HTTP/1.1 %d \r\nx-request-id: " % status
        return b"".join((first, self.request_id, b"\r\n", *lines, b"\r\n"))


_FIRST_LINES = {status: b"HTTP/1.1 %d %b\r\nx-request-id: " % (status, reason) for status, reason in REASONS.items()}


def engine_head(request: Request, target_head: bytes, *, identity: bool) -> bytes:
    """The head that an engine gets. ``identity``: the answer is to be read on the way, so it must not be compressed."""
    if identity:
        encoding = b"\r\naccept-encoding: identity\r\n"
    elif request.accept_encoding is not None:
        encoding = b"\r\naccept-encoding: %b\r\n" % request.accept_encoding
    else:
        encoding = b"\r\n"
    length = b"content-length: %d\r\nx-request-id: " % len(request.body)
    return b"".join(
        (
            *(request.method, b" ", request.path, request.query, target_head),
            *(length, request.request_id, encoding),
            *request.forward,
            b"\r\n",
        )
    )
