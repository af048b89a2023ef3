from __future__ import annotations

import hashlib
import struct

from llmgw.engines.tiny_gguf import Shape, tiny_gguf


def test_the_file_is_small_whole_and_always_the_same() -> None:
    content = tiny_gguf()
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", content)
    assert (magic, version) == (b"GGUF", 3)
    assert tensors == 3 + 2 * 9
    assert pairs == 22
    assert len(content) % 32 == 0
    assert len(content) < 1_000_000
    assert hashlib.sha256(tiny_gguf()).digest() == hashlib.sha256(content).digest()


def test_shapes_differ() -> None:
    assert tiny_gguf(Shape(seed=2)) != tiny_gguf()
    assert len(tiny_gguf(Shape(layers=1))) < len(tiny_gguf())
