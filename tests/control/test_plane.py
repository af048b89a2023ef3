"""The one writer: what it stores, when it does not, and what it does when the store or its own time fails it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest

from llmgw.cluster.actions import PutDrain
from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.model import (
    Cluster,
    Cpu,
    Drain,
    EngineOnNode,
    EngineState,
    Instant,
    Inventory,
    NodeState,
    ReplicaState,
    Vitals,
)
from llmgw.control import fold
from llmgw.control.leadership import Deposed
from llmgw.control.plane import STALL_S, TICK_S, NotWritten, Plane
from llmgw.link.messages import Heartbeat, Hello, Observed
from llmgw.store.base import ApiKey, Change, Fenced, Saved, StoreError
from llmgw.store.memory import MemoryStore
from tests.control.leading import leading

GIB = 2**30
SIM = Catalog(
    models=(ModelSpec(name="m", profiles=(Profile(name="p", engine="sim", memory_bytes=GIB),)),),
)
NONE = Catalog()
INVENTORY = Inventory(
    hostname="n1",
    os="Debian",
    kernel="6.1",
    libc="glibc 2.36",
    cpu=Cpu(model="x", architecture="x86_64", cores=2, extensions=("avx2",)),
    memory_bytes=16 * GIB,
    mgmt_addr="127.0.0.1",
)
VITALS = Vitals(memory_bytes=16 * GIB, memory_available_bytes=8 * GIB, disk_bytes=GIB, disk_free_bytes=GIB)
Act = Callable[[], Awaitable[None]]
ENGINE = EngineOnNode(name="sim", version="1", state=EngineState.INSTALLED)


class Recording(MemoryStore):
    """The in-memory store, with every step that was written, and a fault to raise instead where one is set."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.fault: Exception | None = None
        self.refused = asyncio.Event()

    async def commit(self, epoch: int, change: Change) -> None:
        self._check_fault()
        await super().commit(epoch, change)
        self.changes.append(change)

    async def renew(self, epoch: int, lease_s: float) -> None:
        self._check_fault()
        await super().renew(epoch, lease_s)

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        self._check_fault()
        await super().set_scale(epoch, model, replicas, base)

    def _check_fault(self) -> None:
        if self.fault is not None:
            asyncio.get_running_loop().call_soon(self.refused.set)
            raise self.fault


class Time:
    def __init__(self) -> None:
        self.at = Instant(1_000_000.0, 5_000.0)

    def __call__(self) -> Instant:
        return self.at

    def move(self, seconds: float) -> None:
        self.at = Instant(self.at.wall_s + seconds, self.at.monotonic_s + seconds)


class Bench:
    def __init__(self, plane: Plane, store: Recording, time: Time) -> None:
        self.plane = plane
        self.store = store
        self.time = time

    def join(self, session: int = 1) -> None:
        hello = Hello(
            role="node", id="n1", version="0", inventory=INVENTORY, vitals=VITALS, probed=True, engines=(ENGINE,)
        )
        self.plane.tell(
            lambda: self.plane.take(
                fold.joined(self.plane.cluster.nodes.get("n1"), hello, session, "10.0.0.1:1", self.time())
            )
        )

    def beat(self, vitals: Vitals = VITALS) -> None:
        frame = Heartbeat(epoch=1, session=1, sent_at=0.0, vitals=vitals)
        self.plane.tell(lambda: self.plane.take(fold.heartbeat(self.plane.cluster.nodes["n1"], frame, self.time())))

    async def settled(self, check: Callable[[], bool]) -> None:
        """Returns once ``check`` holds after one of the plane's steps."""
        async with asyncio.timeout(10):
            while not check():
                stepped = asyncio.Event()
                self.plane.on_settled.append(stepped.set)
                await stepped.wait()
                self.plane.on_settled.remove(stepped.set)


