from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.simulator.text import count_tokens, prompt_of, tokens, vector

PROMPTS = st.text(max_size=50)


@given(PROMPTS, st.none() | st.integers(0, 100), st.booleans())
@settings(deadline=None)
def test_never_more_tokens_than_asked_for(prompt: str, most: int | None, endless: bool) -> None:
    said, reason = tokens(prompt, most, (), endless)
    assert (said, reason) == tokens(prompt, most, (), endless)
    if most is not None:
        assert len(said) <= most
        assert reason == (
            "length" if len(said) == most and (endless or said != tokens(prompt, None, (), False)[0]) else "stop"
        )
    else:
        assert reason == "stop"
        assert said


@given(PROMPTS, st.lists(st.sampled_from(["the", "r", " a", "zzz", ""]), max_size=3))
@settings(deadline=None)
def test_text_ends_before_the_first_stop(prompt: str, stop: list[str]) -> None:
    whole = "".join(tokens(prompt, 40, (), True)[0])
    said, reason = tokens(prompt, 40, stop, True)
    text = "".join(said)
    assert whole.startswith(text)
    assert not any(word in text for word in stop if word)
    assert all(said)
    assert reason == ("length" if text == whole else "stop")


@given(PROMPTS, st.integers(1, 300))
@settings(deadline=None)
def test_vectors_are_unit_vectors(text: str, length: int) -> None:
    numbers = vector(text, length)
    assert len(numbers) == length
    assert math.isclose(math.sqrt(sum(number * number for number in numbers)), 1.0, rel_tol=1e-9)


def test_a_longer_answer_begins_with_the_shorter() -> None:
    short, long = tokens("x", 10, (), True)[0], tokens("x", 500, (), True)[0]
    assert long[:10] == short
    assert len(long) == 500


def test_prompts_of_parts() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert prompt_of([{"role": "user", "content": parts}]).startswith("user: what is {")
    assert prompt_of([{"role": "assistant", "content": None}]) == "assistant: "
    assert count_tokens("") == 1
