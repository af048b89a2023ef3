"""The epoch is checked in the transaction that writes, on what the database itself says."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from llmgw.store.base import Change, Fenced, StoreError
from llmgw.store.sqlite import SqliteStore

from .leading import lead
from .samples import certificate, event, node


async def test_a_leader_deposed_behind_its_back_writes_nothing(sqlite: SqliteStore) -> None:
    epoch = await lead(sqlite, "frozen")
    with closing(sqlite3.connect(sqlite.path)) as other, other:
        other.execute("UPDATE lease SET epoch = epoch + 1, holder = 'next'")
    with pytest.raises(Fenced, match=f"'next' leads with epoch {epoch + 1}"):
        await sqlite.commit(epoch, Change(nodes=[node()], events=[event(1)]))
    assert (await sqlite.load()).nodes == ()
    assert await sqlite.events() == []


async def test_a_transaction_holds_the_write_lock_before_it_has_looked(sqlite: SqliteStore) -> None:
    with (
        sqlite._writing.begin(),
        closing(sqlite3.connect(sqlite.path, timeout=0, isolation_level=None)) as other,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


async def test_writes_that_race_with_a_new_leader_come_before_it_or_not_at_all(sqlite: SqliteStore) -> None:
    epoch = await lead(sqlite, "old")
    steps = [sqlite.commit(epoch, Change(nodes=[node(f"n{number}")])) for number in range(5)]
    late = [sqlite.commit(epoch, Change(nodes=[node(f"late{number}")])) for number in range(5)]
    results = await asyncio.gather(*steps, lead(sqlite, "new"), *late, return_exceptions=True)
    written = {node.id for node in (await sqlite.load()).nodes}
    assert written == {f"n{number}" for number in range(5)}
    assert [type(result) for result in results[6:]] == [Fenced] * 5


async def test_an_epoch_is_not_below_the_clock_so_that_a_restored_store_leads_on(sqlite: SqliteStore) -> None:
    first = await lead(sqlite, "a")
    with closing(sqlite3.connect(sqlite.path)) as shell, shell:
        (now,) = shell.execute("SELECT CAST(strftime('%s', 'now') AS INTEGER)").fetchone()
        shell.execute("UPDATE lease SET epoch = 5")  # As a backup from long ago would have it.
    assert first >= now - 60
    assert await lead(sqlite, "a") >= now


async def test_epochs_rise_also_where_the_clock_is_behind(sqlite: SqliteStore) -> None:
    with closing(sqlite3.connect(sqlite.path)) as shell, shell:
        shell.execute("UPDATE lease SET epoch = 9000000000")
    assert await lead(sqlite, "a") == 9_000_000_001
    assert await lead(sqlite, "a") == 9_000_000_002


async def test_text_and_numbers_that_sqlite_can_not_hold_are_refused(sqlite: SqliteStore) -> None:
    epoch = await lead(sqlite, "a")
    for write in (
        sqlite.set_scale(epoch, "m", 2**70, 1),
        sqlite.commit(epoch, Change(certificates=[certificate("\ud800", "n")])),
    ):
        with pytest.raises(StoreError, match="can't be stored, and nothing of this step was written"):
            await write
    saved = await sqlite.load()
    assert (saved.scale, saved.certificates) == ({}, ())
