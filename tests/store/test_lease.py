"""Who leads, and for how long: one lease on the store's own clock, the same rules in every implementation."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from llmgw.store.base import Change, Fenced, Lead, Store
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore

from .leading import lead
from .samples import node

Shift = Callable[[float], None]


class MovableClock:
    def __init__(self) -> None:
        self.now = 1_764_439_403.0

    def __call__(self) -> float:
        return self.now

    def shift(self, seconds: float) -> None:
        self.now += seconds


def shift_row(path: Path, seconds: float) -> None:
    """The clock of a database can't be set from here: what it stored is moved the other way."""
    with closing(sqlite3.connect(path)) as shell, shell:
        shell.execute("UPDATE lease SET renewed_at = renewed_at - ?", (seconds,))


@pytest.fixture(params=["sqlite", "memory"])
async def leased(request: pytest.FixtureRequest, sqlite: SqliteStore) -> tuple[Store, Shift]:
    """A store, and what moves its clock by as many seconds."""
    if request.param == "sqlite":
        return sqlite, lambda seconds: shift_row(sqlite.path, seconds)
    clock = MovableClock()
    return MemoryStore(clock=clock), clock.shift


async def test_the_first_leads_and_another_waits_for_its_lease_to_end(leased: tuple[Store, Shift]) -> None:
    store, later = leased
    first = await store.lead("a", lease_s=60)
    assert first is not None
    assert (first.previous, first.taken_over) == ("", False)
    assert await store.lead("b", lease_s=60) is None
    later(59)
    assert await store.lead("b", lease_s=60) is None
    await store.commit(first.epoch, Change(nodes=[node("n1")]))
    later(2)
    second = await store.lead("b", lease_s=60)
    assert second == Lead(epoch=second.epoch if second else 0, previous="a", taken_over=True)
    with pytest.raises(Fenced, match="'b' leads"):
        await store.commit(first.epoch, Change(nodes=[node("n2")]))
    assert [node.id for node in (await store.load()).nodes] == ["n1"]


async def test_a_lease_that_is_renewed_lasts(leased: tuple[Store, Shift]) -> None:
    store, later = leased
    first = await store.lead("a", lease_s=60)
    assert first is not None
    for _ in range(5):
        later(50)
        await store.renew(first.epoch, 60)
        assert await store.lead("b", lease_s=60) is None
    later(61)
    assert await store.lead("b", lease_s=60) is not None


async def test_a_lead_that_was_resigned_is_free_at_once(leased: tuple[Store, Shift]) -> None:
    store, _ = leased
    first = await store.lead("a", lease_s=60)
    assert first is not None
    await store.resign(first.epoch)
    second = await store.lead("b", lease_s=60)
    assert second is not None
    assert second.taken_over
    await store.resign(first.epoch)
    assert await store.lead("c", lease_s=60) is None, "one that leads no more can't end another's lease"
    with pytest.raises(Fenced):
        await store.renew(first.epoch, 60)


async def test_a_holder_takes_its_own_lease_back_after_a_restart(leased: tuple[Store, Shift]) -> None:
    store, _ = leased
    first, second = await store.lead("a", lease_s=60), await store.lead("a", lease_s=60)
    assert first is not None
    assert second is not None
    assert second.epoch > first.epoch
    assert (second.previous, second.taken_over) == ("a", False)


async def test_who_is_alone_takes_a_live_lease(leased: tuple[Store, Shift]) -> None:
    store, _ = leased
    await store.lead("a", lease_s=60)
    taken = await store.lead("b", lease_s=60, alone=True)
    assert taken is not None
    assert (taken.previous, taken.taken_over) == ("a", True)


async def test_a_clock_that_was_set_back_keeps_nobody_out_for_longer_than_a_lease(leased: tuple[Store, Shift]) -> None:
    store, later = leased
    await store.lead("a", lease_s=60)
    later(-600)
    assert await store.lead("b", lease_s=60) is None
    later(61)
    assert await store.lead("b", lease_s=60) is not None


async def test_one_of_many_who_want_the_lead_gets_it(sqlite: SqliteStore) -> None:
    taken = await asyncio.gather(*(sqlite.lead(f"cp-{number}", lease_s=60) for number in range(20)))
    assert sum(lead is not None for lead in taken) == 1


async def test_a_lead_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    store = await SqliteStore.open(path)
    epoch = await lead(store, "a")
    await store.close()
    store = await SqliteStore.open(path)
    try:
        assert await store.lead("b", lease_s=60) is None
        await store.commit(epoch, Change(nodes=[node("n1")]))
    finally:
        await store.close()


async def test_verbs_of_the_memory_store_never_suspend() -> None:
    """So that a simulation can drive them without an event loop."""
    store = MemoryStore(secret="s")
    for call in (store.lead("a", lease_s=1.0), store.commit(1, Change(nodes=[node()])), store.renew(1, 1.0)):
        with pytest.raises(StopIteration):
            call.send(None)
    for call in (store.load(), store.events(), store.set_scale(1, "m", 1, 1), store.resign(1), store.close()):
        with pytest.raises(StopIteration):
            call.send(None)
