"""The process that unpacks: its verdicts, its end, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from llmgw.agent.fetch.archive import BadArchive, Packing
from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.contents import damage
from llmgw.agent.fetch.disk import NoRoom
from llmgw.agent.fetch.unpacker import Unpacker, unpack_file, unpacking

from .hostile import entry, file, link, packed, tar, zipped

T = TypeVar("T")

RANDOM = os.urandom(3 << 20)
GOOD = packed(Packing.TAR_GZ, tar(file(b"top/a", RANDOM), file(b"top/b", b"b"), link(b"top/l", b"a")))


def children(target: Path) -> list[int]:
    """Processes that unpack into ``target``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(target) in (process / "cmdline").read_text().split("unpack", 1)[-1]:
                found.append(int(process.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


async def until(there: Callable[[], list[T]]) -> T:
    """The first of what ``there`` finds, once it finds any."""
    async with asyncio.timeout(20):
        while not (found := there()):  # noqa: ASYNC110 (of other processes nobody tells)
            await asyncio.sleep(0.01)
    return found[0]


async def child_of(target: Path) -> int:
    return await until(lambda: children(target))


async def write_on(unpacker: Unpacker, content: bytes) -> None:
    async with asyncio.timeout(20):
        while True:
            await unpacker.write(content)


async def feed(content: bytes, target: Path, packing: Packing = Packing.TAR_GZ, step: int = 100_000) -> None:
    async with unpacking(packing, target, name="x.tar.gz", strip=True) as unpacker:
        for at in range(0, len(content), step):
            await unpacker.write(content[at : at + step])
        await unpacker.finish()


@pytest.mark.parametrize("packing", [Packing.TAR, Packing.TAR_GZ, Packing.TAR_XZ, Packing.TAR_ZST])
async def test_an_archive_is_unpacked_while_it_is_written(packing: Packing, tmp_path: Path) -> None:
    told: list[int] = []
    content = packed(packing, tar(file(b"top/a", RANDOM), file(b"top/b", b"b")))
    async with unpacking(packing, tmp_path, strip=True, progress=lambda done, total: told.append(done)) as unpacker:
        for at in range(0, len(content), 300_000):
            await unpacker.write(content[at : at + 300_000])
        assert not (tmp_path / "a").exists()
        await unpacker.finish()
        assert told
    assert (tmp_path / "a").read_bytes() == RANDOM
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "CONTENTS.sha256"}
    assert damage(tmp_path) is None
    assert not children(tmp_path)


async def test_what_it_has_is_on_the_disk_before_the_rest_has_come(tmp_path: Path) -> None:
    async with unpacking(Packing.TAR, tmp_path) as unpacker:
        await unpacker.write(file(b"a", RANDOM) + file(b"b"))
        await until(lambda: [path for path in tmp_path.rglob("a") if path.stat().st_size == len(RANDOM)])


async def test_its_writer_waits_for_it(tmp_path: Path) -> None:
    """An unpacker that stands still is not given more than a pipe holds."""
    async with unpacking(Packing.TAR, tmp_path) as unpacker:
        await unpacker.write(file(b"a"))
        os.kill(await child_of(tmp_path), signal.SIGSTOP)
        writing = asyncio.ensure_future(unpacker.write(file(b"b", RANDOM)))
        await asyncio.wait([writing], timeout=0.2)
        assert not writing.done()
        os.kill(await child_of(tmp_path), signal.SIGCONT)
        await writing


async def test_a_bad_archive_names_itself_and_its_member(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match=r"the name '\.\./evil' leaves its folder"):
        await feed(packed(Packing.TAR_GZ, tar(file(b"../evil"))), tmp_path)
    assert not (tmp_path.parent / "evil").exists()


async def test_a_bad_archive_is_told_while_there_is_more(tmp_path: Path) -> None:
    async with unpacking(Packing.TAR, tmp_path, name="x.tar") as unpacker:
        with pytest.raises(BadArchive, match="'a' is a device"):
            await write_on(unpacker, tar(file(b"a", kind=b"3")))


async def test_one_that_was_cut_short(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="it ends in the middle: it was cut short, at 'top/a'"):
        await feed(GOOD[: len(GOOD) // 2], tmp_path)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
async def test_one_that_is_killed_is_said_in_words(sign: signal.Signals, tmp_path: Path) -> None:
    async with unpacking(Packing.TAR_GZ, tmp_path, name="x.tar.gz") as unpacker:
        await unpacker.write(GOOD[:100_000])
        os.kill(await child_of(tmp_path), sign)
        with pytest.raises(FetchFailed, match=rf"the process that unpacks x\.tar\.gz was killed by {sign.name}"):
            await unpacker.finish()
    assert not (tmp_path / "top").exists()


async def test_one_that_is_killed_is_noticed_while_writing(tmp_path: Path) -> None:
    async with unpacking(Packing.TAR_GZ, tmp_path, name="x.tar.gz") as unpacker:
        await unpacker.write(GOOD[:100_000])
        os.kill(await child_of(tmp_path), signal.SIGKILL)
        with pytest.raises(FetchFailed, match="was killed by SIGKILL"):
            await write_on(unpacker, GOOD[100_000:])


async def test_called_off_it_is_gone(tmp_path: Path) -> None:
    async def never_ending() -> None:
        async with unpacking(Packing.TAR_GZ, tmp_path) as unpacker:
            await unpacker.write(GOOD[:100_000])
            await child_of(tmp_path)
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    task = asyncio.ensure_future(never_ending())
    async with asyncio.timeout(20):
        await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not children(tmp_path)


AGENT = """
import asyncio, sys
from pathlib import Path
from llmgw.agent.fetch.archive import Packing
from llmgw.agent.fetch.unpacker import unpacking

async def main():
    async with unpacking(Packing.TAR, Path(sys.argv[1])) as unpacker:
        await unpacker.write(b"")
        print("unpacking", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_dies_with_the_agent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, tmp_path], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        assert children(tmp_path)
        agent.kill()
    deadline = time.monotonic() + 20
    while [pid for pid in children(tmp_path) if _alive(pid)]:
        assert time.monotonic() < deadline


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_its_environment_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_NOT", "secret")
    async with unpacking(Packing.TAR, tmp_path):
        pid = await child_of(tmp_path)
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_zip_is_unpacked_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zipped(entry("top/a", RANDOM), entry("top/b")))
    (tmp_path / "t").mkdir()
    told: list[tuple[int, int | None]] = []
    await unpack_file(
        tmp_path / "x.zip", tmp_path / "t", Packing.ZIP, strip=True, progress=lambda *now: told.append(now)
    )
    assert (tmp_path / "t" / "a").read_bytes() == RANDOM
    assert told[0][1] == len(RANDOM) + 1


async def test_a_bad_zip_names_itself(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zipped(entry("../evil")))
    (tmp_path / "t").mkdir()
    with pytest.raises(BadArchive, match=r"the name '\.\./evil' leaves"):
        await unpack_file(tmp_path / "x.zip", tmp_path / "t", Packing.ZIP)


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await feed(GOOD, tmp_path / "nowhere")


@pytest.mark.root
async def test_a_full_disk(small_disk: Path) -> None:
    content = packed(Packing.TAR_GZ, tar(*(file(b"%d" % number, os.urandom(7 << 20)) for number in range(3))))
    with pytest.raises(NoRoom, match=r"x\.tar\.gz can't be unpacked: '2' needs 7\.3 MB .* and 6\.3 MB are free"):
        await feed(content, small_disk)
