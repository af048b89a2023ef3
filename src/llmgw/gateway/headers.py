"""Which headers go where. Names are compared in lower case, as bytes."""

from __future__ import annotations

import re
from enum import IntEnum


class Fate(IntEnum):
    """What happens to a client's header on its way to an engine; any that is not listed is forwarded."""

    DROP = 0
    AUTHORIZATION = 1
    API_KEY = 2
    REQUEST_ID = 3
    CONTENT_LENGTH = 4
    TRANSFER_ENCODING = 5
    EXPECT = 6
    CONNECTION = 7
    HOST = 8
    ACCEPT_ENCODING = 9
    ORIGIN = 10
    PREFLIGHT_HEADERS = 11
    UPGRADE = 12


REQUEST: dict[bytes, Fate] = {
    b"authorization": Fate.AUTHORIZATION,
    b"x-api-key": Fate.API_KEY,
    b"x-request-id": Fate.REQUEST_ID,
    b"content-length": Fate.CONTENT_LENGTH,
    b"transfer-encoding": Fate.TRANSFER_ENCODING,
    b"expect": Fate.EXPECT,
    b"connection": Fate.CONNECTION,
    b"host": Fate.HOST,
    b"accept-encoding": Fate.ACCEPT_ENCODING,
    b"origin": Fate.ORIGIN,
    b"access-control-request-headers": Fate.PREFLIGHT_HEADERS,
    b"upgrade": Fate.UPGRADE,
    # Secrets of the client that are none of the engine's business.
    b"cookie": Fate.DROP,
    b"proxy-authorization": Fate.DROP,
    # Hop by hop.
    b"keep-alive": Fate.DROP,
    b"proxy-connection": Fate.DROP,
    b"te": Fate.DROP,
    b"trailer": Fate.DROP,
    b"http2-settings": Fate.DROP,
}

RESPONSE_DROPPED: frozenset[bytes] = frozenset(
    (
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


def without(lines: list[bytes], names: set[bytes]) -> list[bytes]:
    """``lines`` (``name: value CRLF`` each) but those with one of these names."""
    return [line for line in lines if line.split(b":", 1)[0].lower() not in names]
