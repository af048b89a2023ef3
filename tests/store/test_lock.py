from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from llmgw.store.base import StoreError, StoreLocked
from llmgw.store.lock import LOCK_FILE, DirectoryLock
from llmgw.store.sqlite import SqliteStore

from .processes import child, output_of


async def test_a_second_process_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    with child("hold", path) as first:
        assert output_of(first).readline() == "open\n"
        since = json.loads((tmp_path / LOCK_FILE).read_text())["since"]
        with pytest.raises(StoreLocked) as refused:
            await SqliteStore.open(path)
        assert str(refused.value) == (
            f"{tmp_path} is in use by process {first.pid} (since {since}): one data directory serves one control "
            "plane. Stop that process, or give this one a store of its own (store: in server.yaml)"
        )
        with child("refuse-to-open", path) as second:
            assert f"in use by process {first.pid}" in output_of(second).read()
        with pytest.raises(StoreLocked, match=f"process {first.pid}"):
            await SqliteStore.open(tmp_path / "another-name.db")
        assert not (tmp_path / "another-name.db").exists()


async def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    with child("hold", path) as first:
        output_of(first).readline()
        first.send_signal(signal.SIGKILL)
        first.wait()
        store = await SqliteStore.open(path)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        await store.close()


async def test_the_same_process_is_refused_too_until_it_closes(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    store = await SqliteStore.open(path)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        await SqliteStore.open(path)
    await store.close()
    await (await SqliteStore.open(path)).close()


async def test_a_start_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    path.write_text("this is no database, but it is long enough to be looked at as one" * 20)
    for _ in range(2):
        with pytest.raises(StoreError, match="is not a database"):
            await SqliteStore.open(path)


def test_releasing_twice_is_no_error(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    lock.release()
    lock.release()
    DirectoryLock.acquire(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"pid": "x", "since": 1}', b"[1]"])
def test_a_lock_file_that_says_nothing_is_still_a_lock(tmp_path: Path, content: bytes) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    lock.path.write_bytes(content)
    with pytest.raises(StoreLocked, match="in use by another process"):
        DirectoryLock.acquire(tmp_path)
    lock.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / LOCK_FILE).symlink_to(precious)
    with pytest.raises(StoreError, match="symbolic link"):
        DirectoryLock.acquire(tmp_path)
    assert precious.read_text() == "keep"
