"""What archives are packed with: compressed streams, unpacked piece by piece, however much they hold."""

from __future__ import annotations

import io
import lzma
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import BinaryIO, cast

import zstandard

from llmgw.agent.fetch.members import BadArchive

PIECE_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_MEMORY_BYTES = 256 << 20
"""What a packer may ask of whoever unpacks; ``xz -9`` wants 65 MB, ``zstd --long=27`` 128 MB."""


class Damaged(Exception):
    """What is in the stream can't be unpacked, in words that lack only where."""


class Packing(Enum):
    TAR = "tar"
    TAR_GZ = "tar.gz"
    TAR_XZ = "tar.xz"
    TAR_ZST = "tar.zst"
    ZIP = "zip"


_ENDINGS = {
    ".tar": Packing.TAR,
    ".tar.gz": Packing.TAR_GZ,
    ".tgz": Packing.TAR_GZ,
    ".tar.xz": Packing.TAR_XZ,
    ".txz": Packing.TAR_XZ,
    ".tar.zst": Packing.TAR_ZST,
    ".tzst": Packing.TAR_ZST,
    ".zip": Packing.ZIP,
    ".whl": Packing.ZIP,
}

_MAGIC = {
    b"\x1f\x8b": Packing.TAR_GZ,
    b"\xfd7zXZ\x00": Packing.TAR_XZ,
    b"\x28\xb5\x2f\xfd": Packing.TAR_ZST,
    b"PK": Packing.ZIP,
}


def kind_of(name: str) -> Packing:
    """By the name's ending. Raises BadArchive."""
    for ending, packing in _ENDINGS.items():
        if name.lower().endswith(ending):
            return packing
    raise BadArchive(f"it is no archive that is unpacked here: their names end with {', '.join(_ENDINGS)}")


class Counted(io.RawIOBase):
    """A stream of pieces that says how much of it was read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """``pieces`` are as ``pieces_of`` makes them: of a megabyte at most."""
        self._pieces = pieces
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        """The next piece, or nothing at the end, whatever ``size`` says."""
        piece = next(self._pieces, b"")
        self.count += len(piece)
        return piece


def pieces_of(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(_READ_BYTES):
        yield piece


def unpacked(packing: Packing, stream: Counted) -> Iterator[bytes]:
    """The stream's content in pieces of at most PIECE_BYTES. Raises BadArchive, and while it is read Damaged."""
    start = stream.read(_READ_BYTES)
    found = next((packing for magic, packing in _MAGIC.items() if start.startswith(magic)), None)
    if start and packing is not Packing.TAR and found is not packing:
        raise BadArchive(f"it is no {packing.value}" + (f", but looks like {found.value}" if found else ""))
    return _READERS[packing](start, stream)


def _tar(start: bytes, stream: Counted) -> Iterator[bytes]:
    while start:
        yield start
        start = stream.read(_READ_BYTES)


def _gz(start: bytes, stream: Counted) -> Iterator[bytes]:
    while start:
        inflater = zlib.decompressobj(wbits=31)
        while not inflater.eof:
            try:
                piece = inflater.decompress(start, PIECE_BYTES)
            except zlib.error as error:
                raise Damaged(f"it is damaged: {error}") from None
            if piece:
                yield piece
            start = inflater.unconsumed_tail
            if not start and not inflater.eof:
                start = _more(stream)
        start = inflater.unused_data or stream.read(_READ_BYTES)


def _xz(start: bytes, stream: Counted) -> Iterator[bytes]:
    while start:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
        while not decompressor.eof:
            try:
                piece = decompressor.decompress(start, PIECE_BYTES)
            except (lzma.LZMAError, MemoryError) as error:
                raise Damaged(f"it is damaged: {error}") from None
            if piece:
                yield piece
            start = _more(stream) if decompressor.needs_input else b""
        start = decompressor.unused_data or stream.read(_READ_BYTES)


def _zst(start: bytes, stream: Counted) -> Iterator[bytes]:
    whole = _Again(start, stream)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MEMORY_BYTES)
    with decompressor.stream_reader(
        cast(BinaryIO, whole), read_size=_READ_BYTES, read_across_frames=True, closefd=False
    ) as reader:
        while True:
            try:
                piece = reader.read(PIECE_BYTES)
            except (zstandard.ZstdError, MemoryError) as error:
                raise Damaged(f"it is damaged: {error}") from None
            if not piece:
                return
            yield piece


class _Again(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, start: bytes, stream: Counted) -> None:
        self._start = start
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        piece, self._start = self._start[:size], self._start[size:]
        return piece or self._stream.read(size)


def _more(stream: Counted) -> bytes:
    piece = stream.read(_READ_BYTES)
    if not piece:
        raise Damaged("it ends in the middle: it was cut short")
    return piece


_READERS: dict[Packing, Callable[[bytes, Counted], Iterator[bytes]]] = {
    Packing.TAR: _tar,
    Packing.TAR_GZ: _gz,
    Packing.TAR_XZ: _xz,
    Packing.TAR_ZST: _zst,
}


@contextmanager
def ahead(pieces: Iterator[bytes], depth: int = 3) -> Iterator[Iterator[bytes]]:
    """Makes ``pieces`` in a thread, some ahead of who takes them: unpacking and writing go on at the same time."""
    made: queue.Queue[bytes | BaseException | None] = queue.Queue(depth)
    unwanted = threading.Event()

    def make() -> None:
        end: BaseException | None = None
        try:
            for piece in pieces:
                made.put(piece)
                if unwanted.is_set():
                    return
        except BaseException as error:  # whoever takes the pieces has to hear of it
            end = error
        made.put(end)

    def take() -> Iterator[bytes]:
        while isinstance(piece := made.get(), bytes):
            yield piece
        if piece is not None:
            raise piece

    threading.Thread(target=make, name="unpacking", daemon=True).start()
    try:
        yield take()
    finally:
        # Not waited for: it may be reading from somebody who is slow. With room for one more piece it ends by itself.
        unwanted.set()
        while not made.empty():
            made.get()