@asynccontextmanager
async def running(catalog: Catalog = SIM) -> AsyncIterator[Bench]:
    store, time = Recording(), Time()
    leadership = await leading(store, clock=time)
    plane = Plane(
        Cluster(name="c", catalog=catalog, secret="s"), store=store, leadership=leadership, saved=Saved(), clock=time
    )
    task = asyncio.ensure_future(plane.run())
    try:
        yield Bench(plane, store, time)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_that_joins_is_stored_and_given_a_replica() -> None:
    async with running() as bench:
        bench.join()
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))
        await bench.settled(lambda: next(iter(bench.plane.cluster.replicas.values())).state is ReplicaState.PLACING)
        saved = await bench.store.load()
    assert [node.id for node in saved.nodes] == ["n1"]
    assert [replica.state for replica in saved.replicas] == [ReplicaState.PLACING]
    kinds = {event.kind for change in bench.store.changes for event in change.events}
    assert {"node.registered", "node.ready", "replica.created", "replica.placed"} <= kinds


async def test_heartbeats_never_commit() -> None:
    async with running(Catalog()) as bench:
        bench.join()
        await bench.settled(lambda: bench.plane.cluster.nodes.get("n1") is not None)
        await bench.settled(lambda: bench.plane.cluster.nodes["n1"].state is NodeState.READY)
        written = len(bench.store.changes)
        for number in range(20):
            bench.time.move(0.1)
            bench.beat(replace(VITALS, memory_available_bytes=number * GIB))
        await bench.settled(lambda: bench.plane.cluster.nodes["n1"].heard_at_s == bench.time().monotonic_s)
        assert len(bench.store.changes) == written
        bench.beat(replace(VITALS, memory_bytes=32 * GIB))
        await bench.settled(lambda: len(bench.store.changes) > written)
    words = [event.words for event in bench.store.changes[-1].events]
    assert words == ["node n1: memory 16 GiB -> 32 GiB"]


async def test_progress_of_an_engine_is_shown_and_not_stored() -> None:
    async with running(Catalog()) as bench:
        bench.join()
        await bench.settled(lambda: bench.plane.cluster.nodes.get("n1") is not None)
        await bench.settled(lambda: bench.plane.cluster.nodes["n1"].state is NodeState.READY)

        def told(percent: int) -> None:
            engine = EngineOnNode(name="llamacpp", version="b1", state=EngineState.DOWNLOADING, words=f"{percent} %")
            frame = Observed(epoch=1, session=1, engines=(ENGINE, engine))
            bench.plane.take(fold.observed(bench.plane.cluster.nodes["n1"], frame, bench.time()))

        bench.plane.tell(lambda: told(1))
        await bench.settled(lambda: len(bench.plane.cluster.nodes["n1"].engines) == 2)
        written = len(bench.store.changes)
        bench.plane.tell(lambda: told(42))
        await bench.settled(lambda: bench.plane.cluster.nodes["n1"].engines[1].words == "42 %")
        assert len(bench.store.changes) == written


async def test_a_store_that_fails_changes_nothing_and_is_tried_again() -> None:
    async with running() as bench:
        bench.store.fault = StoreError("the disk is full")
        bench.join()
        async with asyncio.timeout(10):
            await bench.store.refused.wait()
        assert bench.plane.trouble is not None
        assert bench.plane.trouble.endswith("what runs goes on: the disk is full")
        assert not bench.plane.cluster.replicas
        bench.store.fault = None
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))
        assert bench.plane.trouble is None


async def test_a_fault_of_our_own_is_said_and_what_came_after_is_taken_up() -> None:
    async with running() as bench:

        def fault() -> None:
            raise RuntimeError("bug")

        bench.plane.tell(fault)
        bench.join()
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))
        assert bench.plane.trouble is None
        bench.store.fault = RuntimeError("bug")
        bench.plane.tell(lambda: bench.plane.note("x", "", "y"))
        async with asyncio.timeout(10):
            await bench.store.refused.wait()
        assert "RuntimeError('bug')" in (bench.plane.trouble or "")
        bench.store.fault = None
        await bench.settled(lambda: bench.plane.trouble is None)
        assert "y" in [event.words for event in bench.store.changes[-1].events]


