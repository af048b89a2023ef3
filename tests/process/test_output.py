from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmgw.process.output import Follower, OutputWriter, RotatingFile, files, tail

from .conftest import eventually, needs_root

lines_of_text = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=60)


def write(path: Path, *pieces: bytes, limit: int = 100, kept: int = 3) -> None:
    file = RotatingFile(str(path), limit, kept)
    for piece in pieces:
        assert file.write(piece) == len(piece)
    file.close()


@given(lines=lines_of_text, limit=st.integers(42, 300), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_nothing_is_lost_or_torn_while_all_files_are_kept(lines: list[bytes], limit: int, cuts: list[int]) -> None:
    """No line here is longer than a file: one that is may be torn."""
    text = b"".join(lines)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output.log"
        write(path, *(text[start:end] for start, end in pairwise(edges)), limit=limit, kept=100)
        contents = [file.read_bytes() for file in files(path)]
        assert b"".join(contents) == text
        assert all(content.endswith(b"\n") for content in contents if content)
        assert all(len(content) < limit + 41 for content in contents)
        shown = [line[:-1].decode("utf-8", "replace").rstrip("\r") for line in lines]
        for count in (0, 1, 7, 1000):
            assert tail(path, count) == (shown[-count:] if count else [])


def test_so_many_files_are_kept_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, *(f"line {number}\n".encode() for number in range(10)), limit=1, kept=3)
    assert [file.name for file in files(path)] == ["output.log.3", "output.log.2", "output.log.1"]
    assert tail(path, 100) == ["line 7", "line 8", "line 9"]


def test_a_line_longer_than_a_file_does_not_stop_the_turning(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, *[b"x" * 50] * 20, limit=100, kept=3)
    assert len(files(path)) >= 3
    assert all(file.stat().st_size <= 250 for file in files(path))


def test_a_long_line_is_cut_when_it_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"short\n" + b"y" * 20_000 + b"\n", limit=10**6)
    first, second = tail(path, 2)
    assert first == "short"
    assert second == "y" * 16384 + " [... 3616 bytes]"


def test_writing_goes_on_where_an_earlier_writer_stopped(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"one\n", limit=8)
    write(path, b"two\n", b"three\n", limit=8)
    assert [file.read_bytes() for file in files(path)] == [b"one\ntwo\n", b"three\n"]


def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    file = RotatingFile(str(path), 1000, 3)
    file.write(b"before\n")
    path.unlink()
    file.write(b"after\n")
    file.close()
    assert path.read_bytes() == b"after\n"


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"x\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_files_beside_it_are_not_taken_for_its_own(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"x\n")
    for name in ("output.log.bak", "output.log.1.gz", "other.log.1"):
        (tmp_path / name).write_bytes(b"not ours\n")
    assert tail(path, 10) == ["x"]


@given(lines=lines_of_text, limit=st.integers(20, 200), reads=st.integers(1, 5), start=st.integers(0, 5))
def test_following_sees_every_line_once_and_in_order(lines: list[bytes], limit: int, reads: int, start: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output.log"
        file = RotatingFile(str(path), limit, 100)
        before, after = lines[: len(lines) // 2], lines[len(lines) // 2 :]
        for line in before:
            file.write(line)
        follower = Follower(path, start)
        seen: list[str] = []
        for number, line in enumerate(after):
            file.write(line[:3])
            if number % reads == 0:
                seen += follower.read()
            file.write(line[3:])
        seen += follower.read(final=True)
        follower.close()
        file.close()
        shown = [line[:-1].decode("utf-8", "replace").rstrip("\r") for line in lines]
        expected = shown[len(before) :]
        older = shown[: len(before)][-start:] if start else []
        assert seen == older + expected


def test_what_comes_right_before_a_turning_over_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"one\n")

    class Slow(Follower):
        """It has read to the end, and before it looks for a younger file, this one is written to and turns over."""

        def _following(self) -> list[Path]:
            if not path.with_name("output.log.1").exists():
                write(path, b"two\n", limit=1)
                write(path, b"three\n")
            return super()._following()

    follower = Slow(path, 1)
    assert list(follower.read()) == ["one", "two", "three"]
    follower.close()


def test_following_begins_before_there_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    follower = Follower(path, 5)
    assert list(follower.read()) == []
    write(path, b"a\nb")
    assert list(follower.read()) == ["a"]
    assert list(follower.read(final=True)) == ["b"]
    follower.close()


def test_a_line_that_is_half_there_is_seen_whole(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    write(path, b"whole\nhal")
    follower = Follower(path, 10)
    assert list(follower.read()) == ["whole"]
    write(path, b"f\n")
    assert list(follower.read()) == ["half"]
    follower.close()


def test_the_writer_writes_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    writer = OutputWriter(RotatingFile(str(path), 10**9, 3))
    for number in range(1000):
        writer.put(f"line {number}\n".encode())
    writer.close(10)
    assert path.read_text() == "".join(f"line {number}\n" for number in range(1000))
    assert writer.lost_bytes == 0


@needs_root
def test_a_full_disk_loses_lines_and_says_how_much(small_disk: Path) -> None:
    path = small_disk / "output.log"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200 * 1024)
    writer = OutputWriter(RotatingFile(str(path), 10**9, 3))
    for _ in range(100):
        writer.put(b"z" * 4095 + b"\n")
    eventually(lambda: writer.lost_bytes > 300 * 1024, "the disk running full")
    ballast.unlink()
    writer.put(b"there is room again\n")
    writer.close(10)
    last, notice = tail(path, 1)[0], tail(path, 2)[0]
    assert last == "there is room again"
    assert notice == f"[llmgw: {writer.lost_bytes} bytes of output were lost: No space left on device]"


def test_a_disk_that_does_not_move_does_not_hold_the_program_up(tmp_path: Path) -> None:
    """A pipe that nobody reads stands in for a disk that hangs: a write to it does not return."""
    path = tmp_path / "output.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = OutputWriter(RotatingFile(str(path), 10**9, 3))
    began = time.monotonic()
    for _ in range(11):
        writer.put(b"z" * 1024 * 1024)
    assert time.monotonic() - began > 0.5, "it is waited for, and not for ever"
    assert writer.lost_bytes >= 1024 * 1024
    os.close(reader)  # the write that hangs now fails, and its thread ends
    writer.close(10)
