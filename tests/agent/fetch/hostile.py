"""Archives as an attacker would make them, byte by byte: what makers of archives refuse to write is written here."""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import zstandard

from llmgw.agent.fetch.archive import Packing

BLOCK = 512
END = bytes(2 * BLOCK)

Made = bytes | Callable[[Path], bytes]
"""An archive, or one that needs to know which folder it is to escape into (there is a file ``canary`` in it)."""


def header(
    name: bytes,
    *,
    kind: bytes = b"0",
    size: int | bytes = 0,
    link: bytes = b"",
    mode: int = 0o644,
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
    checksum: int | None = None,
) -> bytes:
    size_field = size if isinstance(size, bytes) else b"%011o\0" % size
    made = name.ljust(100, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + size_field.ljust(12, b"\0")
    made += b"%011o\0" % 0 + b" " * 8 + kind + link.ljust(100, b"\0") + magic + bytes(80) + prefix.ljust(155, b"\0")
    made = made.ljust(BLOCK, b"\0")
    assert len(made) == BLOCK
    stated = sum(made) if checksum is None else checksum
    return made[:148] + b"%06o\0 " % stated + made[156:]


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def file(name: bytes, content: bytes = b"x", mode: int = 0o644, *, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    return header(name, size=len(content), mode=mode, kind=kind, prefix=prefix) + padded(content)


def folder(name: bytes, mode: int = 0o755) -> bytes:
    return header(name, kind=b"5", mode=mode)


def link(name: bytes, target: bytes) -> bytes:
    return header(name, kind=b"2", link=target, mode=0o777)


def hard(name: bytes, target: bytes) -> bytes:
    return header(name, kind=b"1", link=target)


def record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    return file(b"PaxHeaders/x", b"".join(records), kind=kind)


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    content = name + b"\0"
    return header(b"././@LongLink", kind=kind, size=len(content), magic=b"ustar  \0") + padded(content)


def tar(*members: bytes) -> bytes:
    return b"".join(members) + END


def far(name: bytes, kind: bytes, target: bytes = b"", content: bytes = b"") -> bytes:
    """A member with a name and a target of any length."""
    said = [record(b"path", name)] + ([record(b"linkpath", target)] if target else [])
    return pax(*said) + header(b"x", kind=kind, link=target[:100], size=len(content)) + padded(content)


def escape_by_long_paths(around: Path) -> bytes:
    """CVE-2025-4517: a chain of links that gets so long that realpath stops looking, then a link out of it."""
    part = b"d" * 247
    steps = [bytes([letter]) for letter in b"abcdefghijklmnop"]
    members, path = [], b""
    for step in steps:
        members += [far(path + part, b"5"), far(path + step, b"2", part)]
        path += part + b"/"
    out = b"/".join(steps) + b"/" + b"l" * 254
    members += [far(out, b"2", b"../" * len(steps)), far(b"escape", b"2", out + b"/../../outside")]
    return tar(*members, hard(b"flaglink", b"escape/canary"), file(b"flaglink", b"overwritten"))


def _to(around: Path, name: str = "canary") -> bytes:
    return str(around / name).encode()


OUT = b"../outside/"

TARS: dict[str, tuple[Made, str]] = {
    # names
    "absolute": (lambda around: tar(file(_to(around))), "canary' is not a relative path"),
    "dots": (tar(file(OUT + b"canary")), "'../outside/canary' leaves its folder"),
    "dots within": (tar(file(b"a/../../outside/canary")), "'a/../../outside/canary' leaves its folder"),
    "dots at the end": (tar(folder(b"a/..")), r"'a/\.\.' leaves its folder"),
    "dots alone": (tar(folder(b"..")), r"'\.\.' leaves its folder"),
    "one dot": (tar(file(b"a/./b")), "'a/./b' leaves its folder or is not plain"),
    "two dots for the folder": (tar(file(b"././b")), "leaves its folder or is not plain"),
    "empty part": (tar(file(b"a//b")), "'a//b' leaves its folder or is not plain"),
    "empty name": (tar(file(b"")), "'' leaves its folder or is not plain"),
    "backslash": (tar(file(b"a\\..\\..\\canary")), "is not a relative path"),
    "drive": (tar(file(b"C:canary")), "'C:canary' is not a relative path"),
    "newline": (tar(file(b"a\nb")), r"'a\\nb' has a control character"),
    "escape sequence": (tar(file(b"a\x1b[2Jb")), r"'a\\x1b\[2Jb' has a control character"),
    "right to left": (tar(file("a\u202egpj.sh".encode())), "has a control character"),
    "no text": (tar(file(b"a\xffb")), r"a\\xffb' is no UTF-8"),
    "hidden after a NUL": (tar(file(b"a\0../../outside/canary")), "something is hidden behind the name b'a'"),
    "prefix": (tar(file(b"canary", prefix=b"../outside")), "'../outside/canary' leaves its folder"),
    "long part": (tar(long_name(b"a" * 256), file(b"a")), "is too long"),
    "long path": (tar(long_name(b"/".join([b"a" * 100] * 11)), file(b"a")), "is too long"),
    "deep path": (tar(long_name(b"/".join([b"a"] * 65)), file(b"a")), "more than 64 folders deep"),
    "twice": (tar(file(b"a/b"), file(b"a/b")), "'a/b' and 'a/b' would be one file"),
    "case": (tar(file(b"a/B"), file(b"a/b")), "'a/B' and 'a/b' would be one file"),
    "case of a folder": (tar(file(b"A/b"), file(b"a/c")), "'A' and 'a' would be one folder"),
    "sharp s": (tar(file("straße".encode()), file(b"STRASSE")), "'straße' and 'STRASSE' would be one file"),
    "composed": (tar(file("caf\u00e9".encode()), file("cafe\u0301".encode())), "would be one file"),
    "file as a folder": (tar(file(b"a"), file(b"a/b")), "'a' is both a file and a folder"),
    "folder as a file": (tar(file(b"a/b"), file(b"a")), "'a' is both a file and a folder"),
    "link as a folder": (tar(file(b"b"), link(b"a", b"b"), file(b"a/x")), "'a' is both a file and a folder"),
    "file over a link": (tar(file(b"b"), link(b"a", b"b"), file(b"a")), "'a' and 'a' would be one file"),
    "link over a file": (tar(file(b"a"), link(b"a", b"a")), "'a' and 'a' would be one file"),
    "its own list": (tar(file(b"CONTENTS.sha256")), "'CONTENTS.sha256' is there already"),
    # links
    "link absolute": (lambda around: tar(link(b"a", _to(around))), "'a' is a symbolic link to .*not beside it"),
    "link up": (tar(link(b"a", OUT + b"canary")), "'a' is a symbolic link to '../outside/canary'"),
    "link to its parent": (tar(link(b"a", b"..")), "'a' is a symbolic link: the name '..' leaves"),
    "link to its folder": (tar(link(b"a", b".")), "'a' is a symbolic link: the name '.' leaves"),
    "link into a folder": (tar(file(b"b/c"), link(b"a", b"b/c")), "'a' is a symbolic link to 'b/c'"),
    "link to a folder": (tar(file(b"b/c"), link(b"a", b"b")), "'a' is a symbolic link to 'b', which is no file"),
    "link to nothing": (tar(file(b"b"), link(b"a", b"c")), "'a' is a symbolic link to 'c', which is no file"),
    "link without a target": (tar(link(b"a", b"")), "'a' is a symbolic link"),
    "link with a control character": (tar(link(b"a", b"b\nc")), "'a' is a symbolic link: .* control character"),
    "link to a link and back": (tar(link(b"a", b"b"), link(b"b", b"a")), "leads back to itself"),
    "link to itself": (tar(link(b"a", b"a")), "leads back to itself"),
    "link chain out": (
        tar(link(b"a", b"b"), link(b"b", b".."), file(b"a/outside/canary")),
        "'b' is a symbolic link: the name '..' leaves",
    ),
    "link, then through it": (
        lambda around: tar(link(b"d", str(around).encode()), file(b"d/canary")),
        "'d' is a symbolic link",
    ),
    "link with content": (
        header(b"a", kind=b"2", link=b"b", size=1) + padded(b"x") + END,
        "'a' is a link with content",
    ),
    "hard link out": (lambda around: tar(hard(b"a", _to(around))), "'a' is a hard link to"),
    "hard link within": (tar(file(b"b"), hard(b"a", b"b")), "'a' is a hard link to 'b'"),
    "hard link through a link": (
        lambda around: tar(link(b"s", _to(around)), hard(b"h", b"s"), file(b"h", b"overwritten")),
        "'s' is a symbolic link",
    ),
    "long paths (CVE-2025-4517)": (escape_by_long_paths, "'ddd.* is too long"),
    "link over its own end (CVE-2025-4330)": (
        tar(file(b"a/b/c"), link(b"a/d", b"b/../../../outside")),
        "'a/d' is a symbolic link",
    ),
    "link with a folder that is made later (CVE-2025-4138)": (
        tar(link(b"a", b"b/../.."), link(b"b", b"c/c"), file(b"a/outside/canary")),
        "'a' is a symbolic link",
    ),
    "mode of what is outside (CVE-2024-12718)": (tar(folder(b"x/../../outside", 0o777)), "leaves its folder"),
    # kinds and modes
    "character device": (tar(header(b"a", kind=b"3")), "'a' is a device"),
    "block device": (tar(header(b"a", kind=b"4")), "'a' is a device"),
    "fifo": (tar(header(b"a", kind=b"6")), "'a' is a fifo"),
    "contiguous": (tar(file(b"a", kind=b"7")), "'a' is of a kind that is not unpacked here"),
    "unknown kind": (tar(file(b"a", kind=b"Z")), "'a' is of a kind that is not unpacked here"),
    "list of a folder": (tar(file(b"a", kind=b"D")), "'a' is of a kind"),
    "rest of another volume": (tar(file(b"a", kind=b"M")), "'a' is of a kind"),
    "volume label": (tar(header(b"a", kind=b"V")), "'a' is of a kind"),
    "setuid": (tar(file(b"a", mode=0o4755)), "'a' has a setuid, setgid or sticky bit"),
    "setgid": (tar(file(b"a", mode=0o2755)), "'a' has a setuid, setgid or sticky bit"),
    "sticky": (tar(file(b"a", mode=0o1755)), "'a' has a setuid, setgid or sticky bit"),
    "setgid folder": (tar(folder(b"a/", mode=0o2755)), "'a' has a setuid, setgid or sticky bit"),
    "folder with content": (header(b"a", kind=b"5", size=1) + padded(b"x") + END, "'a' is a folder with content"),
    "file in a folder's place": (tar(file(b"a/")), "'a/' is a file in a folder's place"),
    "file with a target": (tar(header(b"a", link=b"b")), "'a' is a file with a link's target"),
    # sizes
    "negative size": (tar(header(b"a", size=b"\xff" * 12)), "states the size"),
    "negative size in digits": (tar(header(b"a", size=b"-0000000001\0")), "states the size"),
    "size in words": (tar(header(b"a", size=b"0x10\0")), "states the size"),
    "size of a planet": (tar(header(b"a", size=b"\x80" + b"\x7f" * 11)), "unpacks to more than .*, with 'a'"),
    "sizes that add up": (
        tar(file(b"a"), header(b"b", size=b"\x80" + ((16 << 30) - 1).to_bytes(11, "big")), file(b"c")),
        "ends in the middle, at 'b'|'b' needs|unpacks to more than",
    ),
    "sparse": (tar(file(b"a", kind=b"S")), "'a' is a sparse file"),
    "sparse by pax": (tar(pax(record(b"GNU.sparse.major", b"1")), file(b"a")), "'GNU.sparse.major'"),
    "sparse by pax, old": (tar(pax(record(b"GNU.sparse.map", b"0,-1")), file(b"a")), "'GNU.sparse.map'"),
    "sparse by star": (tar(pax(record(b"SCHILY.realsize", b"9" * 12)), file(b"a")), "'SCHILY.realsize'"),
    # what pax and GNU headers say of the next member
    "pax path": (tar(pax(record(b"path", OUT + b"canary")), file(b"a")), "'../outside/canary' leaves its folder"),
    "pax path, absolute": (
        lambda around: tar(pax(record(b"path", _to(around))), file(b"a")),
        "is not a relative path",
    ),
    "pax path with a NUL": (tar(pax(record(b"path", b"a\0b")), file(b"a")), r"'a\\x00b' has a control character"),
    "pax path that is no text": (tar(pax(record(b"path", b"\xff")), file(b"a")), "is no UTF-8"),
    "pax link target": (
        tar(pax(record(b"linkpath", OUT + b"canary")), link(b"a", b"b")),
        "'a' is a symbolic link to '../outside/canary'",
    ),
    "pax link target of a file": (tar(pax(record(b"linkpath", b"b")), file(b"a")), "'a' is a file with a link's"),
    "pax size beside another": (tar(pax(record(b"size", b"512")), file(b"a", b"x" * 600)), "'a' states two sizes"),
    "pax size below zero": (tar(pax(record(b"size", b"-512")), file(b"a")), "'a' states the size '-512'"),
    "pax size of a planet": (
        tar(pax(record(b"size", b"9" * 19)), header(b"a")),
        "unpacks to more than .*, with 'a'",
    ),
    "pax twice": (tar(pax(record(b"path", b"b"), record(b"path", b"c")), file(b"a")), "states its path twice"),
    "pax header twice": (tar(pax(), pax(), file(b"a")), "two headers say the same"),
    "pax for all": (tar(pax(record(b"path", b"b"), kind=b"g"), file(b"a")), "states one path for all"),
    "pax encoding": (tar(pax(record(b"hdrcharset", b"BINARY")), file(b"a")), "'hdrcharset'"),
    "pax of no length": (tar(pax(b"path=b\n"), file(b"a")), "a pax header is damaged"),
    "pax of length 0": (tar(pax(b"0 path=b\n"), file(b"a")), "a pax header is damaged"),
    "pax beyond its end": (tar(pax(b"99 path=b\n"), file(b"a")), "a pax header is damaged"),
    "pax short of its end": (tar(pax(b"8 path=bcd\n"), file(b"a")), "a pax header is damaged"),
    "pax of a gigabyte": (tar(header(b"x", kind=b"x", size=1 << 30), file(b"a")), "header of 1073741824 bytes"),
    "pax and nothing": (tar(pax(record(b"path", b"b"))), "announces another member"),
    "long name": (tar(long_name(OUT + b"canary"), file(b"a")), "'../outside/canary' leaves its folder"),
    "long name twice": (tar(long_name(b"b"), long_name(b"c"), file(b"a")), "two headers say the same"),
    "long name beside pax": (
        tar(long_name(b"b"), pax(record(b"path", b"c")), file(b"a")),
        "'c' has two long names",
    ),
    "long name of a gigabyte": (tar(header(b"x", kind=b"L", size=1 << 30), file(b"a")), "header of 1073741824 bytes"),
    "long name that hides another": (tar(long_name(b"b\0../c"), file(b"a")), "hidden behind the name b'b'"),
    "long name and nothing": (tar(file(b"a"), long_name(b"b")), "announces another member .at 'a'"),
    "long link target": (
        lambda around: tar(long_name(_to(around), b"K"), link(b"a", b"b")),
        "'a' is a symbolic link to .*canary",
    ),
    # the archive as a whole
    "checksum": (tar(header(b"a", checksum=1)), "its checksum is another"),
    "no magic": (tar(header(b"a", magic=bytes(8))), "there is no tar header where one should be"),
    "noise": (b"hello" * 1000, "there is no tar header|is no "),
    "nothing": (b"", "cut short|is no "),
    "no members": (tar(), "there is nothing in it"),
    "cut in a header": (file(b"a") + header(b"b")[:100], "ends in the middle, at 'a'"),
    "cut in a file": (file(b"a") + header(b"b", size=5000) + b"x" * 1000, "ends in the middle, at 'b'"),
    "cut at its end": (file(b"a"), "ends in the middle, at 'a'"),
    "cut in its end": (file(b"a") + bytes(BLOCK), "ends in the middle, at 'a'"),
    "something after its end": (tar(file(b"a")) + b"x", "something follows its end .at 'a'"),
    "another archive after its end": (tar(file(b"a")) + tar(file(b"b")), "something follows its end .at 'a'"),
    "something in its end": (file(b"a") + bytes(BLOCK) + file(b"b") + END, "something follows its end .at 'a'"),
}


BOMB = tar(file(b"a", bytes(16 << 20)))
"""Packed, that is."""


def packed(packing: Packing, content: bytes) -> bytes:
    match packing:
        case Packing.TAR_GZ:
            return gzip.compress(content, 6, mtime=0)
        case Packing.TAR_XZ:
            return lzma.compress(content, preset=0)
        case Packing.TAR_ZST:
            return zstandard.ZstdCompressor(level=3).compress(content)
        case _:
            return content


# -- zip

ZipEntry = tuple[str, bytes, int]


def entry(name: str, content: bytes = b"x", mode: int = stat.S_IFREG | 0o644) -> ZipEntry:
    return name, content, mode


def zipped(*entries: ZipEntry, edit: Callable[[zipfile.ZipInfo], None] = lambda info: None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of duplicate names, which are the point
        for name, content, mode in entries:
            info = zipfile.ZipInfo("placeholder")
            info.filename = name
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            edit(info)
            made.writestr(info, content)
    return buffer.getvalue()


def patched(content: bytes, after: bytes, offset: int, new: bytes) -> bytes:
    """``new`` in place of what is ``offset`` bytes after the last ``after``."""
    at = content.rindex(after) + offset
    return content[:at] + new + content[at + len(new) :]


TABLE, LOCAL, LAST = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
ONE = zipped(entry("a", b"hello" * 10))


def overlapping() -> bytes:
    """A member within the content of another one, as a bomb has it that is made of one member many times over."""

    def stored(info: zipfile.ZipInfo) -> None:
        info.compress_type = zipfile.ZIP_STORED

    inner = zipped(entry("b", b"b" * 10))
    outer = zipped(entry("a", inner[: inner.index(TABLE)]), edit=stored)
    at = outer.rindex(TABLE)
    first = outer[at : outer.index(LAST)]
    second = patched(inner[inner.index(TABLE) : inner.index(LAST)], TABLE, 42, struct.pack("<L", 31))
    return outer[:at] + first + second + struct.pack("<4s4H2LH", LAST, 0, 0, 2, 2, len(first + second), at, 0)


def before_the_first() -> bytes:
    """Something before the first member, and offsets that count it."""
    moved = b"#!/bin/sh\n" + ONE
    moved = patched(moved, TABLE, 42, struct.pack("<L", 10))
    return patched(moved, LAST, 16, struct.pack("<L", ONE.index(TABLE) + 10))


def two_names(info: zipfile.ZipInfo) -> None:
    info.extra = struct.pack("<HHBL", 0x7075, 5 + 6, 1, 0) + b"canary"


S_LINK = stat.S_IFLNK | 0o777

ZIPS: dict[str, tuple[Made, str]] = {
    "absolute": (lambda around: zipped(entry(str(around / "canary"))), "canary' is not a relative path"),
    "dots": (zipped(entry("../outside/canary")), "'../outside/canary' leaves its folder"),
    "dots within": (zipped(entry("a/../../evil")), "leaves its folder"),
    "one dot": (zipped(entry("a/./b")), "leaves its folder"),
    "the folder itself": (zipped(entry("./", b"", stat.S_IFDIR | 0o755)), "leaves its folder"),
    "empty part": (zipped(entry("a//b")), "leaves its folder"),
    "backslash": (zipped(entry("a\\..\\b")), "not a relative path"),
    "drive": (zipped(entry("C:evil")), "not a relative path"),
    "newline": (zipped(entry("a\nb")), "control character"),
    "escape sequence": (zipped(entry("a\x1b[2Jb")), "control character"),
    "NUL": (zipped(entry("evilXtxt")).replace(b"evilXtxt", b"evil\0txt"), r"'evil\\x00txt' has a control character"),
    "no UTF-8": (zipped(entry("caf_")).replace(b"caf_", b"caf\x82"), "is no UTF-8"),
    "two names": (zipped(entry("a"), edit=two_names), "'a' has two names"),
    "long part": (zipped(entry("a" * 256)), "too long"),
    "long path": (zipped(entry("/".join(["a" * 200] * 20))), "too long"),
    "deep path": (zipped(entry("a/" * 70 + "a")), "more than 64 folders deep"),
    "link out": (zipped(entry("a", b"/etc/passwd", S_LINK)), "'a' is a symbolic link to '/etc/passwd'"),
    "link up": (zipped(entry("a", b"..", S_LINK)), "'a' is a symbolic link"),
    "link, then through it": (
        zipped(entry("b"), entry("a", b"b", S_LINK), entry("a/x")),
        "'a' is both a file and a folder",
    ),
    "link to nothing": (
        zipped(entry("b"), entry("a", b"c", S_LINK)),
        "'a' is a symbolic link to 'c', which is no file",
    ),
    "link of a megabyte": (zipped(entry("a", b"a" * (1 << 20), S_LINK)), "too long|times its size"),
    "link that is no text": (zipped(entry("a", b"\xff", S_LINK)), "no UTF-8"),
    "device": (zipped(entry("a", b"", stat.S_IFCHR | 0o666)), "'a' is a special file"),
    "fifo": (zipped(entry("a", b"", stat.S_IFIFO | 0o666)), "'a' is a special file"),
    "folder as a file": (zipped(entry("a", b"", stat.S_IFDIR | 0o755)), "'a' is a folder in a file"),
    "file as a folder": (zipped(entry("a/", b"", stat.S_IFREG | 0o644)), "'a/' is a special file"),
    "folder with content": (zipped(entry("a/", b"x", stat.S_IFDIR | 0o755)), "'a/' is a folder with content"),
    "setuid": (zipped(entry("a", b"x", stat.S_IFREG | 0o4755)), "'a' has a setuid"),
    "setgid": (zipped(entry("a", b"x", stat.S_IFREG | 0o2755)), "'a' has a setuid, setgid"),
    "twice": (zipped(entry("a/b"), entry("a/b")), "'a/b' and 'a/b' would be one file"),
    "case": (zipped(entry("a/B"), entry("a/b")), "would be one file"),
    "composed": (zipped(entry("caf\u00e9"), entry("cafe\u0301")), "would be one file"),
    "file and folder": (zipped(entry("a"), entry("a/b")), "both a file and a folder"),
    "file and folder by case": (zipped(entry("A"), entry("a/b/c")), "both a file and a folder"),
    "bomb": (zipped(entry("a", b"\0" * (8 << 20))), "'a' claims to unpack to 1[0-9]{3} times its size"),
    "overlap": (overlapping(), "'b' and 'a' overlap"),
    "overlap with the table": (
        patched(patched(ONE, TABLE, 20, struct.pack("<L", 500)), LOCAL, 18, struct.pack("<L", 500)),
        "'a' and the table of contents overlap",
    ),
    "another name of itself": (ONE.replace(b"a", b"b", 1), "'a' calls itself b'b'"),
    "another size of itself": (patched(ONE, LOCAL, 22, struct.pack("<L", 1)), "'a' says something else of itself"),
    "another packing of itself": (patched(ONE, LOCAL, 8, struct.pack("<H", 0)), "'a' says something else of itself"),
    "encrypted": (patched(ONE, TABLE, 8, struct.pack("<H", 1)), "'a' is encrypted"),
    "strange packing": (patched(ONE, TABLE, 10, struct.pack("<H", 12)), "'a' is compressed .*method 12"),
    "more than announced": (
        patched(patched(ONE, TABLE, 24, struct.pack("<L", 10)), LOCAL, 22, struct.pack("<L", 10)),
        "'a' is damaged",
    ),
    "flipped": (patched(ONE, LOCAL, 33, b"\xff"), "'a' is damaged"),
    "not where it should be": (patched(ONE, TABLE, 42, struct.pack("<L", 3)), "before 'a'|'a' is damaged"),
    "before its beginning": (before_the_first(), "something stands before 'a'"),
    "after its end": (ONE + b"x" * 30, "something follows its end"),
    "a remark": (patched(ONE, LAST, 20, struct.pack("<H", 1)) + b"x", "something follows its end"),
    "other parts": (patched(ONE, LAST, 4, struct.pack("<H", 1)), "other parts of it"),
    "count": (patched(ONE, LAST, 8, struct.pack("<HH", 60000, 60000)), "60000 members, more than"),
    "table of a gigabyte": (patched(ONE, LAST, 12, struct.pack("<L", 1 << 30)), "table of contents takes"),
    "cut": (ONE[:-30], "no zip file, or it was cut short"),
    "noise": (b"hello", "no zip file"),
    "nothing": (b"", "no zip file"),
    "no members": (zipped(), "there is nothing in it"),
    "its own list": (zipped(entry("CONTENTS.sha256")), "'CONTENTS.sha256' is there already"),
}
