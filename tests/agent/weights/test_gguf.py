from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.weights.gguf import fault
from llmgw.engines.tiny_gguf import tiny_gguf
from tests.agent.weights.models import alignment, gguf, gguf_header, tensor, text


def said(content: bytes) -> str | None:
    return fault(io.BytesIO(content), len(content))


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


EVERY_KIND = [
    *(key(f"k{kind}", kind, bytes(size)) for kind, size in enumerate([1, 1, 2, 2, 4, 4, 4, 1])),
    *(key(f"k{kind}", kind, bytes(8)) for kind in (10, 11, 12)),
    key("words", 8, text("some words")),
    key("numbers", 9, array(4, 3, bytes(12))),
    key("strings", 9, array(8, 3, text("a") + text("") + text("c" * 1000))),
]


def test_a_whole_file_and_what_it_lacks_when_the_last_byte_of_its_tensors_is_gone() -> None:
    content = gguf(*EVERY_KIND)
    assert said(content) is None
    assert said(content + b"\0" * 25) is None
    size = len(content)
    assert said(content[:-1]) == f"is cut short: it has {size - 1} bytes, and by its header at least {size}"


@pytest.mark.parametrize("version", [2, 3])
def test_versions_that_are_in_use(version: int) -> None:
    assert said(gguf(version=version)) is None


def test_a_file_that_llama_cpp_loads() -> None:
    content = tiny_gguf()
    assert said(content) is None
    # Its last tensor ends where the file does.
    assert "is cut short" in str(said(content[:-1]))


def test_cut_anywhere_in_its_header_it_is_refused() -> None:
    content = gguf(*EVERY_KIND)
    for size in range(4, len(content)):
        assert "is cut short" in str(said(content[:size])), size


@pytest.mark.parametrize("value", [1, 8, 64, 4096])
def test_its_own_alignment_counts(value: int) -> None:
    content = gguf(*EVERY_KIND, alignment(value), alignment=value)
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


@pytest.mark.parametrize("value", [0, 3, 48])
def test_an_alignment_that_is_none(value: int) -> None:
    assert said(gguf(alignment(value))) == "has a damaged header: its general.alignment is no power of two"


@pytest.mark.parametrize(
    ("kind", "dimensions", "size"),
    [
        (0, [3, 5], 60),
        (1, [7], 14),
        (2, [64, 3], 2 * 18 * 3),
        (8, [32, 2, 2], 34 * 4),
        (12, [512, 2], 144 * 4),
        (14, [256], 210),
        (30, [2, 2, 2, 2], 32),
        (39, [32], 17),
        (0, [], 4),
        (0, [0, 8], 0),
    ],
)
def test_the_sizes_of_tensors(kind: int, dimensions: list[int], size: int) -> None:
    header = gguf_header(tensors=[tensor("first", [5], 24, 0), tensor("last", dimensions, kind, 32)])
    content = header + b"\0" * (-len(header) % 32) + b"\0" * 32 + b"\0" * size
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


def test_of_a_type_that_is_not_known_only_the_place_counts() -> None:
    header = gguf_header(tensors=[tensor("new", [1 << 40], 97, 64)])
    content = header + b"\0" * (-len(header) % 32) + b"\0" * 64
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


def test_a_file_without_tensors_ends_with_its_header() -> None:
    content = gguf_header(EVERY_KIND)
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


def test_of_the_other_byte_order() -> None:
    dimensions = struct.pack(">IQIQ", 1, 7, 24, 0)
    header = b"GGUF" + struct.pack(">IQQQ", 3, 1, 0, 1) + b"t" + dimensions
    content = header + b"\0" * (-len(header) % 32) + b"weights"
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


def test_a_vocabulary_longer_than_what_is_read_at_once() -> None:
    words = b"".join(text(f"word{number}") for number in range(150_000))
    content = gguf(key("tokenizer.ggml.tokens", 9, array(8, 150_000, words)))
    assert said(content) is None
    assert "is cut short" in str(said(content[:-1]))


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "cut short, or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "cut short, or damaged"),
        (gguf(key("a", 9, array(8, HUGE, b""))), "cut short, or damaged"),
        (gguf(key("a", 9, array(4, HUGE, b""))), "cut short, or damaged"),
        (gguf(key("a", 8, struct.pack("<Q", HUGE))), "cut short, or damaged"),
        (gguf(key("a", 9, array(9, 1, b""))), "a value of type 9, which GGUF does not have there"),
        (gguf(key("a", 13, b"")), "a value of type 13"),
        (gguf_header(tensors=[tensor("t", [1] * 5, 0, 0)]), "a tensor of 5 dimensions, of 4 at most"),
        (gguf_header(tensors=[tensor("t", [HUGE] * 4, 0, HUGE)]), "is cut short"),
        (gguf(version=1), "is GGUF of version 1, and versions 2 and 3 are known"),
    ],
)
def test_no_number_is_believed(content: bytes, words: str) -> None:
    assert words in str(said(content))


@given(st.binary(max_size=400))
def test_whatever_follows_the_magic_ends_in_words(content: bytes) -> None:
    said(b"GGUF" + content)
    said(b"GGUF" + struct.pack("<I", 3) + content)


@given(st.integers(0, 500), st.binary(min_size=1, max_size=8))
def test_whatever_is_damaged_ends_in_words(at: int, damage: bytes) -> None:
    content = gguf(*EVERY_KIND)
    said(content[:at] + damage + content[at + len(damage) :])
