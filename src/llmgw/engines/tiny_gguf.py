"""A model file of a few hundred kilobytes that a real llama.cpp loads: random weights, a whole vocabulary.

With it an engine can be asked for a token in a fraction of a second. Nothing of it is learned: at temperature 0 its
answers are random words, always the same ones. The format is GGUF version 3 (ggml's ``docs/gguf.md``).
"""

from __future__ import annotations

import random
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_LETTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'-"
_WORDS = "the a cat dog sat on mat and to of in is it that you for with hello world node model"

_ALIGNMENT = 32
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_F32 = 0
_EOS = 2
_SPECIAL = 3 + 256
"""Tokens before the words: unknown, begin, end, and one per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str = "tiny-random"
    seed: int = 1
    context: int = 2048
    vocabulary: int = 512
    width: int = 64
    inner: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    end_bias: float = 0.6
    """How likely answers are to end: at 0.6 after some ten to a hundred tokens."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dimensions: tuple[int, ...]
    values: array[float]


def tiny_gguf(shape: Shape | None = None) -> bytes:
    """The whole file, 0.6 MB by default; the same bytes for the same shape."""
    shape = shape or Shape()
    tensors = _tensors(shape)
    metadata = _metadata(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata)
    offset = 0
    for tensor in tensors:
        count = len(tensor.dimensions)
        head += _text(tensor.name) + struct.pack(f"<I{count}QIQ", count, *tensor.dimensions, _F32, offset)
        offset += _aligned(4 * len(tensor.values))
    return b"".join([_padded(head), *(_padded(_little_endian(tensor.values)) for tensor in tensors)])


def _tensors(shape: Shape) -> list[_Tensor]:
    """Random, but for a constant in dimension 0 of every embedding, which makes column 0 of the output a bias.

    The bias keeps control and byte tokens away: bytes that are no text would fail the engine's chat parser.
    """
    draw = random.Random(shape.seed).gauss
    width, inner = shape.width, shape.inner
    kv_width = shape.kv_heads * (width // shape.heads)

    def matrix(name: str, rows: int, columns: int, scale: float = 0.05, *, silent: bool = False) -> _Tensor:
        values = array("f", (draw(0, scale) for _ in range(rows * columns)))
        if silent:  # leaves dimension 0 of the stream as it is
            values[:columns] = array("f", bytes(4 * columns))
        return _Tensor(name, (columns, rows), values)

    def ones(name: str) -> _Tensor:
        return _Tensor(name, (width,), array("f", [1.0] * width))

    embedding = matrix("token_embd.weight", shape.vocabulary, width, 1.0)
    output = matrix("output.weight", shape.vocabulary, width, 0.3)
    for token in range(shape.vocabulary):
        embedding.values[token * width] = 8.0
        output.values[token * width] = 0.0 if token >= _SPECIAL else -1000.0
    output.values[_EOS * width : (_EOS + 1) * width] = array("f", [shape.end_bias] + [0.0] * (width - 1))

    tensors = [embedding, ones("output_norm.weight"), output]
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        tensors += [
            ones(f"{block}attn_norm.weight"),
            ones(f"{block}ffn_norm.weight"),
            matrix(f"{block}attn_q.weight", width, width),
            matrix(f"{block}attn_k.weight", kv_width, width),
            matrix(f"{block}attn_v.weight", kv_width, width),
            matrix(f"{block}attn_output.weight", width, width, silent=True),
            matrix(f"{block}ffn_gate.weight", inner, width),
            matrix(f"{block}ffn_up.weight", inner, width),
            matrix(f"{block}ffn_down.weight", width, inner, silent=True),
        ]
    return tensors


def _vocabulary(size: int) -> list[tuple[str, int]]:
    special = [("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL)]
    special += [(f"<0x{byte:02X}>", _BYTE) for byte in range(256)]
    words = [*_LETTERS, *(f"▁{word}" for word in _WORDS.split())]
    words += [f"▁w{number}" for number in range(size)]
    return special + [(word, _NORMAL) for word in words[: size - len(special)]]


def _metadata(shape: Shape) -> list[bytes]:
    vocabulary = _vocabulary(shape.vocabulary)
    words = len(vocabulary) - _SPECIAL
    return [
        _key("general.architecture") + _string("llama"),
        _key("general.name") + _string(shape.name),
        _key("general.file_type") + _u32(0),
        _key("general.alignment") + _u32(_ALIGNMENT),
        _key("llama.context_length") + _u32(shape.context),
        _key("llama.embedding_length") + _u32(shape.width),
        _key("llama.feed_forward_length") + _u32(shape.inner),
        _key("llama.block_count") + _u32(shape.layers),
        _key("llama.attention.head_count") + _u32(shape.heads),
        _key("llama.attention.head_count_kv") + _u32(shape.kv_heads),
        _key("llama.attention.layer_norm_rms_epsilon") + _f32(1e-5),
        _key("llama.rope.dimension_count") + _u32(shape.width // shape.heads),
        _key("llama.vocab_size") + _u32(shape.vocabulary),
        _key("tokenizer.ggml.model") + _string("llama"),
        _key("tokenizer.ggml.tokens") + _array(8, [_text(word) for word, _ in vocabulary]),
        _key("tokenizer.ggml.scores") + _array(6, [_float(0.0)] * _SPECIAL + [_float(-float(n)) for n in range(words)]),
        _key("tokenizer.ggml.token_type") + _array(5, [struct.pack("<i", kind) for _, kind in vocabulary]),
        _key("tokenizer.ggml.unknown_token_id") + _u32(0),
        _key("tokenizer.ggml.bos_token_id") + _u32(1),
        _key("tokenizer.ggml.eos_token_id") + _u32(_EOS),
        _key("tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, True),
        _key("tokenizer.chat_template") + _string(_TEMPLATE),
    ]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


_key = _text


def _string(text: str) -> bytes:
    return struct.pack("<I", 8) + _text(text)


def _u32(number: int) -> bytes:
    return struct.pack("<II", 4, number)


def _f32(number: float) -> bytes:
    return struct.pack("<If", 6, number)


def _float(number: float) -> bytes:
    return struct.pack("<f", number)


def _array(kind: int, items: Sequence[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


def _little_endian(values: array[float]) -> bytes:
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return values.tobytes()


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (_aligned(len(content)) - len(content))