async def test_a_deposed_leader_stops() -> None:
    store, time = Recording(), Time()
    leadership = await leading(store, "first", time)
    plane = Plane(
        Cluster(name="c", catalog=SIM, secret="s"), store=store, leadership=leadership, saved=Saved(), clock=time
    )
    await leading(store, "second")
    with pytest.raises(Deposed, match="another control plane has taken the lead"):
        async with asyncio.timeout(10):
            await plane.run()
    assert not (await store.load()).replicas


async def test_an_answer_comes_after_what_follows_from_it_is_stored() -> None:
    async with running() as bench:
        bench.join()
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))

        async def scale() -> str:
            await bench.plane.set_scale("m", 3)
            return "done"

        assert await bench.plane.ask(scale) == "done"
        assert len((await bench.store.load()).replicas) == 3


async def test_a_question_that_fails_is_answered_with_its_error() -> None:
    async with running() as bench:

        async def fail() -> None:
            raise StoreError("no")

        with pytest.raises(StoreError, match="no"):
            await bench.plane.ask(fail)


async def test_who_asks_while_nothing_can_be_written_is_told_so_at_once() -> None:
    async with running() as bench:
        bench.join()
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))
        bench.store.fault = StoreError("the disk is full")

        async def halt() -> None:
            bench.plane.halt()
            bench.plane.note("control.halting", "", "asked for")

        async with asyncio.timeout(10):
            with pytest.raises(NotWritten, match="it is carried out once the store can be written: the disk is full"):
                await bench.plane.ask(halt)
            bench.store.fault = RuntimeError("bug")
            with pytest.raises(NotWritten, match="bug"):
                await bench.plane.ask(halt)
        bench.store.fault = None
        await bench.settled(lambda: not bench.plane.cluster.replicas)


@pytest.mark.parametrize("turn_s", [0, 1], ids=["within a third of the lease", "for ten leases"])
async def test_peers_are_heard_and_who_asks_is_answered_however_long_nothing_can_be_written(turn_s: int) -> None:
    store, time = Recording(), Time()
    plane = await turning(store, time)
    bench, sent = Bench(plane, store, time), []
    plane.on_settled.append(lambda: sent.append(time.at))
    bench.join()
    await plane.turn()
    before = await store.load()
    store.fault, sent[:] = StoreError("the disk is full"), []
    taken_up = 0

    async def note() -> None:
        nonlocal taken_up
        taken_up += 1
        plane.note("x", "", f"asked for, {taken_up}")

    for _ in range(100):
        time.move(turn_s)
        bench.beat()
        acts: list[Act] = [
            note,
            lambda: plane.set_scale("m", 3),
            lambda: plane.carry_out([PutDrain(Drain(node="n1", since=1.0))]),
        ]
        in_memory, *stored_first = await answers(plane, *acts)
        assert repr(in_memory) == ("NotWritten('it is carried out once the store can be written: the disk is full')")
        assert [repr(answer) for answer in stored_first] == ["StoreError('the disk is full')"] * 2
        assert plane.cluster.nodes["n1"].heard_at_s == time().monotonic_s
    assert sent == []
    store.fault = None
    time.move(turn_s)
    await plane.turn()
    after, events = await store.load(), await store.events(limit=10_000)
    assert (plane.trouble, plane.cluster.nodes["n1"].silent) == (None, False)
    assert (after.scale, after.drains, after.nodes) == (before.scale, before.drains, before.nodes)
    assert [event.words for event in events if event.kind == "x"] == [f"asked for, {n}" for n in range(1, 101)]
    assert [event.kind for event in events].count("store.refused") == 1
    assert {"control.stalled", "node.lost"}.isdisjoint(event.kind for event in events)


