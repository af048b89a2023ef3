"""What was said to be written is there, whatever happens to the process or the disk."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import pytest

from llmgw.store.sqlite import SqliteStore

from .leading import lead
from .processes import child, on_a_file_system_of_its_own, output_of


@pytest.mark.parametrize("lines", [1, 7, 40])
async def test_kill_9_loses_nothing_that_was_committed(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "llmgw.db"
    with child("write-forever", path) as process:
        for _ in range(lines):
            output_of(process).readline()
        process.send_signal(signal.SIGKILL)
        last = max([lines, *map(int, output_of(process).read().split())])
        assert process.wait() == -signal.SIGKILL
    store = await SqliteStore.open(path)
    saved = await store.load()
    events = await store.events(limit=10_000)
    await store.close()
    (replica,), (node,) = saved.replicas, saved.nodes
    assert replica.generation in (last, last + 1), "at most the step that was not reported yet is there besides"
    assert (node.since, saved.replicas_made) == (replica.since, {"m": replica.generation})
    assert [event.at for event in events] == [float(number) for number in range(1, replica.generation + 1)]


def test_each_commit_waits_for_the_disk(sqlite: SqliteStore) -> None:
    with sqlite._writing.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_readers_can_not_write(sqlite: SqliteStore) -> None:
    with (
        sqlite._reading.connect() as connection,
        pytest.raises(Exception, match="attempt to write a readonly database"),
    ):
        connection.exec_driver_sql("DELETE FROM events")


@pytest.mark.root
def test_a_full_disk_is_told_in_words_and_nothing_is_half_written(tmp_path: Path) -> None:
    refused, kept, no_backup, goes_on = on_a_file_system_of_its_own("fill-the-disk", tmp_path, "size=2m")
    number = int(refused.split()[1])
    assert f"the disk that holds {tmp_path}/llmgw.db is full: nothing of this step was written" in refused
    assert kept == f"kept {number - 1} {number - 1} {number - 1}"
    assert "copy.db" not in no_backup.split("]")[0]
    assert f"the disk that holds {tmp_path}/copy.db is full: no backup was written" in no_backup
    assert goes_on == f"goes on {number}"


@pytest.mark.root
def test_a_disk_that_is_full_from_the_start_is_told_in_words(tmp_path: Path) -> None:
    (line,) = on_a_file_system_of_its_own("refuse-to-open", tmp_path, "size=64k")
    assert line.startswith("StoreError ")
    assert "is full" in line


async def test_another_program_that_holds_the_database_is_named_as_the_cause(
    sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await lead(sqlite, "a")
    await sqlite.set_admin_token(epoch, "before")
    with sqlite._writing.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=20")
    shell = sqlite3.connect(sqlite.path, isolation_level=None)
    shell.execute("BEGIN IMMEDIATE")
    with pytest.raises(Exception, match=r"llmgw\.db is held by another program.*fuser"):
        await sqlite.set_admin_token(epoch, "after")
    shell.close()
    assert (await sqlite.load()).admin_token_hash == "before"
    await sqlite.set_admin_token(epoch, "after")
    assert (await sqlite.load()).admin_token_hash == "after"
