"""The one downloader, against servers on loopback that do what servers do."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.fetch import disk
from llmgw.agent.fetch.artifact import Artifact, FetchFailed
from llmgw.agent.fetch.disk import NoRoom
from llmgw.agent.fetch.download import Limits, Rate, StartAnew, download
from llmgw.agent.fetch.members import BadArchive

from .origin import Answer, Origin, serving

CONTENT = random.Random(3).randbytes(3_000_000)
QUICK = Limits(stall_s=10, pause_s=0)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def origin() -> Iterator[Origin]:
    with serving(Origin(CONTENT)) as served:
        yield served


class Taking:
    """A sink that keeps what it gets."""

    def __init__(self, refuse_from: int | None = None, error: Exception | None = None) -> None:
        self.taken = bytearray()
        self.refuse_from = refuse_from
        self.error = error or BadArchive("'x': it is bad")

    async def write(self, piece: bytes) -> None:
        await asyncio.sleep(0)
        self.taken += piece
        if self.refuse_from is not None and len(self.taken) >= self.refuse_from:
            raise self.error


def leave_part(folder: Path, artifact: Artifact, content: bytes, etag: str | None = '"one"') -> None:
    """What an earlier life of the agent has left."""
    folder.mkdir(exist_ok=True)
    (folder / f"{artifact.name}.part").write_bytes(content)
    quoted = "null" if etag is None else '"' + etag.replace('"', '\\"') + '"'
    note = f'{{"sha256": "{artifact.sha256}", "etag": {quoted}, "last_modified": null}}'
    (folder / f"{artifact.name}.part.json").write_text(note)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_file_comes_whole_with_progress_in_words(origin: Origin, tmp_path: Path) -> None:
    said: list[str] = []
    sink = Taking()
    path = await download(origin.artifact(), tmp_path / "d", said.append, sink=sink, limits=QUICK)
    assert path == tmp_path / "d" / "file.tar.gz"
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert names(path.parent) == ["file.tar.gz"]
    assert said[-1] == "downloading file.tar.gz (3.0 MB, 100 %)"
    assert origin.requests[0].headers["accept-encoding"] == "identity"


async def test_a_size_that_nobody_states(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(chunked=True)]
    said: list[str] = []
    path = await download(origin.artifact(size=False), tmp_path, said.append, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert said[0].startswith("downloading file.tar.gz (")
    assert "%" not in said[0]


async def test_what_is_whole_already_is_looked_at_and_not_fetched(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "file.tar.gz").write_bytes(CONTENT)
    sink = Taking()
    await download(origin.artifact(), tmp_path, print, sink=sink, limits=QUICK)
    assert (origin.requests, bytes(sink.taken)) == ([], CONTENT)


async def test_what_was_whole_and_has_changed_is_fetched_anew(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "file.tar.gz").write_bytes(CONTENT[:-1] + b"!")
    path = await download(origin.artifact(), tmp_path, print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert origin.ranges == [None]


# -- resumed


async def test_cut_at_60_percent_the_second_try_asks_for_the_rest(origin: Origin, tmp_path: Path) -> None:
    cut = 6 * len(CONTENT) // 10
    origin.answers = [Answer(cut_at=cut), Answer()]
    said: list[str] = []
    sink = Taking()
    path = await download(origin.artifact(), tmp_path, said.append, sink=sink, limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert origin.ranges == [None, f"bytes={cut}-"]
    assert origin.requests[1].headers["if-range"] == '"one"'
    assert origin.sent_bytes == len(CONTENT)
    assert any("(3.0 MB, 60 %)" in words and "broke the connection; trying again" in words for words in said)


async def test_a_part_of_an_earlier_life_is_gone_on_from(origin: Origin, tmp_path: Path) -> None:
    leave_part(tmp_path, origin.artifact(), CONTENT[:1_000_000])
    sink = Taking()
    path = await download(origin.artifact(), tmp_path, print, sink=sink, limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert origin.ranges == ["bytes=1000000-"]


@pytest.mark.parametrize("size", [True, False])
async def test_a_complete_part_is_no_416_for_ever(origin: Origin, tmp_path: Path, size: bool) -> None:
    artifact = origin.artifact(size=size)
    leave_part(tmp_path, artifact, CONTENT)
    sink = Taking()
    path = await download(artifact, tmp_path, print, sink=sink, limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert origin.ranges == ([] if size else [f"bytes={len(CONTENT)}-"])
    assert origin.sent_bytes == 0


@pytest.mark.parametrize("size", [True, False])
async def test_a_part_longer_than_the_file_is_begun_anew(origin: Origin, tmp_path: Path, size: bool) -> None:
    artifact = origin.artifact(size=size)
    leave_part(tmp_path, artifact, CONTENT + b"more")
    path = await download(artifact, tmp_path, print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)


async def test_an_answer_that_ends_early_and_calls_that_its_end_is_gone_on_from(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(content=CONTENT[:1_000_000], chunked=True), Answer()]
    said: list[str] = []
    path = await download(origin.artifact(), tmp_path, said.append, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert origin.ranges == [None, "bytes=1000000-"]
    assert any("ended it early; trying again" in words for words in said)


async def test_a_server_that_ignores_ranges_sends_it_all(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(cut_at=2_000_000, ranges=False), Answer(ranges=False)]
    path = await download(origin.artifact(), tmp_path, print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)


async def test_a_server_that_always_ends_at_43_percent_fails_with_one_reason(origin: Origin, tmp_path: Path) -> None:
    cut = 43 * len(CONTENT) // 100
    origin.answers = [Answer(cut_at=cut, ranges=False)]
    with pytest.raises(FetchFailed, match=r"failed: .* broke the connection; what came \(3.0 MB, 43 %\) is kept"):
        await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert len(origin.requests) == 4  # one that brought something, three that did not
    assert (tmp_path / "file.tar.gz.part").stat().st_size == cut


async def test_an_etag_that_changed_begins_anew(origin: Origin, tmp_path: Path) -> None:
    leave_part(tmp_path, origin.artifact(), b"old" * 1000, etag='"zero"')
    path = await download(origin.artifact(), tmp_path, print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    assert origin.requests[0].headers["if-range"] == '"zero"'


async def test_a_weak_etag_is_no_condition_but_is_compared(origin: Origin, tmp_path: Path) -> None:
    leave_part(tmp_path, origin.artifact(), CONTENT[:1000], etag='W/"one"')
    origin.answers = [Answer(etag='W/"two"'), Answer(etag='W/"two"')]
    path = await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert "if-range" not in origin.requests[0].headers
    assert origin.ranges == ["bytes=1000-", None]


async def test_a_file_that_changes_in_between_is_said_to_whoever_took_bytes_of_it(
    origin: Origin, tmp_path: Path
) -> None:
    origin.answers = [Answer(cut_at=2_000_000), Answer(etag='"two"')]
    with pytest.raises(StartAnew, match="it is another file there now"):
        await download(origin.artifact(), tmp_path, print, sink=Taking(), limits=QUICK)
    assert names(tmp_path) == []


async def test_a_part_of_another_file_counts_for_nothing(origin: Origin, tmp_path: Path) -> None:
    leave_part(tmp_path, origin.artifact(sha256="0" * 64), CONTENT[:1000])
    await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert origin.ranges == [None]


async def test_a_cancelled_download_can_be_gone_on_with(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(hold_at=2_000_000), Answer()]
    part = tmp_path / "file.tar.gz.part"
    came = asyncio.Event()
    task = asyncio.create_task(download(origin.artifact(), tmp_path, lambda words: came.set(), limits=QUICK))
    async with asyncio.timeout(30):
        await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    origin.released.set()
    there = part.stat().st_size
    assert there > 0
    path = await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert origin.ranges == [None, f"bytes={there}-"]


# -- the wrong bytes


def flipped(content: bytes) -> bytes:
    return content[:1_500_000] + bytes([content[1_500_000] ^ 1]) + content[1_500_001:]


async def test_one_flipped_byte_is_fetched_anew_once(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(content=flipped(CONTENT)), Answer()]
    said: list[str] = []
    path = await download(origin.artifact(), tmp_path, said.append, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert origin.ranges == [None, None]
    assert any("came with another sha256" in words for words in said)


async def test_then_both_hashes_are_named_and_nothing_is_left(origin: Origin, tmp_path: Path) -> None:
    wrong = flipped(CONTENT)
    origin.answers = [Answer(content=wrong)]
    with pytest.raises(FetchFailed) as refused:
        await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert origin.sha256 in str(refused.value)
    assert hashlib.sha256(wrong).hexdigest() in str(refused.value)
    assert len(origin.requests) == 2
    assert names(tmp_path) == []


async def test_a_damaged_part_is_found_out_at_the_end(origin: Origin, tmp_path: Path) -> None:
    leave_part(tmp_path, origin.artifact(), flipped(CONTENT)[:2_000_000])
    path = await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert path.read_bytes() == CONTENT
    assert origin.ranges == ["bytes=2000000-", None]


async def test_a_sink_that_had_wrong_bytes_is_to_begin_anew(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(content=flipped(CONTENT)), Answer()]
    with pytest.raises(StartAnew, match=origin.sha256):
        await download(origin.artifact(), tmp_path, print, sink=Taking(), limits=QUICK)
    assert names(tmp_path) == []
    path = await download(origin.artifact(), tmp_path, print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)


async def test_a_flipped_byte_is_told_as_such_though_the_archive_is_found_bad_first(
    origin: Origin, tmp_path: Path
) -> None:
    origin.answers = [Answer(content=flipped(CONTENT))]
    with pytest.raises(StartAnew, match=origin.sha256):
        await download(origin.artifact(), tmp_path, print, sink=Taking(refuse_from=100_000), limits=QUICK)


async def test_an_archive_that_is_bad_as_it_was_published_is_bad(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="it is bad"):
        await download(origin.artifact(), tmp_path, print, sink=Taking(refuse_from=100_000), limits=QUICK)


async def test_a_sink_that_fails_otherwise_ends_it_at_once(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(hold_at=1_000_000)]
    with pytest.raises(NoRoom, match="full"):
        async with asyncio.timeout(5):
            await download(origin.artifact(), tmp_path, print, sink=Taking(1, NoRoom("the disk is full")), limits=QUICK)


async def test_a_size_other_than_the_publisher_states_is_not_begun(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(content=b"<html>log in</html>")]
    with pytest.raises(FetchFailed, match=r"has 0.0 MB \(19 bytes\).*stated to have 3000000"):
        await download(origin.artifact(), tmp_path, print, limits=QUICK)


async def test_a_content_length_that_promises_more_than_comes(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(length=len(CONTENT) + 100)]
    with pytest.raises(FetchFailed, match="broke the connection"):
        await download(origin.artifact(size=False), tmp_path, print, limits=replace(QUICK, barren_tries=1, tries=1))


async def test_a_content_length_that_promises_less_ends_there(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(length=len(CONTENT) - 100)]
    with pytest.raises(FetchFailed, match=origin.sha256):
        await download(origin.artifact(size=False), tmp_path, print, limits=QUICK)


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_without_end_is_left(origin: Origin, tmp_path: Path, size: bool, chunked: bool) -> None:
    origin.answers = [Answer(endless=True, chunked=chunked)]
    words = "the 3000000 bytes" if size else "5.0 MB, the most that is ever fetched"
    with pytest.raises(FetchFailed, match=f"sends more than {words}"):
        await download(origin.artifact(size=size), tmp_path, print, limits=replace(QUICK, most_bytes=5_000_000))
    assert names(tmp_path) == []


async def test_a_content_encoding_is_not_undone(origin: Origin, tmp_path: Path) -> None:
    """Servers call a .tar.gz gzip-encoded; undone, it would be another file than the publisher's."""
    origin.content = gzip.compress(CONTENT)
    origin.answers = [Answer(headers={"Content-Encoding": "gzip"})]
    path = await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert path.read_bytes() == origin.content


