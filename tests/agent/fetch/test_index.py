"""Downloads by the real pip from an index on loopback, which misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from llmgw.agent.fetch import disk
from llmgw.agent.fetch.index import Fetched, FetchFailed, Wanted, fetch

from .loopback import Index, Wheel, make_wheel

BIG = make_wheel("big-thing", "1.0", {"big/model.bin": (os.urandom(3 << 20), 0o644)}, stored=True)


async def get(
    wheel: Wheel, folder: Path, said: list[str] | None = None, *, stall_s: float = 20, **pins: str
) -> Fetched:
    wanted = Wanted(package=wheel.package, version=wheel.version, **pins)
    return await fetch(wanted, folder, (said if said is not None else []).append, stall_s=stall_s)


async def test_a_wheel_arrives_with_progress_in_words(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    said: list[str] = []
    fetched = await get(BIG, tmp_path / "d", said, sha256=BIG.sha256)
    assert fetched.wheel.read_bytes() == BIG.content
    assert fetched.sha256 == BIG.sha256
    assert said[-1] == f"downloading {BIG.name} (3.1 MB, 100 %)"


async def test_without_a_pin_the_indexs_own_hash_counts(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    assert (await get(BIG, tmp_path / "d")).sha256 == BIG.sha256


async def test_another_files_hash_is_refused_with_both(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    with pytest.raises(FetchFailed) as refused:
        await get(BIG, tmp_path / "d", sha256="0" * 64)
    assert "0" * 64 in str(refused.value)
    assert BIG.sha256 in str(refused.value)
    assert "nothing was installed" in str(refused.value)


async def test_what_the_index_lacks_is_said_with_what_it_has(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    with pytest.raises(FetchFailed, match=r"has no big-thing 2\.0; it has 1\.0"):
        await fetch(Wanted(package="big-thing", version="2.0"), tmp_path / "d", print)
    with pytest.raises(FetchFailed, match="nor any other version"):
        await fetch(Wanted(package="no-thing", version="2.0"), tmp_path / "d", print)


@pytest.mark.parametrize(("status", "words"), [(403, "credentials"), (503, "503 .*Service Unavailable|server errors")])
async def test_an_index_that_refuses(index: Index, tmp_path: Path, status: int, words: str) -> None:
    index.status = status
    with pytest.raises(FetchFailed, match=words):
        await get(BIG, tmp_path / "d")


async def test_no_index_at_all(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple/")
    with pytest.raises(FetchFailed, match=r"can't be reached for big-thing 1\.0: the connection was refused"):
        await get(BIG, tmp_path / "d")


async def test_an_index_that_stays_silent_is_given_up(index: Index, tmp_path: Path) -> None:
    index.silent = True
    with pytest.raises(FetchFailed, match=r"did not answer for 2 s when asked for big-thing 1\.0"):
        await get(BIG, tmp_path / "d", stall_s=2)


async def test_a_download_that_stalls_is_given_up_and_pip_is_gone(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    index.hold_after = 1 << 20
    with pytest.raises(FetchFailed, match=r"stopped after [01]\.\d MB: no byte for 6 s"):
        await get(BIG, tmp_path / "d", stall_s=6)
    assert not _processes_in(tmp_path)


async def test_a_download_that_is_cut_fails_in_words(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    index.cut_after = 1 << 20
    with pytest.raises(FetchFailed, match="broke the connection"):
        await get(BIG, tmp_path / "d")


async def test_a_cancelled_download_leaves_no_process(index: Index, tmp_path: Path) -> None:
    index.wheels.append(BIG)
    index.hold_after = 1 << 20
    task = asyncio.create_task(get(BIG, tmp_path / "d"))
    assert await asyncio.to_thread(index.holding.wait, 30)
    assert _processes_in(tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _processes_in(tmp_path)


async def test_room_is_looked_for_before_the_bytes_come(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheels.append(BIG)
    monkeypatch.setattr(disk, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(FetchFailed, match=r"are needed under .* and .* are free"):
        await get(BIG, tmp_path / "d")


async def test_a_folder_that_can_not_be_made(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchFailed, match="file"):
        await get(BIG, tmp_path / "file" / "d")


def _processes_in(folder: Path) -> list[str]:
    """Processes whose working directory lies under ``folder``, after those that are just ending have ended."""
    deadline = time.monotonic() + 10
    while True:
        found = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _works_in(entry, folder)]
        if not found or time.monotonic() > deadline or all(_alive(name) for name in found):
            return found


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink().is_relative_to(folder)
    except OSError:
        return False


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
