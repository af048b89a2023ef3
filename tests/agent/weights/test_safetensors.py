from __future__ import annotations

import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.weights.safetensors import fault
from tests.agent.weights.models import safetensors


def said(content: bytes) -> str | None:
    return fault(io.BytesIO(content), len(content))


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def test_a_whole_one() -> None:
    assert said(safetensors()) is None
    assert said(safetensors(b"")) is None
    assert said(with_header(b"{}  ")) is None


def test_the_tensor_that_ends_last_counts_wherever_it_is_named() -> None:
    content = safetensors(b"weights", u={"dtype": "U8", "shape": [2], "data_offsets": [0, 2]})
    assert said(content) is None
    assert said(content[:-1]) is not None


def test_shorter_and_longer_ones_are_named_with_both_sizes() -> None:
    content = safetensors()
    size = len(content)
    assert said(content[:-1]) == f"is cut short: it has {size - 1} bytes, and by its header {size}"
    assert said(content + b"x") == f"is too long: it has {size + 1} bytes, and by its header {size}"


def test_cut_anywhere_it_is_refused() -> None:
    content = safetensors()
    for size in range(len(content)):
        assert "is cut short" in str(said(content[:size])), size


def test_a_header_that_would_be_gigabytes_is_not_read() -> None:
    class Unread(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size == 8
            return super().read(size)

    content = struct.pack("<Q", 1 << 40)
    words = fault(Unread(content), 1 << 50)
    assert words == f"is no safetensors file, or damaged: its header would have {1 << 40} bytes, of 100000000 at most"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"t": 1}',
        b'{"t": {}}',
        b'{"t": {"data_offsets": 7}}',
        b'{"t": {"data_offsets": [0]}}',
        b'{"t": {"data_offsets": [0, "7"]}}',
        b'{"t": {"data_offsets": [0, -1]}}',
        b'{"t": {"data_offsets": [0, 0.5]}}',
        b'{"t": {"data_offsets": [0, NaN]}}',
        b'{"t": {"data_offsets": [0, ' + b"9" * 4300 + b"]}}",
    ],
)
def test_a_header_that_is_none(header: bytes) -> None:
    assert said(with_header(header)) == "is no safetensors file, or damaged: its header is not the JSON of one"


@given(st.binary(max_size=200))
def test_whatever_it_holds_ends_in_words(content: bytes) -> None:
    said(content)
    said(with_header(content))


VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data_offsets", "shape"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
def test_whatever_its_header_holds_ends_in_words(header: dict[str, object]) -> None:
    said(with_header(json.dumps(header).encode()))
