"""How long a GGUF file has to be, by its own header: one whose download broke off begins like a whole one.

The format is ggml's ``docs/gguf.md``; where that leaves room, what llama.cpp's loader takes is taken. Read with the
standard library, since ggml's own ``gguf`` brings numpy along, and builds the vocabulary that is only passed over here.
"""

from __future__ import annotations

import struct
from math import prod
from typing import BinaryIO

MAGIC = b"GGUF"

_MAX_HEADER_BYTES = 100_000_000
"""The largest vocabularies take some tens of megabytes."""
_PIECE_BYTES = 1 << 18

_UINT32, _STRING, _ARRAY = 4, 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

# By ggml_type: elements of a block, and its bytes. Those above 40 are left out, since forks give the same numbers to
# other types, and so are Q8_1 and Q8_K, which no file holds.
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    30: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    20: (32, 18),
    39: (32, 17),
    40: (64, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    29: (256, 56),
    34: (256, 54),
    35: (256, 66),
}


class _BadHeader(Exception):
    """In words, to follow the file's name."""


def fault(file: BinaryIO, size: int) -> str | None:
    """What is wrong with a GGUF file of ``size`` bytes, to follow its name; None where nothing is seen.

    Tensors of types that are not known here count as empty: the file may then be shorter than it should unnoticed.
    Raises OSError.
    """
    try:
        least = _least_bytes(file, size)
    except _BadHeader as error:
        return str(error)
    return f"is cut short: it has {size} bytes, and by its header at least {least}" if size < least else None


def _least_bytes(file: BinaryIO, size: int) -> int:
    """Up to the end of the last tensor; what pads it may be missing. 0 without tensors: the header itself was there."""
    header = _Header(file, size)
    tensors, pairs = header.count(24), header.count(13)
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(pairs):
        alignment = _pair(header) or alignment
    end = max((_tensor_end(header) for _ in range(tensors)), default=0)
    return -(-header.at // alignment) * alignment + end if tensors else 0


def _pair(header: _Header) -> int | None:
    """Past a key and its value; the value where it is the alignment."""
    length = header.uint64()
    is_alignment = length == len(_ALIGNMENT_KEY) and header.peek(length) == _ALIGNMENT_KEY
    header.skip(length)
    kind = header.uint32()
    if not is_alignment:
        _skip_value(header, kind)
        return None
    alignment = header.uint32() if kind == _UINT32 else 0
    if alignment.bit_count() != 1:
        raise _BadHeader("has a damaged header: its general.alignment is no power of two")
    return alignment


def _skip_value(header: _Header, kind: int) -> None:
    if kind == _STRING:
        header.skip(header.uint64())
    elif kind == _ARRAY:
        kind = header.uint32()
        if kind == _STRING:
            for _ in range(header.count(8)):
                header.skip(header.uint64())
        else:
            header.skip(header.uint64() * _value_bytes(kind))
    else:
        header.skip(_value_bytes(kind))


def _value_bytes(kind: int) -> int:
    if kind not in _VALUE_BYTES:
        raise _BadHeader(f"has a damaged header: a value of type {kind}, which GGUF does not have there")
    return _VALUE_BYTES[kind]


def _tensor_end(header: _Header) -> int:
    """Counted from where the tensors begin."""
    header.skip(header.uint64())
    dimensions = header.uint32()
    if dimensions > _MAX_DIMENSIONS:
        raise _BadHeader(f"has a damaged header: a tensor of {dimensions} dimensions, of {_MAX_DIMENSIONS} at most")
    elements = prod(header.uint64() for _ in range(dimensions))
    block_elements, block_bytes = _BLOCKS.get(header.uint32(), (1, 0))
    return header.uint64() + elements // block_elements * block_bytes


class _Header:
    """Read forwards only, in pieces. No number of it is believed beyond what the file has room for."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.at = len(MAGIC)
        self._file = file
        self._size = size
        self._end = min(size, _MAX_HEADER_BYTES)
        self._piece, self._piece_at = b"", self.at
        little, big = struct.Struct("<I"), struct.Struct(">I")
        self._uint32, self._uint64 = little, struct.Struct("<Q")
        version = self.uint32()
        if version & 0xFFFF == 0:  # of a machine with the other byte order, as llama.cpp tells it too
            self._uint32, self._uint64 = big, struct.Struct(">Q")
            (version,) = big.unpack(little.pack(version))
        if version not in (2, 3):
            raise _BadHeader(f"is GGUF of version {version}, and versions 2 and 3 are known")

    def uint32(self) -> int:
        return self._number(self._uint32)

    def uint64(self) -> int:
        return self._number(self._uint64)

    def count(self, least_bytes: int) -> int:
        """Of things that take ``least_bytes`` each."""
        count = self.uint64()
        if count * least_bytes > self._end - self.at:
            raise self._beyond()
        return count

    def peek(self, size: int) -> bytes:
        offset = self._loaded(size)
        return self._piece[offset : offset + size]

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > self._end:
            raise self._beyond()

    def _number(self, form: struct.Struct) -> int:
        offset = self._loaded(form.size)
        number: int = form.unpack_from(self._piece, offset)[0]
        self.at += form.size
        return number

    def _loaded(self, size: int) -> int:
        """Where in the piece the next ``size`` bytes are."""
        offset = self.at - self._piece_at
        if offset + size <= len(self._piece):
            return offset
        self._file.seek(self.at)
        self._piece, self._piece_at = self._file.read(_PIECE_BYTES), self.at
        if size > len(self._piece):
            raise self._beyond()
        return 0

    def _beyond(self) -> _BadHeader:
        if self._size < _MAX_HEADER_BYTES:
            return _BadHeader(f"is cut short, or damaged: it has {self._size} bytes, and its header alone has more")
        return _BadHeader(f"has a damaged header: longer than {_MAX_HEADER_BYTES} bytes")
