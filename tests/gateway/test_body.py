"""What is read in a request's body, against a full JSON parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.body import Asked, read_asked
from llmgw.gateway.errors import ApiError, normalised

KEYS = st.one_of(st.sampled_from(["model", "stream", "mode", "Model", "streams", "messages"]), st.text(max_size=8))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=12), st.just('"model": "x"'), st.just("\\")
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=8
)


def written(pairs: list[tuple[str, Any]], escape: bool, ascii_only: bool) -> bytes:
    """An object with these members in this order, keys twice where they are twice."""

    def name(key: str) -> str:
        if escape and key.isascii() and key.isalpha():
            return '"' + "".join(f"\\u{ord(letter):04x}" for letter in key) + '"'
        return json.dumps(key, ensure_ascii=ascii_only)

    members = [f"{name(key)} : {json.dumps(value, ensure_ascii=ascii_only)}" for key, value in pairs]
    return ("{" + ",\n".join(members) + "}").encode("utf-8", "surrogatepass")


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_duplicates_are_seen_wherever_a_parser_would_see_them(
    pairs: list[tuple[str, Any]], with_model: bool, escape: bool, ascii_only: bool
) -> None:
    if with_model:
        pairs = [*pairs, ("model", "m")]
    body = written(pairs, escape, ascii_only)
    models = [value for key, value in pairs if key == "model"]
    streams = [value for key, value in pairs if key == "stream"]
    asked, refused = None, None
    try:
        asked = read_asked(body)
    except ApiError as error:
        refused = error
    if refused is not None:
        well_formed = all(isinstance(value, str) for value in models)
        well_formed = well_formed and all(value is None or isinstance(value, bool) for value in streams)
        assert refused.status == 400
        assert len(models) != 1 or len(streams) > 1 or not well_formed or not _is_utf8(body)
    else:
        assert asked is not None
        assert ([asked.model], [asked.stream]) == (models, streams or [None])


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_nothing_but_a_refusal_comes_of_noise(noise: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_asked(noise)
    assert refused.value.status == 400


LARGE = {
    "backslashes": b'{"model":"m","x":"' + b"\\\\" * 2_000_000 + b'","y":{"model":1}}',
    "quotes": b'{"model":"m","x":"\\u006d' + b'\\"' * 2_000_000 + b'"}',
    "depth": b'{"model":"m","model2":' + b"[" * 500 + b"]" * 500 + b',"z":{"model":1,"stream":[{"stream":1}]}}',
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_odd_bodies_cost_little(body: bytes) -> None:
    """What grew with the square of such a body would run into the limit that every test has."""
    assert read_asked(body) == Asked(model="m")


def test_a_name_given_twice_is_refused_however_long_it_is() -> None:
    with pytest.raises(ApiError, match="'model' is given more than once"):
        read_asked(b'{"model":"m","model":"' + b"x" * 5_000_000 + b'"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"error":{"message":"x"}}',
        b'{"object":"error","error":{}}',
        b'["error"]',
        b'{"object":"error"',
        b"\xff",
    ],
)
def test_what_is_not_the_older_error_form_is_left_alone(body: bytes) -> None:
    assert normalised(body) is None


def test_the_older_error_form_without_anything_else() -> None:
    said = json.loads(normalised(b'{"object":"error"}') or b"")["error"]
    assert said == {
        "message": "the engine reported an error without a message",
        "type": "server_error",
        "param": None,
        "code": None,
    }