# -- time


async def test_a_source_that_falls_silent_is_asked_again(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(hold_at=1_000_000), Answer()]
    said: list[str] = []
    path = await download(origin.artifact(), tmp_path, said.append, limits=replace(QUICK, stall_s=0.5))
    assert path.read_bytes() == CONTENT
    assert origin.ranges == [None, "bytes=1000000-"]
    assert any("no byte for 0.5 s; trying again" in words for words in said)


async def test_a_source_that_stays_silent_is_given_up(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(hold_at=0)]
    with pytest.raises(FetchFailed, match=r"from 127\.0\.0\.1:\d+ failed: no byte for 0.2 s"):
        await download(origin.artifact(), tmp_path, print, limits=replace(QUICK, stall_s=0.2))
    assert len(origin.requests) == 3


async def test_a_trickle_is_left(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(bytes_per_s=60_000), Answer()]
    said: list[str] = []
    path = await download(origin.artifact(), tmp_path, said.append, limits=replace(QUICK, slow_s=1.0))
    assert path.read_bytes() == CONTENT
    assert any("kB/s over 1 s; trying again" in words for words in said)
    assert origin.ranges[1] is not None


async def test_a_slow_sink_is_no_slow_source(origin: Origin, tmp_path: Path) -> None:
    class Slow(Taking):
        async def write(self, piece: bytes) -> None:
            await asyncio.sleep(0.3)
            await super().write(piece)

    limits = replace(QUICK, stall_s=0.2, slow_s=0.2, slow_bytes_per_s=20_000_000, tries=1)
    path = await download(origin.artifact(), tmp_path, print, sink=Slow(), limits=limits)
    assert path.read_bytes() == CONTENT


