"""Who leads, and for how long: renewed in time, given up in time, and never both at once."""

from __future__ import annotations

import asyncio

import pytest

from llmgw.cluster.model import Cluster, Instant, Node, NodeState
from llmgw.control.leadership import Deposed, Leadership
from llmgw.control.plane import GRACE_AFTER_ANOTHER_LEADER_S, Plane
from llmgw.store.base import Change, Fenced, Saved, StoreError
from llmgw.store.memory import MemoryStore


class Time:
    def __init__(self) -> None:
        self.s = 5_000.0

    def __call__(self) -> Instant:
        return Instant(1_000_000.0 + self.s, self.s)


class Flaky(MemoryStore):
    """Its renewals fail while ``broken``."""

    broken = False

    async def renew(self, epoch: int, lease_s: float) -> None:
        if self.broken:
            raise StoreError("the database does not answer")
        await super().renew(epoch, lease_s)


def make(lease_s: float = 9.0, alone: bool = False) -> tuple[Time, Flaky, Leadership]:
    time = Time()
    store = Flaky(clock=lambda: time.s)
    return time, store, Leadership(store, "cp-1", lease_s=lease_s, alone=alone, clock=time)


async def test_a_lease_is_renewed_when_a_third_of_it_is_over() -> None:
    time, store, first = make()
    assert await first.take() is not None
    for _ in range(20):
        time.s += 3.1
        await first.hold()
        assert await store.lead("cp-2", lease_s=9.0) is None


async def test_who_could_not_renew_in_time_gives_up_before_another_leads() -> None:
    time, store, first = make()
    await first.take()
    store.broken = True
    time.s += 4
    with pytest.raises(StoreError, match="does not answer"):
        await first.hold()
    time.s += 4.9
    with pytest.raises(StoreError):
        await first.hold()
    assert await store.lead("cp-2", lease_s=9.0) is None
    time.s += 0.2
    with pytest.raises(Deposed, match=r"the lease could not be renewed for 9\.1 s: the database does not answer"):
        await first.hold()
    with pytest.raises(Deposed):
        _ = first.epoch


async def test_who_tried_to_renew_for_longer_than_the_lease_lasts_gives_up() -> None:
    time = Time()

    class Slow(Flaky):
        async def renew(self, epoch: int, lease_s: float) -> None:
            time.s += 6
            await super().renew(epoch, lease_s)

    store = Slow(clock=lambda: time.s)
    store.broken = True
    first = Leadership(store, "cp-1", lease_s=9.0, clock=time)
    await first.take()
    time.s += 4
    with pytest.raises(Deposed, match=r"the lease could not be renewed for 10\.0 s"):
        await first.hold()


async def test_who_is_alone_waits_for_the_store_as_long_as_it_takes() -> None:
    """A full disk must not end the only control plane there is: what runs is looked after, and nothing new starts."""
    time, store, only = make(alone=True)
    await only.take()
    store.broken = True
    for _ in range(100):
        time.s += 60
        with pytest.raises(StoreError):
            await only.hold()
    store.broken = False
    await only.hold()
    assert only.epoch == 1


async def test_who_slept_through_its_lease_finds_itself_deposed() -> None:
    time, store, first = make()
    await first.take()
    time.s += 100
    second = await store.lead("cp-2", lease_s=9.0)
    assert second is not None
    with pytest.raises(Deposed, match="'cp-2' leads"):
        await first.hold()


async def test_who_waits_leads_when_the_one_before_resigns() -> None:
    _, store, first = make(lease_s=0.03)
    await first.take()
    second = Leadership(store, "cp-2", lease_s=0.03, clock=Time())
    waiting = asyncio.ensure_future(second.wait())
    await asyncio.sleep(0)
    await first.resign()
    await first.resign()
    async with asyncio.timeout(10):
        lead = await waiting
    assert (lead.previous, lead.taken_over) == ("cp-1", True)


# -- what a plane makes of it


async def plane_of(leadership: Leadership, store: MemoryStore, time: Time, cluster: Cluster) -> Plane:
    await leadership.take()
    return Plane(cluster, store=store, leadership=leadership, saved=await store.load(), clock=time)


async def test_a_plane_takes_no_turn_without_the_lead() -> None:
    time, store, first = make()
    plane = await plane_of(first, store, time, Cluster(name="c"))
    await plane.turn()
    store.broken = True
    time.s += 4
    plane.tell(lambda: plane.note("x", "", "y"))
    await plane.turn()
    assert plane.trouble is not None
    assert await store.events() == []
    time.s += 6
    with pytest.raises(Deposed):
        await plane.turn()
    assert await store.events() == []


async def test_after_another_leader_every_node_gets_a_minute() -> None:
    """No node is judged lost while it has had no time to find the new leader: not by one that just took over."""
    time, store, first = make()
    cluster = Cluster(
        name="c", nodes={"n1": Node(id="n1", state=NodeState.READY, since=0.0)}, lost_after_s=30.0, lease_s=20.0
    )
    own = await plane_of(first, store, time, cluster)
    assert own.cluster.grace_until_s == time.s + 30.0
    assert own.cluster.tables_settled_at_s == time.s + 20.0
    again = await plane_of(Leadership(store, "cp-1", clock=time), store, time, cluster)
    assert again.cluster.grace_until_s == time.s + 30.0
    time.s += 100
    other = await plane_of(Leadership(store, "cp-2", clock=time), store, time, cluster)
    assert other.cluster.grace_until_s == time.s + GRACE_AFTER_ANOTHER_LEADER_S
    for _ in range(59):
        time.s += 1
        await other.turn()
        assert other.cluster.nodes["n1"].state is not NodeState.LOST


async def test_of_two_planes_on_one_store_the_older_writes_nothing_more() -> None:
    time, store, first = make()
    old = await plane_of(first, store, time, Cluster(name="c"))
    time.s += 20
    new = await plane_of(Leadership(store, "cp-2", clock=time), store, time, Cluster(name="c"))
    with pytest.raises(Fenced):
        await store.commit(old.epoch, Change())
    old.tell(lambda: old.note("x", "", "from the old one"))
    with pytest.raises(Deposed):
        await old.turn()
    new.tell(lambda: new.note("x", "", "from the new one"))
    await new.turn()
    assert [event.words for event in await store.events()] == ["from the new one"]


def test_a_plane_is_driven_without_an_event_loop() -> None:
    """As a simulation does it: nothing in a turn waits for anything but the store."""
    time = Time()
    store = MemoryStore(secret="s", clock=lambda: time.s)
    leadership = Leadership(store, "cp-1", clock=time)
    taking = leadership.take()
    with pytest.raises(StopIteration):
        taking.send(None)
    plane = Plane(Cluster(name="c"), store=store, leadership=leadership, saved=Saved(), clock=time)
    plane.tell(lambda: plane.note("x", "", "y"))
    assert plane.rest_s() == 0.0
    turn = plane.turn()
    with pytest.raises(StopIteration):
        turn.send(None)
    assert 0.0 < plane.rest_s() <= 1.0
    reading = store.events()
    with pytest.raises(StopIteration) as read:
        reading.send(None)
    assert [event.words for event in read.value.value] == ["y"]
