"""From a server on loopback to files in a folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from llmgw.agent.fetch.archive import BadArchive, Packing
from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.contents import damage
from llmgw.agent.fetch.disk import NoRoom
from llmgw.agent.fetch.obtain import obtain
from llmgw.cluster.model import EngineState

from .hostile import entry, file, link, packed, tar, zipped
from .origin import Answer, Origin, serving

RANDOM = os.urandom(2 << 20)
GOOD = packed(Packing.TAR_GZ, tar(file(b"top/a", RANDOM, 0o755), file(b"top/b", b"b"), link(b"top/l", b"a")))


class Place:
    """Where an archive goes, and what was said meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.partial = folder / "x.partial-1"
        self.downloads = folder / "downloads"
        self.partial.mkdir()
        self.said: list[tuple[EngineState, str]] = []

    async def obtain(self, origin: Origin, **changed: object) -> None:
        await obtain(origin.artifact(**changed), self.partial, self.downloads, lambda *now: self.said.append(now))

    @property
    def counts(self) -> set[str]:
        return {path.name for path in self.partial.iterdir() if not path.name.startswith(".unpacking-")}

    @property
    def states(self) -> list[EngineState]:
        states = [state for state, _ in self.said]
        return [state for at, state in enumerate(states) if at == 0 or states[at - 1] is not state]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_an_archive_comes_and_is_unpacked(place: Place) -> None:
    origin = Origin(GOOD)
    with serving(origin):
        await place.obtain(origin)
    assert (place.partial / "a").read_bytes() == RANDOM
    assert place.counts == {"a", "b", "l", "CONTENTS.sha256"}
    assert damage(place.partial) is None
    assert place.states == [EngineState.DOWNLOADING, EngineState.UNPACKING]
    assert "unpacking file.tar.gz (" in place.said[-1][1]
    assert [path.name for path in place.downloads.iterdir()] == ["file.tar.gz"]


async def test_a_zip_comes_and_is_unpacked(place: Place) -> None:
    origin = Origin(zipped(entry("top/a", RANDOM), entry("top/b")), name="file.zip")
    with serving(origin):
        await place.obtain(origin)
    assert place.counts == {"a", "b", "CONTENTS.sha256"}
    assert place.states == [EngineState.DOWNLOADING, EngineState.UNPACKING]


async def test_a_companion_comes_to_what_is_there(place: Place) -> None:
    main = Origin(GOOD)
    companion = Origin(packed(Packing.TAR_ZST, tar(file(b"cudart/c"))), name="cudart.tar.zst")
    with serving(main), serving(companion):
        await place.obtain(main)
        await place.obtain(companion)
    assert place.counts == {"a", "b", "l", "c", "CONTENTS.sha256"}
    assert damage(place.partial) is None


async def test_one_flipped_byte_is_fetched_anew(place: Place) -> None:
    flipped = bytes([*GOOD[:1000], GOOD[1000] ^ 1, *GOOD[1001:]])
    origin = Origin(GOOD, answers=[Answer(content=flipped), Answer()])
    with serving(origin):
        await place.obtain(origin)
    assert len(origin.requests) == 2
    assert (place.partial / "a").read_bytes() == RANDOM
    assert not [path for path in place.partial.iterdir() if path.name.startswith(".")]


async def test_another_file_is_refused_with_both_hashes(place: Place) -> None:
    other = Origin(packed(Packing.TAR_GZ, tar(file(b"evil"))))
    with serving(other), pytest.raises(FetchFailed) as refused:
        await place.obtain(other, sha256="0" * 64)
    assert "0" * 64 in str(refused.value)
    assert other.sha256 in str(refused.value)
    assert len(other.requests) == 2
    assert not place.counts
    assert not list(place.downloads.iterdir())


async def test_what_is_wrong_with_a_wrong_file_is_not_said(place: Place) -> None:
    """That it can't be unpacked is no news where it is not the file that was asked for."""
    other = Origin(b"<html>sign in</html>")
    with serving(other), pytest.raises(FetchFailed, match="sha256"):
        await place.obtain(other, sha256="0" * 64)


async def test_a_right_file_that_can_not_be_unpacked(place: Place) -> None:
    origin = Origin(packed(Packing.TAR_GZ, tar(file(b"a", RANDOM), file(b"../evil"))))
    with serving(origin), pytest.raises(BadArchive, match=r"the name '\.\./evil'"):
        await place.obtain(origin)
    assert not place.counts


async def test_a_kind_that_is_not_unpacked_is_not_fetched(place: Place) -> None:
    origin = Origin(GOOD, name="file.rar")
    with serving(origin), pytest.raises(BadArchive, match="it is no archive"):
        await place.obtain(origin)
    assert not origin.requests


async def test_what_came_is_gone_on_from(place: Place) -> None:
    origin = Origin(GOOD, answers=[Answer(cut_at=len(GOOD) * 6 // 10), Answer()])
    with serving(origin):
        await place.obtain(origin)
    assert origin.ranges == [None, f"bytes={len(GOOD) * 6 // 10}-"]
    assert (place.partial / "a").read_bytes() == RANDOM


async def test_called_off_it_goes_on_from_there_later(place: Place) -> None:
    origin = Origin(GOOD, answers=[Answer(hold_at=len(GOOD) // 2), Answer()])
    with serving(origin):
        first = asyncio.ensure_future(place.obtain(origin))
        assert await asyncio.to_thread(origin.holding.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not place.counts
        await place.obtain(origin)
    assert (place.partial / "a").read_bytes() == RANDOM


@pytest.mark.root
async def test_a_full_disk(small_disk: Path) -> None:
    place = Place(small_disk)
    origin = Origin(packed(Packing.TAR, tar(file(b"a", bytes(4 << 20)), file(b"b", bytes(12 << 20)))), name="file.tar")
    with serving(origin), pytest.raises(NoRoom, match=r"(needed|needs) .* free"):
        await place.obtain(origin)
    assert not place.counts