def test_the_rate_is_of_the_last_window() -> None:
    rate = Rate(60)
    for _ in range(59):
        rate.count(1, 1_000_000)
        assert rate.bytes_per_s is None
    rate.count(1, 1_000_000)
    assert rate.bytes_per_s == 1_000_000
    for _ in range(30):
        rate.count(1, 0)
    assert rate.bytes_per_s == pytest.approx(500_000, rel=0.05)
    rate.count(60, 6000)
    assert rate.bytes_per_s == 100


# -- the disk


async def test_room_is_looked_for_before_a_byte_comes(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(NoRoom, match=r"are needed under .* and .* are free"):
        await download(origin.artifact(), tmp_path / "d", print, limits=QUICK)
    assert (tmp_path / "d" / "file.tar.gz.part").stat().st_size == 0


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of two megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "llmgw-test", place], check=True)
    monkeypatch.setattr(disk, "MARGIN_BYTES", 0)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_disk_that_is_too_small_says_what_is_needed_and_free(origin: Origin, small_disk: Path) -> None:
    with pytest.raises(NoRoom, match=r"3\.0 MB are needed under .* and 2\.\d MB are free"):
        await download(origin.artifact(), small_disk, print, limits=QUICK)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_disk_that_becomes_full_on_the_way(origin: Origin, small_disk: Path) -> None:
    origin.answers = [Answer(chunked=True)]
    with pytest.raises(NoRoom, match=r"the disk is full: file.tar.gz needs at least .* and .* are free: make room"):
        await download(origin.artifact(size=False), small_disk, print, limits=QUICK)


