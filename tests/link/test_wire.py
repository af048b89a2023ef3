"""Frames on the wire: golden files, the schema, what is refused, and how quick it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.link.messages import LogLines, Unknown
from llmgw.link.wire import (
    FRAME_TYPES,
    MAX_FRAME_BYTES,
    Frame,
    FrameTooLarge,
    MalformedFrame,
    close_reason,
    decode,
    encode,
)

from .golden_frames import FRAMES, GOLDEN, SCHEMA, golden_path, golden_text, schema_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def kind(frame: Frame) -> str:
    return frame.type


@pytest.mark.parametrize("frame", FRAMES, ids=kind)
def test_golden_frames(frame: Frame):
    assert golden_path(frame).read_text() == golden_text(frame), "the protocol changed: see golden_frames.py"
    assert decode(golden_path(frame).read_text()) == frame


def test_every_type_has_one_golden_frame_and_no_other_file_is_there():
    assert sorted(type(frame).__name__ for frame in FRAMES) == sorted(kind.__name__ for kind in FRAME_TYPES)
    assert {path.stem for path in GOLDEN.iterdir()} == {frame.type for frame in FRAMES}


def test_the_schema_is_the_codes():
    assert SCHEMA.read_text() == schema_text(), "the protocol changed: see golden_frames.py"


@pytest.mark.parametrize("frame", FRAMES, ids=kind)
def test_fields_of_a_newer_peer_are_ignored(frame: Frame):
    raw = _sprinkled(json.loads(encode(frame)))
    assert decode(json.dumps(raw)) == frame


def test_a_type_that_is_not_known_is_told_as_such():
    assert decode('{"type": "weather", "rain": 1}') == Unknown(type="weather", raw={"type": "weather", "rain": 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a frame is not JSON: '{'"),
        ("[1]", "a frame is not a JSON object: '[1]'"),
        ("null", "a frame is not a JSON object: 'null'"),
        ('{"a": 1}', "a frame has no `type`: '{\"a\": 1}'"),
        ('{"type": 5}', "a frame has no `type`: '{\"type\": 5}'"),
        (
            '{"type": "heartbeat", "epoch": 1, "session": "x"}',
            "a 'heartbeat' frame is malformed: session: Input should be a valid integer, unable to parse string as an "
            "integer; sent_at: Field required",
        ),
        (
            '{"type": "observed", "epoch": 1, "session": 1, "shards": [{"id": "a/0", "generation": 1, "since": 0}]}',
            "a 'observed' frame is malformed: shards.0.state: Field required",
        ),
        ("x" * 100, f"a frame is not JSON: '{'x' * 60}…'"),
    ],
)
def test_malformed_frames_say_what_is_wrong(text: str, words: str):
    with pytest.raises(MalformedFrame) as caught:
        decode(text)
    assert str(caught.value) == words


@given(st.text())
@example("[" * 10_000)
@example('{"type":' * 3_000)
@example('{"type": "heartbeat", "epoch": ' + "9" * 5000 + "}")
@example('{"type": "\\ud800"}')
def test_any_text_gives_a_frame_or_a_refusal(text: str):
    words = ""
    try:
        decode(text)
    except MalformedFrame as error:
        words = str(error)
    assert len(words) < 500


@given(st.sampled_from([frame.type for frame in FRAMES]), st.dictionaries(st.text(max_size=8), JSON), st.data())
def test_any_object_gives_a_frame_or_a_refusal(kind: str, extra: dict[str, object], data: st.DataObject):
    raw = json.loads(golden_path(next(frame for frame in FRAMES if frame.type == kind)).read_text())
    broken = data.draw(st.sampled_from(sorted(raw)))
    raw |= {broken: data.draw(JSON)} | extra
    try:
        decode(json.dumps(raw))
    except MalformedFrame:
        return


def test_a_frame_that_is_too_large_is_not_sent():
    with pytest.raises(FrameTooLarge, match=r"a 'log_lines' frame of \d+ bytes: 16777216 at most can be sent"):
        encode(LogLines(id="1", lines=("x" * MAX_FRAME_BYTES,)))


def test_what_is_no_frame_of_ours_is_not_sent():
    with pytest.raises(TypeError):
        encode(Unknown(type="x"))


def test_a_close_reason_fits_and_stays_text():
    assert close_reason("ä" * 100).decode() == "ä" * 60
    assert close_reason("x€" * 100).decode()


def _sprinkled(value: object) -> object:
    """The value with a field that nobody knows in every object but the free-form ones."""
    if isinstance(value, list):
        return [_sprinkled(item) for item in value]
    if isinstance(value, dict):
        free = ("labels", "launch_modes", "loads", "node_selector")
        if value.get("type") in ("routes_ack", "traffic"):
            free += ("traffic", "replicas")  # By replica: a name that nobody knows is no field.
        return {key: item if key in free else _sprinkled(item) for key, item in value.items()} | {"of_tomorrow": [1]}
    return value
