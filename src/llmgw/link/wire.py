"""Frames to JSON text and back. The dataclasses of ``llmgw.link.messages`` are the schema."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Discriminator, TypeAdapter, ValidationError
from pydantic_core import from_json

from llmgw.link.messages import (
    Desired,
    Heartbeat,
    Hello,
    LogLines,
    LogsCancel,
    LogsRequest,
    Observed,
    Refused,
    Renew,
    Routes,
    RoutesAck,
    TrafficReport,
    Unknown,
    Welcome,
)

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""A larger frame is neither sent nor taken."""

Frame = (
    Hello
    | Welcome
    | Refused
    | Desired
    | Observed
    | Heartbeat
    | Routes
    | RoutesAck
    | TrafficReport
    | LogsRequest
    | LogsCancel
    | LogLines
    | Renew
    | Unknown
)
FRAME_TYPES: Final[tuple[type[Any], ...]] = (
    Hello,
    Welcome,
    Refused,
    Desired,
    Observed,
    Heartbeat,
    Routes,
    RoutesAck,
    TrafficReport,
    LogsRequest,
    LogsCancel,
    LogLines,
    Renew,
)

_Known = Annotated[
    Hello
    | Welcome
    | Refused
    | Desired
    | Observed
    | Heartbeat
    | Routes
    | RoutesAck
    | TrafficReport
    | LogsRequest
    | LogsCancel
    | LogLines
    | Renew,
    Discriminator("type"),
]
_decoder: Final[TypeAdapter[Any]] = TypeAdapter(_Known)
_encoders: Final[dict[type[Any], TypeAdapter[Any]]] = {kind: TypeAdapter(kind) for kind in FRAME_TYPES}


class MalformedFrame(ValueError):
    """A frame that can't be read; the message says which field and what was expected.

    ``raw`` is the JSON object, where it was one: a hello of a protocol to come can still name its version.
    """

    def __init__(self, words: str, raw: dict[str, object] | None = None) -> None:
        super().__init__(words)
        self.raw = raw or {}


class FrameTooLarge(ValueError):
    """A frame above MAX_FRAME_BYTES. Nothing was sent."""


def encode(frame: Frame) -> str:
    """The frame as JSON text. Raises FrameTooLarge."""
    encoder = _encoders.get(type(frame))
    if encoder is None:
        raise TypeError(f"{type(frame).__name__} is not a frame that can be sent")
    data = encoder.dump_json(frame)
    if len(data) > MAX_FRAME_BYTES:
        kind = getattr(frame, "type", "?")
        raise FrameTooLarge(f"a {kind!r} frame of {len(data)} bytes: {MAX_FRAME_BYTES} at most can be sent")
    return data.decode()


def decode(text: str) -> Frame:
    """The frame in ``text``. A type that is not known gives Unknown; raises MalformedFrame for anything else.

    Fields that are not known are ignored.
    """
    try:
        frame: Frame = _decoder.validate_json(text)
    except ValidationError as error:
        return _unknown_or_raise(text, error)
    return frame


def close_reason(words: str) -> bytes:
    """Words cut to what a WebSocket's close frame holds (RFC 6455, 5.5: 125 bytes with the code)."""
    return words.encode()[:120].decode(errors="ignore").encode()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of all frames."""
    return _decoder.json_schema(mode="serialization")


def _unknown_or_raise(text: str, error: ValidationError) -> Unknown:
    kinds = {entry["type"] for entry in error.errors(include_url=False, include_input=False, include_context=False)}
    if "json_invalid" in kinds:
        raise MalformedFrame(f"a frame is not JSON: {_shorten(text)}") from error
    raw = from_json(text)
    if not isinstance(raw, dict):
        raise MalformedFrame(f"a frame is not a JSON object: {_shorten(text)}") from error
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise MalformedFrame(f"a frame has no `type`: {_shorten(text)}", raw) from error
    if kinds == {"union_tag_invalid"}:
        return Unknown(type=kind, raw=raw)
    raise MalformedFrame(f"a {kind!r} frame is malformed: {_faults(kind, error)}", raw) from error


def _faults(kind: str, error: ValidationError) -> str:
    entries = error.errors(include_url=False, include_input=False, include_context=False)
    words = [
        f"{'.'.join(str(part) for part in entry['loc'] if part != kind) or 'the frame'}: {entry['msg']}"
        for entry in entries[:3]
    ]
    more = f" (and {len(entries) - 3} more)" if len(entries) > 3 else ""
    return "; ".join(words) + more


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
