"""What a client is told when it gets no answer: OpenAI's error object.

The official clients unwrap ``error`` and show ``message``, ``type``, ``param`` and ``code``; they retry 408, 409, 429
and 5xx unless ``x-should-retry`` says no, after ``retry-after``.
"""

from __future__ import annotations

import msgspec

RETRY_AFTER_BUSY_S = 1
RETRY_AFTER_DOWN_S = 5

REASONS: dict[int, bytes] = {
    200: b"OK",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    414: b"URI Too Long",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


class ApiError(Exception):
    """A refusal or failure in OpenAI's form. ``message`` says what happened, what was expected and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.allow = allow

    def body(self) -> bytes:
        return error_body(self.message, type=self.type, code=self.code, param=self.param)

    def header_lines(self) -> bytes:
        """The headers of its own that this answer carries, each ended by CRLF."""
        lines = b""
        if self.retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % self.retry_after_s
        if self.should_retry is not None:
            lines += b"x-should-retry: %b\r\n" % (b"true" if self.should_retry else b"false")
        if self.allow is not None:
            lines += b"allow: %b\r\n" % self.allow.encode()
        if self.status == 401:
            lines += b"www-authenticate: Bearer\r\n"
        return lines


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


def bad_gateway(message: str, code: str) -> ApiError:
    """The replicas that could be tried have been: a client's own retries would only repeat that."""
    return ApiError(502, message, type="server_error", code=code, should_retry=False)


def gateway_timeout(message: str) -> ApiError:
    return ApiError(504, message, type="server_error", code="timeout", should_retry=False)


def error_body(message: str, *, type: str, code: str | int | None = None, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def normalised(body: bytes) -> bytes | None:
    """The error object for the older engine form ``{"object": "error", "message": ...}``; None where it isn't one.

    Clients don't know the older form as an error: inside a stream it would pass for a chunk.
    """
    if b'"error"' not in body:
        return None
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(said, dict) or said.get("object") != "error" or "error" in said:
        return None
    kind, code, param = said.get("type"), said.get("code"), said.get("param")
    return error_body(
        str(said.get("message") or "the engine reported an error without a message"),
        type=kind if isinstance(kind, str) else "server_error",
        code=code if isinstance(code, str | int) else None,
        param=param if isinstance(param, str) else None,
    )
