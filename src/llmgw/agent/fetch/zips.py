"""Reads zip archives and wheels, strictly.

A zip states everything twice, in its table of contents and before each member. Only one in which both agree, with
nothing before, after or on top of its members, is unpacked. Source: PKWARE APPNOTE 6.3.10, section 4.3.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from llmgw.agent.fetch.members import BadArchive, Kind, Limits, Member
from llmgw.agent.fetch.streams import PIECE_BYTES

_ENCRYPTED = 0x1
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_END = struct.Struct("<4s4H2LH")
_LOCAL = struct.Struct("<4s5H3L2H")
_UNICODE_PATH = 0x7075
_ZIP64 = 0xFFFFFFFF
_TABLE_BYTES = 64 << 20
_LINK_BYTES = 1024

# zipfile reads offsets and lengths from the file and believes them: seeks before its beginning, numbers out of range.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OverflowError, ValueError)


class ZipReader:
    """The members of a zip, which were all looked at when this is made."""

    def __init__(self, archive: zipfile.ZipFile, limits: Limits) -> None:
        self._archive = archive
        infos = archive.infolist()
        if len(infos) > limits.members:
            raise BadArchive(f"it has {len(infos)} members, more than {limits.members}")
        for info in infos:
            _check(info, limits)
        self.total_bytes = sum(info.file_size for info in infos)
        if self.total_bytes > limits.total_bytes:
            raise BadArchive(f"it unpacks to {self.total_bytes} bytes, more than {limits.total_bytes}")
        _check_places(archive)
        self._infos = infos

    def __iter__(self) -> Iterator[Member]:
        for info in self._infos:
            self._current = info
            yield self._member(info)

    def content(self) -> Iterator[bytes]:
        """Of the member that iteration gave last."""
        return self._pieces(self._current)

    def content_of(self, name: str) -> Iterator[bytes]:
        return self._pieces(next(info for info in self._infos if info.orig_filename == name))

    def _member(self, info: zipfile.ZipInfo) -> Member:
        name = info.orig_filename
        mode = info.external_attr >> 16
        if name.endswith("/"):
            return Member(name, Kind.FOLDER, 0, stat.S_IMODE(mode))
        if stat.S_ISLNK(mode):
            return Member(name, Kind.LINK, 0, stat.S_IMODE(mode), self._target(info))
        return Member(name, Kind.FILE, info.file_size, stat.S_IMODE(mode))

    def _target(self, info: zipfile.ZipInfo) -> str:
        if info.file_size > _LINK_BYTES:
            raise BadArchive(f"{info.orig_filename!r} is a symbolic link to a name that is too long")
        try:
            return b"".join(self._pieces(info)).decode()
        except UnicodeDecodeError:
            raise BadArchive(f"{info.orig_filename!r} is a symbolic link to a name that is no UTF-8") from None

    def _pieces(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        try:
            with self._archive.open(info) as source:
                while piece := source.read(PIECE_BYTES):
                    yield piece
        except (*_UNREADABLE, OSError) as error:
            raise BadArchive(f"{info.orig_filename!r} is damaged: {error}") from None


@contextmanager
def opened(file: BinaryIO, limits: Limits) -> Iterator[ZipReader]:
    """Reads the table of contents and checks all of it before the first member is had. Raises BadArchive."""
    _check_end(file, limits)
    try:
        archive = zipfile.ZipFile(file)
    except (*_UNREADABLE, OSError) as error:
        raise BadArchive(f"it is no zip file: {error}") from None
    with archive:
        yield ZipReader(archive, limits)


def _check_end(file: BinaryIO, limits: Limits) -> None:
    """Looks at the end record before zipfile reads as much as that says."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read(_END.size)
    if len(end) < _END.size or end[:4] != b"PK\x05\x06":
        file.seek(max(0, size - 65535 - _END.size))
        if b"PK\x05\x06" in file.read():
            raise BadArchive("something follows its end")
        raise BadArchive("it is no zip file, or it was cut short")
    _, disk, table_disk, here, count, table_bytes, _, comment_bytes = _END.unpack(end)
    if comment_bytes or disk or table_disk or here != count:
        raise BadArchive("its end is damaged, or there are other parts of it")
    if count > limits.members:
        raise BadArchive(f"it has {count} members, more than {limits.members}")
    if table_bytes > _TABLE_BYTES:
        raise BadArchive(f"its table of contents takes {table_bytes} bytes")


def _check(info: zipfile.ZipInfo, limits: Limits) -> None:
    # zipfile cuts names at a NUL; the name before that is what counts.
    name = info.orig_filename
    kind = stat.S_IFMT(info.external_attr >> 16)
    allowed = (0, stat.S_IFDIR) if name.endswith("/") else (0, stat.S_IFREG, stat.S_IFLNK)
    if kind not in allowed:
        raise BadArchive(f"{name!r} is {'a folder in a file’s place' if stat.S_ISDIR(kind) else 'a special file'}")
    if info.flag_bits & _ENCRYPTED:
        raise BadArchive(f"{name!r} is encrypted")
    if info.compress_type not in _METHODS:
        raise BadArchive(f"{name!r} is compressed in a way that is not unpacked here (method {info.compress_type})")
    if name.endswith("/") and info.file_size:
        raise BadArchive(f"{name!r} is a folder with content")
    if not name.isascii() and not info.flag_bits & _UTF8:
        raise BadArchive(f"the name {name!r} is no UTF-8")
    if _UNICODE_PATH in _extra_kinds(info.extra):
        raise BadArchive(f"{name!r} has two names")
    if info.file_size > limits.ratio_from_bytes and info.file_size > limits.ratio * max(info.compress_size, 1):
        raise BadArchive(f"{name!r} claims to unpack to {info.file_size // max(info.compress_size, 1)} times its size")


def _extra_kinds(extra: bytes) -> Iterator[int]:
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        yield kind
        extra = extra[4 + length :]


def _check_places(archive: zipfile.ZipFile) -> None:
    """Members lie one behind the other from the beginning, and say of themselves what the table says of them."""
    file = archive.fp
    assert file is not None
    end = 0
    last = "its beginning"
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        name = info.orig_filename
        if info.header_offset < end:
            raise BadArchive(f"{name!r} and {last} overlap")
        if not end and info.header_offset:
            raise BadArchive(f"something stands before {name!r}, its first member")
        file.seek(info.header_offset)
        end = info.header_offset + _check_local(file, info) + info.compress_size
        last = repr(name)
    if end > archive.start_dir:
        raise BadArchive(f"{last} and the table of contents overlap")


def _check_local(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The length of what stands before the member's content."""
    name = info.orig_filename
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        raise BadArchive(f"{name!r} is damaged: it is not where the table of contents says")
    _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(head)
    own = file.read(name_bytes)
    if own != name.encode("utf-8" if info.flag_bits & _UTF8 else "cp437"):
        raise BadArchive(f"{name!r} calls itself {own[:100]!r}")
    same = (flags ^ info.flag_bits) & (_ENCRYPTED | _SIZES_FOLLOW | _UTF8) == 0 and method == info.compress_type
    if not flags & _SIZES_FOLLOW:
        stated = ((crc, info.CRC), (packed, info.compress_size), (size, info.file_size))
        same = same and all(mine in (_ZIP64, theirs) for mine, theirs in stated)
    if not same:
        raise BadArchive(f"{name!r} says something else of itself than the table of contents")
    return _LOCAL.size + int(name_bytes) + int(extra_bytes)
