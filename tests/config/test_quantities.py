from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.faults import Refused
from llmgw.config.quantities import format_duration, format_size, parse_duration, parse_size

UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("24h", 86400.0),
        ("10m", 600.0),
        ("1.5s", 1.5),
        ("1d12h", 129600.0),
        ("0s", 0.0),
        ("1h1ms", 3600.001),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "5S", "-5s", "+5s", "1s1m", "1m1m", "1e3s", ".5s", "5.s", "٥s", "5sec", "9999999999s"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(Refused):
        parse_duration(text)


@given(st.integers(0, 10**11))
@settings(deadline=None)
def test_a_duration_written_is_the_duration_read(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.dictionaries(st.sampled_from(list(UNITS)), st.integers(0, 9999), min_size=1))
@settings(deadline=None)
def test_a_duration_is_the_sum_of_its_parts(parts: dict[str, int]) -> None:
    text = "".join(f"{parts[unit]}{unit}" for unit in UNITS if unit in parts)
    assert parse_duration(text) == pytest.approx(sum(number * UNITS[unit] for unit, number in parts.items()))


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("512MiB", 2**29), ("1.5GiB", 3 * 2**29), ("0B", 0), ("1TiB", 2**40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("16GB", "write 16GiB"),
        ("16G", "write 16GiB"),
        ("512m", "write 512MiB"),
        ("16", "16GiB"),
        ("lots", "without blanks"),
        ("1 GiB", "write 1GiB"),
        ("-1GiB", "without blanks"),
        ("16gib", "write 16GiB"),
    ],
)
def test_no_sizes(text: str, hint: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_size(text)
    assert hint in caught.value.hint


@given(st.integers(0, 2**49))
@settings(deadline=None)
def test_a_size_written_is_the_size_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.text())
@settings(deadline=None)
def test_junk_is_refused_and_nothing_worse(text: str) -> None:
    for parse in (parse_duration, parse_size):
        with suppress(Refused):
            assert parse(text) >= 0
