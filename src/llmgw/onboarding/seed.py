"""The small CD image from which cloud-init reads: ISO 9660 with whole names (Rock Ridge and Joliet), label ``cidata``.

Written here since the machine that provisions need not be a Proxmox host, nor have a program for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

LABEL = "cidata"
"""The label by which cloud-init finds its data."""

_BLOCK = 2048
_SYSTEM_AREA_BLOCKS = 16
_DIRECTORY, _FILE = 2, 0
_TIME = bytes((100, 1, 1, 0, 0, 0, 0))  # 2000-01-01: the same files make the same image.
_LONG_TIME = b"2000010100000000\x00"
_NO_TIME = b"0" * 16 + b"\x00"
_RRIP = (b"RRIP_1991A", b"THE ROCK RIDGE INTERCHANGE PROTOCOL", b"SEE PUBLISHER")


@dataclass(frozen=True, slots=True)
class _Placed:
    short: bytes
    name: str
    block: int
    data: bytes


def seed_image(files: Mapping[str, bytes], label: str = LABEL) -> bytes:
    """The image with ``files`` in its root. Their names are plain ones; together they fit into one directory block."""
    # 16 system blocks, three descriptors, four path tables, two root directories, the rest of a root entry, the files.
    first = _SYSTEM_AREA_BLOCKS + 3
    tables = {"plain_le": first, "plain_be": first + 1, "joliet_le": first + 2, "joliet_be": first + 3}
    plain_root, joliet_root, continued = first + 4, first + 5, first + 6
    placed, block = [], first + 7
    for number, (name, data) in enumerate(sorted(files.items())):
        placed.append(_Placed(f"FILE{number}.;1".encode(), name, block, data))
        block += max(1, _blocks(len(data)))
    total = block
    image = bytearray(total * _BLOCK)

    def put(at: int, data: bytes) -> None:
        image[at * _BLOCK : at * _BLOCK + len(data)] = data

    plain = _root_record(plain_root), tables["plain_le"], tables["plain_be"]
    joliet = _root_record(joliet_root), tables["joliet_le"], tables["joliet_be"]
    put(_SYSTEM_AREA_BLOCKS, _descriptor(1, label.encode().ljust(32), b"", total, *plain))
    put(_SYSTEM_AREA_BLOCKS + 1, _descriptor(2, _ucs2(label, 32), b"%/E", total, *joliet))
    put(_SYSTEM_AREA_BLOCKS + 2, b"\xffCD001\x01")
    put(tables["plain_le"], _path_table("<", plain_root))
    put(tables["plain_be"], _path_table(">", plain_root))
    put(tables["joliet_le"], _path_table("<", joliet_root))
    put(tables["joliet_be"], _path_table(">", joliet_root))
    put(plain_root, _plain_directory(plain_root, continued, placed))
    put(joliet_root, _joliet_directory(joliet_root, placed))
    put(continued, _extension_reference())
    for file in placed:
        put(file.block, file.data)
    return bytes(image)


def _plain_directory(at: int, continued: int, files: list[_Placed]) -> bytes:
    more = b"CE" + bytes((28, 1)) + _both(continued) + _both(0) + _both(len(_extension_reference()))
    itself = b"SP\x07\x01\xbe\xef\x00" + _posix(0o40755) + more
    records = [_record(b"\x00", at, _BLOCK, _DIRECTORY, itself)]
    records.append(_record(b"\x01", at, _BLOCK, _DIRECTORY, _posix(0o40755)))
    for file in files:
        name = file.name.encode()
        named = b"NM" + bytes((5 + len(name), 1, 0)) + name
        records.append(_record(file.short, file.block, len(file.data), _FILE, _posix(0o100444) + named))
    return _one_block(records)


def _joliet_directory(at: int, files: list[_Placed]) -> bytes:
    records = [_record(b"\x00", at, _BLOCK, _DIRECTORY), _record(b"\x01", at, _BLOCK, _DIRECTORY)]
    records += [_record(file.name.encode("utf-16-be"), file.block, len(file.data), _FILE) for file in files]
    return _one_block(records)


def _one_block(records: list[bytes]) -> bytes:
    directory = b"".join(records)
    if len(directory) > _BLOCK:
        raise ValueError("too many files, or too long names, for one directory block")
    return directory


def _descriptor(kind: int, label: bytes, escapes: bytes, blocks: int, root: bytes, le: int, be: int) -> bytes:
    fill = b" " if kind == 1 else b"\x00 "
    text = fill * (128 // len(fill))
    return b"".join(
        (
            bytes((kind,)),
            b"CD001\x01\x00",
            text[:32],
            label,
            bytes(8),
            _both(blocks),
            escapes.ljust(32, b"\x00"),
            _both_short(1) * 2,
            _both_short(_BLOCK),
            _both(len(_path_table("<", 0))),
            struct.pack("<II", le, 0),
            struct.pack(">II", be, 0),
            root,
            text * 4,
            text[:36] + b"\x00" if kind == 2 else text[:37],
            (text[:36] + b"\x00" if kind == 2 else text[:37]) * 2,
            _LONG_TIME * 2,
            _NO_TIME * 2,
            b"\x01",
        )
    )


def _path_table(order: str, root: int) -> bytes:
    return struct.pack(f"{order}BBIH", 1, 0, root, 1) + b"\x00\x00"


def _root_record(at: int) -> bytes:
    return _record(b"\x00", at, _BLOCK, _DIRECTORY)


def _record(name: bytes, block: int, size: int, flags: int, system: bytes = b"") -> bytes:
    padding = b"" if len(name) % 2 else b"\x00"
    length = 33 + len(name) + len(padding) + len(system)
    odd = length % 2
    return b"".join(
        (
            bytes((length + odd, 0)),
            _both(block),
            _both(size),
            _TIME,
            bytes((flags, 0, 0)),
            _both_short(1),
            bytes((len(name),)),
            name,
            padding,
            system,
            bytes(odd),
        )
    )


def _extension_reference() -> bytes:
    names = b"".join(_RRIP)
    return b"ER" + bytes((8 + len(names), 1, *(len(part) for part in _RRIP), 1)) + names


def _posix(mode: int) -> bytes:
    return b"PX" + bytes((36, 1)) + _both(mode) + _both(1) + _both(0) + _both(0)


def _both(number: int) -> bytes:
    return struct.pack("<I", number) + struct.pack(">I", number)


def _both_short(number: int) -> bytes:
    return struct.pack("<H", number) + struct.pack(">H", number)


def _ucs2(text: str, size: int) -> bytes:
    encoded = text.encode("utf-16-be")
    return encoded + b"\x00 " * ((size - len(encoded)) // 2)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)
