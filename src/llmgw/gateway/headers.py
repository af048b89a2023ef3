"""Which headers go where. Names are compared in lower case, as bytes."""

from __future__ import annotations

import re

# Of a client's headers, those that the gateway reads itself. None of them is forwarded as it is.
AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
REQUEST_ID = b"x-request-id"
CONTENT_LENGTH = b"content-length"
TRANSFER_ENCODING = b"transfer-encoding"
EXPECT = b"expect"
CONNECTION = b"connection"
HOST = b"host"
ACCEPT_ENCODING = b"accept-encoding"
ORIGIN = b"origin"
PREFLIGHT_HEADERS = b"access-control-request-headers"
UPGRADE = b"upgrade"

SPECIAL = frozenset(
    (
        *(AUTHORIZATION, API_KEY, REQUEST_ID, CONTENT_LENGTH, TRANSFER_ENCODING, EXPECT, CONNECTION, HOST),
        *(ACCEPT_ENCODING, ORIGIN, PREFLIGHT_HEADERS, UPGRADE),
        # Secrets of the client that are none of the engine's business.
        *(b"cookie", b"proxy-authorization"),
        # Hop by hop.
        *(b"keep-alive", b"proxy-connection", b"te", b"trailer", b"http2-settings"),
    )
)
"""Every other header is forwarded."""

ONCE = frozenset((CONTENT_LENGTH, TRANSFER_ENCODING, HOST, AUTHORIZATION, API_KEY))
"""Where two of them could be understood in two ways."""

RESPONSE_SPECIAL: frozenset[bytes] = frozenset(
    (
        # Read, and said again in the gateway's own words or place.
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"retry-after",
        # Hop by hop.
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"transfer-encoding",
        b"upgrade",
        b"trailer",
        b"te",
        # The gateway's own to say.
        b"x-request-id",
        b"x-accel-buffering",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    )
)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TOKEN_LIST = re.compile(rb"[^\s,]+")


def valid_request_id(value: bytes) -> bool:
    """1 to 128 visible ASCII characters: what may be echoed into a header and a log."""
    return _REQUEST_ID.fullmatch(value) is not None


def named_in(value: bytes) -> set[bytes]:
    """The tokens of a ``Connection`` header, in lower case: names of headers that end at this hop, among others."""
    return set(_TOKEN_LIST.findall(value.lower()))


def without(parts: list[bytes], names: set[bytes]) -> list[bytes]:
    """Header lines in four parts each (name, colon, value, CRLF) but those with one of these names."""
    kept: list[bytes] = []
    for at in range(0, len(parts), 4):
        if parts[at].lower() not in names:
            kept += parts[at : at + 4]
    return kept
