"""The client's side: one HTTP/1.1 (or 1.0) connection, parsed by httptools.

The parser's callbacks note what came; what follows from it is done after each read. Requests on one connection are
answered one after the other; those sent ahead wait, parsed, and reading pauses when they grow large.

An end of the client's sending is taken for its leaving: on the wire the two look alike, and an engine must not work on
for nobody.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol, cast

import httptools
import structlog

from llmgw.gateway.errors import ApiError
from llmgw.gateway.headers import (
    ACCEPT_ENCODING,
    API_KEY,
    AUTHORIZATION,
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
    ONCE,
    ORIGIN,
    PREFLIGHT_HEADERS,
    REQUEST_ID,
    SPECIAL,
    TRANSFER_ENCODING,
    UPGRADE,
    named_in,
    valid_request_id,
    without,
)
from llmgw.gateway.relay import LENGTH
from llmgw.gateway.request import Request, new_request_id
from llmgw.gateway.settings import Timeouts

HIGH_WATER_BYTES = 64 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
TARGET_LIMIT_BYTES = 16 * 1024
AHEAD_LIMIT_BYTES = 64 * 1024
"""Of requests sent ahead of an answer; beyond it nothing more is read for now."""
DROPPED_BODY_BYTES = 64 * 1024
"""A refused request's body up to this size is read and dropped, so that the connection can go on."""
_log = structlog.get_logger("llmgw.gateway")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Phase(Enum):
    """How far the next request has come, whether or not an earlier one is still being answered."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    LINGERING = "lingering"
    """A refusal has been sent while the client was still sending: what it sends is read and dropped for a while."""
    CLOSING = "closing"


# A class' attributes are slow to look up where the class is an Enum.
IDLE, HEAD, BODY, LINGERING, CLOSING = Phase


class Exchange(Protocol):
    def client_gone(self) -> None: ...

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...


class Service(Protocol):
    """What the gateway does with requests."""

    timeouts: Timeouts
    body_limit_bytes: int
    stopping: bool
    connections: set[ClientConnection]

    def admit(self, request: Request) -> None:
        """Sets ``request.error`` where the head alone is reason to refuse it (route, method, key)."""

    def begin(self, connection: ClientConnection, request: Request) -> None:
        """Answers, or starts what will, and sets ``connection.exchange`` before it does."""

    def count_refusal(self, error: ApiError) -> None:
        """A request was refused before it was begun."""

    def count_bad_request(self) -> None:
        """What came was not HTTP."""


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_ahead_bytes",
        "_answering",
        "_body",
        "_body_bytes",
        "_body_limit",
        "_buffered",
        "_fault",
        "_head_bytes",
        "_head_done",
        "_last",
        "_lines",
        "_linger",
        "_parser",
        "_phase",
        "_pumping",
        "_reading_paused",
        "_ready",
        "_request",
        "_service",
        "_since",
        "_special",
        "_stalled_since",
        "_transport",
        "_url",
        "exchange",
        "paused",
        "write",
    )

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport = cast(asyncio.Transport, None)
        self._parser = httptools.HttpRequestParser(self)
        self.exchange: Exchange | None = None
        self._ready: deque[Request] = deque()
        """Requests that have come whole and are not begun."""
        self._phase = IDLE
        self._since = 0.0
        """Since when the phase lasts; in BODY, since when nothing came. 0: since the next look at the clock."""
        self._fault: ApiError | None = None
        self._answering: Request | None = None
        self._linger = False
        """The client may still be sending when its last answer has been written."""
        self._reading_paused = False
        self._last = False
        """No request is taken after those in ``_ready``."""
        self._pumping = False
        self._ahead_bytes = 0
        self._stalled_since = 0.0
        self._buffered = 0
        self.paused = False
        self.write: Callable[[bytes], None]
        self._begin_message()

    def _begin_message(self) -> None:
        self._url = b""
        self._lines: list[bytes] = []
        """Of the headers to forward, in parts: name, colon, value, CRLF."""
        self._special: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._head_done = False
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_limit = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.write = self._transport.write
        self._service.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.connections.discard(self)
        self._phase = CLOSING
        self._leave()

    def pause_writing(self) -> None:
        self.paused = True
        self._stalled_since = time.monotonic()
        self._buffered = self._transport.get_write_buffer_size()
        if self.exchange is not None:
            self.exchange.client_paused()

    def resume_writing(self) -> None:
        self.paused = False
        if self.exchange is not None:
            self.exchange.client_resumed()

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if self._last or phase is CLOSING:
            return
        if phase is IDLE:
            self._phase = HEAD
            self._since = 0.0
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._last = True  # it has no body, and is answered as if it had not asked for an upgrade
        except httptools.HttpParserError as error:
            self._malformed(error)
        if self._head_bytes > HEAD_LIMIT_BYTES and not self._head_done and self._fault is None:
            self._fault = _head_too_large(len(self._url))
        if self._fault is not None:
            self._stop_reading(self._fault)
        elif self._request is not None:
            self._body_came(self._request)
        if self.exchange is not None:
            self._came_ahead(len(data))
        elif self._ready:
            self._pump()

    def eof_received(self) -> None:
        self._phase = CLOSING
        self._leave()

    def _leave(self) -> None:
        self._ready.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_gone()

    def _came_ahead(self, size: int) -> None:
        self._ahead_bytes += size
        if self._ahead_bytes > AHEAD_LIMIT_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _malformed(self, error: Exception) -> None:
        if self._last:
            return  # something after a request that was to be the last
        if isinstance(error, httptools.HttpParserCallbackError):
            _log.error("a request could not be taken in", exc_info=error)
            self._fault = ApiError(500, "the gateway failed; its log says how", type="server_error", code="internal")
            return
        self._service.count_bad_request()
        self._fault = ApiError(400, f"this is not an HTTP/1.1 request: {error}", code="bad_request")

    def _stop_reading(self, error: ApiError, request: Request | None = None) -> None:
        """Refuses what is coming, once earlier requests are answered, and takes nothing after it."""
        if request is None:
            request = Request(b"", b"", b"", [])
            request.request_id = new_request_id()
        request.error = error
        request.keep_alive = False
        self._fault = self._request = None
        self._last = self._linger = True
        self._ready.append(request)

    # httptools' callbacks: they note, and never raise

    def on_url(self, url: bytes) -> None:
        if self._head_done:
            self._begin_message()
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # trailers
        lowered = name.lower()
        if lowered not in SPECIAL:
            self._lines.extend((name, b": ", value, b"\r\n"))
        elif lowered in self._special:
            self._again(lowered, value)
        else:
            self._special[lowered] = value

    def _again(self, name: bytes, value: bytes) -> None:
        if name in ONCE:
            self._fault = ApiError(400, f"the header {name.decode()!r} is given more than once", code="bad_request")
        elif name == CONNECTION:
            self._special[name] += b"," + value
        else:
            self._special[name] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._fault is not None:
            return
        parser, special = self._parser, self._special
        keep_alive = parser.should_keep_alive()
        # HTTP/1.0 stays open only where a Connection header asks for it.
        http10 = (not keep_alive or CONNECTION in special) and parser.get_http_version() == "1.0"
        if self._head_bytes > TARGET_LIMIT_BYTES or HOST not in special or not special.keys().isdisjoint(_WATCHED):
            self._fault = self._head_fault(http10)
            if self._fault is not None:
                return
        target = self._url
        path, query = (target, b"") if b"?" not in target and target[:1] == b"/" else _origin_form(target)
        request = Request(parser.get_method(), path, query, self._lines)
        request.keep_alive = keep_alive
        request.http10 = http10
        self._read_special(request, special)
        self._request = request
        self._service.admit(request)
        self._phase = BODY
        api = request.api
        # What is not for an engine has no use for a body, and may come without a key.
        self._body_limit = self._service.body_limit_bytes if api is not None and api.proxied else DROPPED_BODY_BYTES

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        request = self._request
        if request is not None and request.error is None:
            if self._body_bytes > self._body_limit:
                request.error = _body_too_large(self._body_limit)
                self._body.clear()
            else:
                self._body.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        if request is None or self._fault is not None:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        self._ready.append(request)
        if not request.keep_alive:
            self._last = True
        self._phase = IDLE

    # Reading a head

    def _head_fault(self, http10: bool) -> ApiError | None:
        special = self._special
        if self._head_bytes > HEAD_LIMIT_BYTES and self._head_size() > HEAD_LIMIT_BYTES:
            return _head_too_large(len(self._url))
        if len(self._url) > TARGET_LIMIT_BYTES:
            return _target_too_long(len(self._url))
        if TRANSFER_ENCODING in special:
            coding = special[TRANSFER_ENCODING]
            if CONTENT_LENGTH in special or http10:
                return ApiError(
                    400,
                    "Transfer-Encoding stands beside Content-Length, or in HTTP/1.0: send one of the two",
                    code="bad_request",
                )
            if coding.strip().lower() != b"chunked":
                return ApiError(
                    400, f"Transfer-Encoding {coding.decode('latin-1')!r}: only 'chunked' is known", code="bad_request"
                )
        if HOST not in special and not http10:
            return ApiError(400, "HTTP/1.1 requires a Host header", code="bad_request")
        if UPGRADE in special and (TRANSFER_ENCODING in special or special.get(CONTENT_LENGTH, b"0") != b"0"):
            return ApiError(400, "a request with a body can't be upgraded: leave Upgrade out", code="bad_request")
        return None

    def _head_size(self) -> int:
        return len(self._url) + sum(map(len, self._lines)) + sum(map(len, self._special.values()))

    def _read_special(self, request: Request, special: dict[bytes, bytes]) -> None:
        get = special.get
        token = get(AUTHORIZATION)
        if token is not None and token[:7].lower() == b"bearer ":
            request.token = token[7:].strip()
        length = get(CONTENT_LENGTH)
        if length is not None:
            request.content_length = int(length)
        encoding = request.accept_encoding = get(ACCEPT_ENCODING)
        read = (HOST in special) + (token is not None) + (length is not None) + (encoding is not None)
        if len(special) > read:
            self._read_rare(request, special)
        if not request.token:
            request.token = get(API_KEY, b"")
        if not request.request_id:
            request.request_id = new_request_id()

    def _read_rare(self, request: Request, special: dict[bytes, bytes]) -> None:
        get = special.get
        request_id = get(REQUEST_ID)
        if request_id is not None and valid_request_id(request_id):
            request.request_id = request_id
        if ORIGIN in special:
            request.cors = True
            request.preflight_headers = get(PREFLIGHT_HEADERS)
        if EXPECT in special and not request.http10:
            request.expects_continue = get(EXPECT, b"").lower() == b"100-continue"
        connection = get(CONNECTION)
        if connection is not None and connection.lower() not in (b"keep-alive", b"close"):
            request.forward = without(request.forward, named_in(connection))

    def _body_came(self, request: Request) -> None:
        """After a read that ended inside a request's body, or before it."""
        self._since = 0.0
        limit = self._body_limit
        if request.error is None and request.content_length is not None and request.content_length > limit:
            request.error = _body_too_large(limit)
        if request.error is not None:
            dropped = max(request.content_length or 0, self._body_bytes)
            if dropped > DROPPED_BODY_BYTES or request.expects_continue:
                self._stop_reading(request.error, request)
        elif request.expects_continue:
            request.expects_continue = False
            if self.exchange is None and not self._body_bytes:
                self.write(CONTINUE)

    # Going on

    def _pump(self) -> None:
        """Begins requests until one is under way."""
        if self._pumping:
            return
        self._pumping = True
        while self._ready and self.exchange is None:
            self._answering = request = self._ready.popleft()
            if request.error is not None:
                self._service.count_refusal(request.error)
                self.refuse(request, request.error)
            else:
                self._service.begin(self, request)
        self._pumping = False
        if self.exchange is None and self._reading_paused:
            self._ahead_bytes = 0
            self._reading_paused = False
            self._transport.resume_reading()

    def answer(self, request: Request, status: int, lines: bytes, body: bytes) -> None:
        """A whole answer of the gateway's own. ``lines``: its headers, each ended by CRLF."""
        if self._service.stopping:
            request.keep_alive = False
        length = b"content-length: %d\r\n" % len(body) if status != 204 else b""
        if request.method == b"HEAD":
            body = b""
        self.write(request.head(status, [lines, length], LENGTH) + body)
        self.done()

    def refuse(self, request: Request, error: ApiError) -> None:
        """Answers with an error object."""
        self.answer(request, error.status, b"content-type: application/json\r\n" + error.header_lines(), error.body())

    def done(self) -> None:
        """The answer under way has been written: on to the next request, or the end."""
        self.exchange = None
        request = self._answering
        if request is None or not request.keep_alive or self._service.stopping:
            self._end()
            return
        self._since = 0.0
        if self._ready or self._reading_paused:
            self._pump()

    def cut(self) -> None:
        """Ends the connection so that what was sent can't be taken for whole."""
        request = self._answering
        if request is not None and request.http10:
            # There the end of the connection is the end of the answer: only a reset says otherwise.
            handle = self._transport.get_extra_info("socket")
            if handle is not None:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._phase = CLOSING
        self._transport.abort()

    def _end(self) -> None:
        self._ready.clear()
        self._last = True
        self._since = 0.0
        if self._linger:
            # Closing now would reset the connection, and the client might never read why.
            self._phase = LINGERING
            if self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._phase = CLOSING
            self._transport.close()

    def stop(self) -> None:
        """The gateway is stopping: a connection that nothing is under way on is closed."""
        if self.exchange is None and not self._ready and self._phase is IDLE:
            self._end()

    # Time

    def check(self, now: float) -> None:
        """Looks at the limits; called about every second."""
        if self.exchange is not None:
            return
        if not self._since:
            self._since = now
        limits, lasted, phase = self._service.timeouts, now - self._since, self._phase
        if phase is IDLE:
            if lasted >= limits.keep_alive_s:
                self._end()
        elif phase is HEAD:
            if lasted >= limits.head_s:
                self._too_slow(f"the request's head did not come within {limits.head_s:g} s")
        elif phase is BODY:
            if lasted >= limits.body_stall_s:
                self._too_slow(f"nothing of the request's body came for {limits.body_stall_s:g} s")
        elif lasted >= (limits.linger_s if phase is LINGERING else limits.client_stall_s):
            self._transport.abort()

    def _too_slow(self, why: str) -> None:
        self._stop_reading(ApiError(408, f"{why}: send it again", type="timeout", code="timeout"), self._request)
        self._pump()

    def stalled(self, now: float, limit_s: float) -> bool:
        """While ``paused``: whether the client has taken nothing of its answer for that long."""
        buffered = self._transport.get_write_buffer_size()
        if buffered != self._buffered:
            self._buffered = buffered
            self._stalled_since = now
        return now - self._stalled_since >= limit_s


_WATCHED = frozenset((TRANSFER_ENCODING, UPGRADE))
"""Headers that may make a head one that is refused."""


def _origin_form(target: bytes) -> tuple[bytes, bytes]:
    """Path and query (with its mark) of a target that may be absolute, as a client sends it to a proxy."""
    if target[:7].lower() == b"http://" or target[:8].lower() == b"https://":
        slash = target.find(b"/", target.index(b"//") + 2)
        target = target[slash:] if slash >= 0 else b"/"
    path, mark, query = target.partition(b"?")
    return path, mark + query


def _head_too_large(target_bytes: int) -> ApiError:
    if target_bytes > TARGET_LIMIT_BYTES:
        return _target_too_long(target_bytes)
    return ApiError(431, f"the request's head is larger than {HEAD_LIMIT_BYTES} bytes", code="headers_too_large")


def _target_too_long(size: int) -> ApiError:
    return ApiError(
        414, f"the request's URL has {size} bytes or more; {TARGET_LIMIT_BYTES} is the limit", code="url_too_long"
    )


def _body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than the limit of {limit} bytes", code="body_too_large")