# -- where it lies


async def test_a_file_of_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "a folder" / "file.tar.gz"
    source.parent.mkdir()
    source.write_bytes(CONTENT)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    artifact = Artifact(name="file.tar.gz", url=source.as_uri(), sha256=sha256)
    path = await download(artifact, tmp_path / "d", print, sink=(sink := Taking()), limits=QUICK)
    assert path.read_bytes() == CONTENT == bytes(sink.taken)
    source.write_bytes(b"other")
    with pytest.raises(FetchFailed, match=sha256):
        await download(artifact, tmp_path / "e", print, limits=QUICK)
    source.unlink()
    with pytest.raises(FetchFailed, match="No such file"):
        await download(artifact, tmp_path / "f", print, limits=QUICK)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\nb", "x" * 300])
async def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    artifact = Artifact(name=name, url="http://127.0.0.1:1/x", sha256="0" * 64)
    with pytest.raises(FetchFailed, match="no plain file name"):
        await download(artifact, tmp_path, print)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, r"answered 404 \(Not Found\) when asked for file.tar.gz: there is no such file at http://127"),
        (401, "it wants credentials"),
        (403, "it wants credentials"),
        (503, r"failed: .* answered 503"),
    ],
)
async def test_a_server_that_refuses(origin: Origin, tmp_path: Path, status: int, words: str) -> None:
    origin.answers = [Answer(status=status)]
    with pytest.raises(FetchFailed, match=words):
        await download(origin.artifact(), tmp_path, print, limits=QUICK)
    assert len(origin.requests) == (3 if status == 503 else 1)


async def test_nobody_there(tmp_path: Path) -> None:
    artifact = Artifact(name="x", url="http://user:secret@127.0.0.1:1/x?token=secret", sha256="0" * 64)
    with pytest.raises(FetchFailed, match=r"127\.0\.0\.1:1 can't be reached: the connection was refused") as refused:
        await download(artifact, tmp_path, print, limits=QUICK)
    assert "secret" not in str(refused.value)
