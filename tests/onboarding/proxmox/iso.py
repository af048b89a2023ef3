"""Reads a CD image by its Rock Ridge names, as Linux does. Shares nothing with what writes them."""

from __future__ import annotations

import struct

BLOCK = 2048


def read_iso(image: bytes) -> tuple[str, dict[str, bytes]]:
    """The label and the files of the root."""
    primary = image[16 * BLOCK : 17 * BLOCK]
    if primary[:7] != b"\x01CD001\x01":
        raise ValueError("no ISO 9660 file system")
    (blocks,) = struct.unpack_from("<I", primary, 80)
    if blocks * BLOCK != len(image):
        raise ValueError(f"{blocks} blocks are stated, and {len(image)} bytes are there")
    at, size = struct.unpack_from("<I4xI", primary, 156 + 2)
    directory = image[at * BLOCK : at * BLOCK + size]
    files = {}
    offset = 0
    while offset < len(directory) and directory[offset]:
        record = directory[offset : offset + directory[offset]]
        offset += len(record)
        block, length = struct.unpack_from("<I4xI", record, 2)
        name = _posix_name(record)
        if name is not None:
            files[name] = image[block * BLOCK : block * BLOCK + length]
    return primary[40:72].decode().rstrip(), files


def _posix_name(record: bytes) -> str | None:
    name_length = record[32]
    at = 33 + name_length + (1 - name_length % 2)
    while at + 4 <= len(record):
        signature, length = record[at : at + 2], record[at + 2]
        if length < 4:
            return None
        if signature == b"NM":
            return record[at + 5 : at + length].decode()
        at += length
    return None
