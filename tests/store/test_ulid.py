from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.store.ulid import LENGTH, Ulids, decode, encode, time_of


@given(st.lists(st.floats(min_value=0, max_value=4e9), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_each_is_greater_than_the_one_before_whatever_the_clock_does(times: list[float], random: object) -> None:
    clock = iter(times)
    ulids = Ulids(lambda: next(clock), os.urandom)
    made = [ulids.next() for _ in times]
    assert made == sorted(set(made))
    assert {len(ulid) for ulid in made} == {LENGTH}


def test_it_tells_its_time() -> None:
    assert time_of(Ulids(lambda: 1_764_439_403.257, os.urandom).next()) == 1_764_439_403.257


def test_the_same_clock_and_randomness_make_the_same_ids() -> None:
    first, second = (Ulids(lambda: 5.0, lambda n: bytes(range(n))) for _ in range(2))
    assert [first.next() for _ in range(3)] == [second.next() for _ in range(3)]


def test_an_example_of_the_specification() -> None:
    assert encode(0) == "0" * 26
    assert encode(2**128 - 1) == "7" + "Z" * 25
    assert time_of("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1_469_922_850.259


def test_randomness_that_runs_over_goes_into_the_next_millisecond() -> None:
    ulids = Ulids(lambda: 1.0, lambda n: b"\xff" * n)
    first, second = ulids.next(), ulids.next()
    assert (time_of(first), time_of(second)) == (1.0, 1.001)
    assert second.endswith("0" * 16)


def test_ids_follow_the_newest_of_an_earlier_run_also_when_the_clock_was_set_back() -> None:
    last = Ulids(lambda: 2_000_000_000.0, os.urandom).next()
    assert Ulids(lambda: 1_000_000_000.0, os.urandom, after=last).next() > last


@given(st.integers(min_value=0, max_value=2**128 - 1))
def test_decode_takes_back_encode(value: int) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("text", ["", "0" * 25, "8" + "0" * 25, "U" * 26, "i" * 26, "0" * 27])
def test_what_is_no_ulid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a ULID"):
        decode(text)


@pytest.mark.parametrize("value", [-1, 2**128])
def test_what_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode(value)