async def test_an_outage_in_which_each_try_takes_long_is_one_pause() -> None:
    """A file that another program has locked is waited for, each time."""
    store, time = Recording(), Time()
    plane = await turning(store, time)
    store.fault = StoreError("the database is locked")
    for _ in range(20):
        time.move(TICK_S + STALL_S + 1.0)
        with suppress(StoreError):
            await plane.turn()
    store.fault = None
    await plane.turn()
    assert [event.kind for event in await store.events(limit=100)].count("control.stalled") == 1


async def test_who_asks_does_not_wait_behind_what_was_told_and_can_not_be_stored() -> None:
    store, time = Recording(), Time()
    plane = await turning(store, time)
    store.fault = StoreError("the disk is full")

    async def halt() -> None:
        plane.halt()

    plane.tell(lambda: plane.set_scale("m", 3))
    plane.tell(lambda: plane.set_scale("m", 4))
    (answer,) = await answers(plane, halt)
    assert isinstance(answer, NotWritten)
    store.fault = None
    await plane.turn()
    assert (plane.trouble, (await store.load()).scale) == (None, {"m": 4})


async def test_what_can_not_be_sent_out_stops_no_decision_and_is_tried_again() -> None:
    async with running() as bench:
        tries = 0

        def breaks() -> None:
            nonlocal tries
            tries += 1
            raise RuntimeError("bug")

        bench.plane.on_settled.insert(0, breaks)
        bench.join()
        await bench.settled(lambda: bool(bench.plane.cluster.replicas))
        await bench.settled(lambda: tries > 2)
        assert bench.plane.trouble is None


async def test_a_question_of_a_deposed_leader_stops_it() -> None:
    store, time = Recording(), Time()
    leadership = await leading(store, "first", time)
    plane = Plane(Cluster(name="c", secret="s"), store=store, leadership=leadership, saved=Saved(), clock=time)
    task = asyncio.ensure_future(plane.run())
    await leading(store, "second")
    with pytest.raises(Fenced):
        await plane.ask(lambda: plane.set_scale("m", 3))
    with pytest.raises(Deposed):
        async with asyncio.timeout(10):
            await task


async def test_who_slept_judges_nobody() -> None:
    async with running(Catalog()) as bench:
        bench.join()
        await bench.settled(lambda: bench.plane.cluster.nodes.get("n1") is not None)
        await bench.settled(lambda: bench.plane.cluster.nodes["n1"].state is NodeState.READY)
        bench.time.move(120)
        bench.plane.tell(lambda: None)
        await bench.settled(lambda: bench.plane.cluster.grace_until_s > bench.time().monotonic_s)
        assert bench.plane.cluster.nodes["n1"].state is not NodeState.LOST
    words = [event.words for change in bench.store.changes for event in change.events]
    assert "this control plane paused for 120.0 s: every node gets a fresh grace period" in words


async def test_a_scale_override_ends_when_the_file_says_another_number() -> None:
    async with running() as bench:
        await bench.plane.ask(lambda: bench.plane.set_scale("m", 3))
        same = replace(SIM, models=(replace(SIM.models[0], aliases=("a",)),))
        bench.plane.tell(lambda: bench.plane.take_catalog(same, suspect_after_s=15, lost_after_s=30, in_flight_s=600))
        await bench.settled(lambda: bench.plane.cluster.catalog == same)
        assert bench.plane.cluster.scale == {"m": 3}
        other = replace(SIM, models=(replace(SIM.models[0], replicas=2),))

        async def reload() -> None:
            bench.plane.take_catalog(other, suspect_after_s=15, lost_after_s=30, in_flight_s=600)

        await bench.plane.ask(reload)
        assert (bench.plane.cluster.scale, len(bench.plane.cluster.replicas)) == ({}, 2)
        assert (await bench.store.load()).scale == {}
        await bench.plane.ask(lambda: bench.plane.set_scale("m", 3))
        bench.plane.tell(lambda: bench.plane.take_catalog(NONE, suspect_after_s=15, lost_after_s=30, in_flight_s=600))
        await bench.settled(lambda: bench.plane.cluster.scale == {})
    words = [event.words for change in bench.store.changes for event in change.events if event.kind == "model.scale"]
    ends = "the override of its replicas ends: "
    assert words == [ends + "the file says another number now", ends + "it is no longer in the file"]


