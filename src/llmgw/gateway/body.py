"""What the gateway reads in a request's body: ``model`` and ``stream``, and nothing else.

The bytes go on to the engine as they came. An engine must not understand another ``model`` or ``stream`` than the
gateway did, so a body that names either twice at its top level is refused.
"""

from __future__ import annotations

import re

import msgspec

from llmgw.gateway.errors import ApiError


class Asked(msgspec.Struct):
    """``model`` and ``stream`` as the client wrote them."""

    model: str
    stream: bool | None = None


_DECODE = msgspec.json.Decoder(Asked).decode

# Only these escapes can spell a letter of "model" or "stream"; those of other characters, as in non-Latin text, can't.
_ESCAPED_LETTER = re.compile(rb"\\u00(?:6[1459cCdDfF]|7[234])")
# A whole string, or a bracket. Possessive, so that an odd body costs linear time.
_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?|[{}\[\]]', re.DOTALL)


def read_asked(body: bytes) -> Asked:
    """Raises ApiError (400) where the body is no JSON object with a string ``model``, or names a field twice."""
    try:
        asked = _DECODE(body)
    except msgspec.ValidationError as error:
        raise _wrong_shape(body, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not body:
            raise ApiError(400, "the request has no body: expected a JSON object with 'model'") from None
        raise ApiError(400, f"the request's body is not JSON: {error}", code="invalid_json") from None
    if body.count(b'"model"') > 1 or body.count(b'"stream"') > 1 or (b"\\" in body and _ESCAPED_LETTER.search(body)):
        _refuse_duplicates(body)
    return asked


def _wrong_shape(body: bytes, why: str) -> ApiError:
    param = "stream" if "$.stream" in why else "model" if "model" in why else None
    if "missing required field" in why:
        message = "you must provide a 'model': the request's body has none at its top level"
    elif param is not None:
        message = f"'{param}' has the wrong type: {why}"
    else:
        message = f"the request's body must be a JSON object: {why}"
    return ApiError(400, message, param=param)


def _refuse_duplicates(body: bytes) -> None:
    seen: set[bytes] = set()
    for name in _top_level_keys(body):
        if name in (b"model", b"stream"):
            if name in seen:
                raise ApiError(
                    400,
                    f"'{name.decode()}' is given more than once at the top level of the request: send it once",
                    param=name.decode(),
                    code="duplicate_field",
                )
            seen.add(name)


def _top_level_keys(body: bytes) -> list[bytes]:
    """Keys of the outermost object, unescaped. ``body`` is known to be valid JSON."""
    keys: list[bytes] = []
    depth = 0
    for token in _TOKEN.finditer(body):
        first = token[0][:1]
        if first == b'"':
            if depth == 1 and token[2] is not None:
                keys.append(_unescaped(token[1]))
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
    return keys


def _unescaped(key: bytes) -> bytes:
    if b"\\" not in key:
        return key
    return str(msgspec.json.decode(b'"' + key + b'"')).encode("utf-8", "surrogatepass")
