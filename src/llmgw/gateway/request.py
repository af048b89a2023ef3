"""A client's request as the gateway holds it, and the head of what is answered to it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from os import urandom

from llmgw.gateway.errors import REASONS, ApiError
from llmgw.gateway.relay import Framing
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
        """Header lines for the engine, ``name: value CRLF`` each."""
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
        return Framing.CLOSE if self.http10 else Framing.CHUNKED

    def head(self, status: int, lines: bytes, framing: Framing) -> bytes:
        """An answer's head, to which ``lines`` (each ended by CRLF) contributes, complete with its blank line."""
        reason = REASONS.get(status, b"")
        extra = b"transfer-encoding: chunked\r\n" if framing is Framing.CHUNKED else b""
        if framing is Framing.CLOSE:
            self.keep_alive = False
        if self.cors:
            extra += CORS
        if not self.keep_alive:
            extra += b"connection: close\r\n"
        elif self.http10:
            extra += b"connection: keep-alive\r\n"
        return b"HTTP/1.1 %d %b\r\n%bx-request-id: %b\r\n%b\r\n" % (status, reason, lines, self.request_id, extra)


def engine_head(request: Request, target_head: bytes, *, identity: bool) -> bytes:
    """The head that an engine gets. ``identity``: the answer is to be read on the way, so it must not be compressed."""
    encoding = b""
    if identity:
        encoding = b"accept-encoding: identity\r\n"
    elif request.accept_encoding is not None:
        encoding = b"accept-encoding: %b\r\n" % request.accept_encoding
    return b"%b %b%b%bcontent-length: %d\r\nx-request-id: %b\r\n%b%b\r\n" % (
        request.method,
        request.path,
        request.query,
        target_head,
        len(request.body),
        request.request_id,
        encoding,
        b"".join(request.forward),
    )
