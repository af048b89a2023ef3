from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

import pytest

from llmgw.store.base import Change, StoreError
from llmgw.store.sqlite import SqliteStore

from .leading import lead
from .samples import certificate, event, key, node, replica, revocation, token


async def fill(store: SqliteStore) -> int:
    epoch = await lead(store, "first life")
    await store.commit(
        epoch,
        Change(
            nodes=[node()],
            replicas=[replica()],
            replicas_made={"m": 1},
            certificates=[certificate()],
            tokens=[token()],
            revocations=[revocation("n9")],
            events=[event(1), event(2)],
        ),
    )
    await store.set_scale(epoch, "m", 2, 1)
    await store.put_key(epoch, key())
    await store.set_admin_token(epoch, "cd" * 32)
    return epoch


async def test_a_backup_restores_as_the_page_on_backups_says(sqlite: SqliteStore, tmp_path: Path) -> None:
    epoch = await fill(sqlite)
    await sqlite.backup(str(tmp_path / "backup.db"))
    before, events = await sqlite.load(), await sqlite.events()
    await sqlite.commit(epoch, Change(removed_nodes=["llmgw-node01"], events=[event(3)]))
    await sqlite.close()

    restored_to = tmp_path / "restored"
    restored_to.mkdir(0o700)
    shutil.copyfile(tmp_path / "backup.db", restored_to / "llmgw.db")
    restored = await SqliteStore.open(restored_to / "llmgw.db")
    assert await restored.load() == before
    assert await restored.events() == events
    again = await lead(restored, "second life")
    assert again > epoch
    await restored.commit(again, Change(nodes=[node("new")]))
    await restored.close()


async def test_a_backup_made_while_steps_are_written_holds_whole_steps(sqlite: SqliteStore, tmp_path: Path) -> None:
    epoch = await lead(sqlite, "a")

    async def write() -> None:
        for number in range(150):
            step = Change(nodes=[node(f"n{number}")], replicas=[replica(f"r{number}")], events=[event(number)])
            await sqlite.commit(epoch, step)

    async def back_up() -> None:
        for number in range(3):
            await sqlite.backup(str(tmp_path / f"copy{number}" / "llmgw.db"))

    for number in range(3):
        (tmp_path / f"copy{number}").mkdir()
    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(back_up())
    for number in range(3):
        copy = await SqliteStore.open(tmp_path / f"copy{number}" / "llmgw.db")
        saved = await copy.load()
        assert len(saved.nodes) == len(saved.replicas) == len(await copy.events(limit=1000))
        await copy.close()


async def test_a_backup_is_for_its_owner_alone_and_leaves_nothing_else(sqlite: SqliteStore, tmp_path: Path) -> None:
    target = tmp_path / "backups"
    target.mkdir()
    old_umask = os.umask(0)
    try:
        await sqlite.backup(str(target / "llmgw.db"))
    finally:
        os.umask(old_umask)
    assert [entry.name for entry in target.iterdir()] == ["llmgw.db"]
    assert stat.S_IMODE((target / "llmgw.db").stat().st_mode) == 0o600


async def test_nothing_is_overwritten(sqlite: SqliteStore, tmp_path: Path) -> None:
    for name in ("file", "directory", "link"):
        target = tmp_path / name
        if name == "file":
            target.write_text("precious")
        elif name == "directory":
            target.mkdir()
        else:
            target.symlink_to("nowhere")
        with pytest.raises(StoreError, match=f"{target} exists: a backup overwrites nothing"):
            await sqlite.backup(str(target))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(StoreError, match="exists"):
        await sqlite.backup(str(sqlite.path))


async def test_places_that_can_not_be_written(sqlite: SqliteStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"can't write the backup: .*nowhere does not exist"):
        await sqlite.backup(str(tmp_path / "nowhere" / "copy.db"))
    with pytest.raises(StoreError, match=r"'copy\.db': expected an absolute path"):
        await sqlite.backup("copy.db")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a directory"):
        await sqlite.backup(str(tmp_path / "file" / "copy.db"))


async def test_two_backups_into_one_file_make_one(sqlite: SqliteStore, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    results = await asyncio.gather(*(sqlite.backup(str(target)) for _ in range(4)), return_exceptions=True)
    assert results.count(None) == 1
    assert all("exists" in str(result) for result in results if result is not None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy.db", "data"]
