"""What a compiled file needs of the machine that runs it: read from the file, whatever machine it is for."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF"
_MACHINES = {62: "amd64", 183: "arm64"}
_DYNAMIC, _VERNEED = 6, 0x6FFFFFFE
_NEEDED, _RPATH, _RUNPATH = 1, 15, 29
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")


class BadElf(Exception):
    """Not a 64-bit little-endian ELF file, or one that ends too early."""


@dataclass(frozen=True, slots=True)
class Elf:
    """``needed``: libraries, by the names that the loader looks for. ``versions``: of symbols, as ``GLIBC_2.34``."""

    machine: str
    needed: tuple[str, ...]
    versions: frozenset[str]
    runpath: str

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest libc that has all symbols; (0, 0): needs none."""
        found = (_GLIBC.fullmatch(version) for version in self.versions)
        return max(((int(match[1]), int(match[2])) for match in found if match), default=(0, 0))


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read(content: bytes) -> Elf:
    """Raises BadElf."""
    try:
        return _read(content)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BadElf(f"it ends too early, or is damaged: {error}") from error


def _read(content: bytes) -> Elf:
    if content[:4] != _MAGIC:
        raise BadElf(f"it begins with {content[:4]!r}, not with {_MAGIC!r}")
    if content[4:6] != b"\x02\x01":
        raise BadElf("it is not 64-bit and little-endian")
    number = struct.unpack_from("<H", content, 18)[0]
    if number not in _MACHINES:
        raise BadElf(f"it is for machine {number}: expected {' or '.join(_MACHINES.values())}")
    sections = list(_sections(content))
    needed: list[str] = []
    runpath = ""
    versions: set[str] = set()
    for section in sections:
        if section.kind == _DYNAMIC:
            strings = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<qQ", content, at)
                if tag == _NEEDED:
                    needed.append(_string(content, strings + value))
                elif tag in (_RPATH, _RUNPATH):
                    runpath = _string(content, strings + value)
        elif section.kind == _VERNEED:
            versions.update(_versions(content, section, sections[section.link].offset))
    return Elf(_MACHINES[number], tuple(needed), frozenset(versions), runpath)


def _sections(content: bytes) -> Iterator[_Section]:
    table = struct.unpack_from("<Q", content, 40)[0]
    size, count = struct.unpack_from("<HH", content, 58)
    for index in range(count):
        _, kind, _, _, offset, length, link, info = struct.unpack_from("<IIQQQQII", content, table + index * size)
        yield _Section(kind, offset, length, link, info)


def _versions(content: bytes, section: _Section, strings: int) -> Iterator[str]:
    entry = section.offset
    for _ in range(section.info):
        _, count, _, first, following = struct.unpack_from("<HHIII", content, entry)
        at = entry + first
        for _ in range(count):
            _, _, _, name, onward = struct.unpack_from("<IHHII", content, at)
            yield _string(content, strings + name)
            at += onward
        entry += following


def _string(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode("ascii")