def with_replicas(replicas: int) -> Catalog:
    return replace(SIM, models=(replace(SIM.models[0], replicas=replicas),))


@pytest.mark.parametrize("now", [with_replicas(5), NONE], ids=["another number", "no such model"])
async def test_a_scale_override_ends_at_the_start_where_the_file_changed_meanwhile(now: Catalog) -> None:
    store, time = Recording(), Time()
    plane = await turning(store, time)
    await carried_out(plane, lambda: plane.set_scale("m", 3))
    same = await turning(store, time)
    await same.turn()
    assert (same.cluster.scale, len(same.cluster.replicas)) == ({"m": 3}, 3)
    changed = await turning(store, time, now)
    await changed.turn()
    assert changed.cluster.scale == changed.scale_base == (await store.load()).scale == {}
    assert len(changed.cluster.replicas) == sum(model.replicas for model in now.models)
    (words,) = [event.words for event in await store.events() if event.kind == "model.scale"]
    assert words.startswith("the override of its replicas ends: ")


async def test_who_scales_right_after_a_reload_is_not_overruled_by_it() -> None:
    store, time = Recording(), Time()
    plane = await turning(store, time)
    await carried_out(plane, lambda: plane.set_scale("m", 3))
    new = with_replicas(2)
    plane.tell(lambda: plane.take_catalog(new, suspect_after_s=15, lost_after_s=30, in_flight_s=600))
    await carried_out(plane, lambda: plane.set_scale("m", 4))
    saved = await store.load()
    assert (plane.cluster.scale, saved.scale, saved.scale_base) == ({"m": 4}, {"m": 4}, {"m": 2})
    assert [event.kind for event in await store.events() if event.kind == "model.scale"] == []


async def test_a_scale_override_that_can_not_be_ended_ends_once_the_store_can_be_written() -> None:
    store, time = Recording(), Time()
    plane = await turning(store, time)
    await carried_out(plane, lambda: plane.set_scale("m", 3))
    store.fault = StoreError("the disk is full")
    new = with_replicas(2)
    plane.tell(lambda: plane.take_catalog(new, suspect_after_s=15, lost_after_s=30, in_flight_s=600))
    for _ in range(20):
        time.move(1)
        await plane.turn()
        assert plane.cluster.scale == {"m": 3}
    store.fault = None
    await plane.turn()
    assert plane.cluster.scale == (await store.load()).scale == {}
    assert [event.kind for event in await store.events() if event.kind == "model.scale"] == ["model.scale"]


class Forgetful(Recording):
    """Writes the next step and then loses the answer, as a connection that breaks at the wrong moment does."""

    loses = 0

    async def commit(self, epoch: int, change: Change) -> None:
        await super().commit(epoch, change)
        self._lose()

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        await super().set_scale(epoch, model, replicas, base)
        self._lose()

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        await super().put_key(epoch, key)
        self._lose()

    def _lose(self) -> None:
        if self.loses:
            self.loses -= 1
            raise StoreError("the connection broke: whether the step was written is not known")


@pytest.mark.parametrize("before", [None, 2])
async def test_a_scale_that_was_refused_and_written_all_the_same_is_put_right(before: int | None) -> None:
    store, time = Forgetful(), Time()
    plane = await turning(store, time)
    await carried_out(plane, lambda: plane.set_scale("m", before))
    store.loses = 3  # that of the override, of the note about it, and of the first try to put it right
    with pytest.raises(StoreError, match="the connection broke"):
        await carried_out(plane, lambda: plane.set_scale("m", 5))
    await plane.turn()
    assert "the connection broke" in (plane.trouble or "")
    await plane.turn()
    stored = await store.load()
    assert stored.scale == plane.cluster.scale == ({} if before is None else {"m": before})
    assert (plane.trouble, stored.scale_base) == (None, plane.scale_base)


async def test_a_key_that_was_refused_and_written_all_the_same_lets_nobody_in() -> None:
    store, time = Forgetful(), Time()
    plane = await turning(store, time)
    old, new = (ApiKey(id=f"key-{name}", name=name, hash=name, created_at=1.0) for name in ("old", "new"))
    await carried_out(plane, lambda: plane.put_key(old))
    for key in (new, replace(old, revoked_at=2.0)):
        store.loses = 1
        with pytest.raises(StoreError, match="the connection broke"):
            await carried_out(plane, partial(plane.put_key, key))
        await plane.turn()
    kept = {key.id: key.revoked_at is None for key in (await store.load()).keys}
    assert kept == {"key-old": True, "key-new": False}
    assert {key.id: key.revoked_at is None for key in plane.keys.values()} == kept


async def turning(store: Recording, time: Time, catalog: Catalog = SIM) -> Plane:
    """A plane that takes a turn when it is told to, and starts from what the store holds."""
    leadership = await leading(store, clock=time)
    saved = await store.load()
    cluster = Cluster(
        name="c",
        catalog=catalog,
        secret="s",
        replicas={replica.id: replica for replica in saved.replicas},
        scale=saved.scale,
        replicas_made=saved.replicas_made,
    )
    newest = await store.events(limit=1)
    last_event = newest[-1].id if newest else None
    return Plane(cluster, store=store, leadership=leadership, saved=saved, last_event=last_event, clock=time)


async def carried_out(plane: Plane, act: Act) -> None:
    (answer,) = await answers(plane, act)
    if answer is not None:
        raise answer


async def answers(plane: Plane, *acts: Act) -> list[BaseException | None]:
    """What each is answered in the next turn."""
    asked = [asyncio.ensure_future(plane.ask(act)) for act in acts]
    await asyncio.sleep(0)
    await plane.turn()
    async with asyncio.timeout(10):
        return await asyncio.gather(*asked, return_exceptions=True)


async def test_a_step_whose_answer_was_lost_leaves_nothing_behind_that_was_decided_otherwise_since() -> None:
    store, time = Forgetful(), Time()
    leadership = await leading(store, clock=time)
    plane = Plane(
        Cluster(name="c", catalog=SIM, secret="s"), store=store, leadership=leadership, saved=Saved(), clock=time
    )
    bench = Bench(plane, store, time)
    bench.join()
    store.loses = 1
    await plane.turn()
    assert plane.trouble is not None
    assert (await store.load()).replicas, "it was written, and the plane does not know"
    none = replace(SIM, models=())
    plane.tell(lambda: plane.take_catalog(none, suspect_after_s=15, lost_after_s=30, in_flight_s=600))
    await plane.turn()
    assert plane.trouble is None
    assert plane.cluster.replicas == {}
    assert (await store.load()).replicas == ()


async def test_a_drain_whose_answer_was_lost_is_not_begun_by_the_next_control_plane() -> None:
    store, time = Forgetful(), Time()
    leadership = await leading(store, clock=time)
    plane = Plane(
        Cluster(name="c", catalog=SIM, secret="s"), store=store, leadership=leadership, saved=Saved(), clock=time
    )
    Bench(plane, store, time).join()
    await plane.turn()
    drain = Drain(node="n1", since=1.0)
    asked = asyncio.ensure_future(plane.ask(lambda: plane.carry_out([PutDrain(drain)])))
    await asyncio.sleep(0)
    store.loses = 1
    await plane.turn()
    with pytest.raises(StoreError, match="not known"):
        await asked
    assert plane.cluster.drains == {}
    await plane.turn()
    assert (await store.load()).drains == ()
