"""A control plane that stood still (its event loop was blocked, its machine was paused, its disk hung) has heard nobody
meanwhile: whom it did not hear may have spoken all the while, so nobody is declared dead for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.model import Brake, NodeState
from llmgw.link.server import Peer
from llmgw.store.base import Change
from llmgw.store.memory import MemoryStore
from tests.control.clock import Time
from tests.control.floor import GIB, ControlFloor, open_floor

BLOCKED_S = 200.0
GRACE_S = 30.0
ONE = Profile(name="p", engine="sim", memory_bytes=GIB)


class Hanging(MemoryStore):
    """Its disk stands still once, and with it all else, when it is next asked for what ``where`` names."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time
        self.where = ""

    async def commit(self, epoch: int, change: Change) -> None:
        self.stand_still("commit")
        await super().commit(epoch, change)

    async def renew(self, epoch: int, lease_s: float) -> None:
        self.stand_still("renew")
        await super().renew(epoch, lease_s)

    def stand_still(self, where: str) -> None:
        if where == self.where:
            self._time.move(BLOCKED_S)
            self.where = ""


@asynccontextmanager
async def serving(folder: Path, nodes: int) -> AsyncIterator[tuple[ControlFloor, Time, Hanging, list[Peer]]]:
    """A replica on each of so many nodes, ready, long after the grace period of the start."""
    time = Time()
    store = Hanging(time)
    catalog = Catalog(models=(ModelSpec(name="m", profiles=(ONE,), replicas=nodes),))
    async with open_floor(folder, store, clock=time, catalog=catalog) as floor:
        peers = [floor.join(f"n{number}") for number in range(1, nodes + 1)]
        await floor.obey(*peers)
        await pass_by(floor, time, 60, *peers)
        assert {node.state for node in floor.plane.cluster.nodes.values()} == {NodeState.READY}
        yield floor, time, store, peers


async def pass_by(floor: ControlFloor, time: Time, seconds: float, *beating: Peer) -> None:
    for _ in range(int(seconds)):
        time.move(1)
        for peer in beating:
            floor.beat(peer)
        await floor.settled()


Decided = tuple[dict[str, tuple[str, int]], Brake | None]


def decided(floor: ControlFloor, before: Decided | None = None) -> Decided:
    """What must not change because we slept, of the replicas that there were before."""
    cluster = floor.plane.cluster
    of = {id: (replica.state.value, replica.generation) for id, replica in cluster.replicas.items()}
    return {id: found for id, found in of.items() if before is None or id in before[0]}, cluster.brake


def lost(floor: ControlFloor) -> list[str]:
    return [node.id for node in floor.plane.cluster.nodes.values() if node.state is NodeState.LOST]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("where", ["between turns", "commit", "renew"])
async def test_nobody_is_lost_while_it_stood_still_itself(tmp_path: Path, where: str, nodes: int) -> None:
    """Wherever it stood: not even where it had begun to decide before, and goes on with the same decision after."""
    async with serving(tmp_path, nodes) as (floor, time, store, peers):
        before = decided(floor)
        gateway = floor.join_gateway("gw")
        floor.ack(gateway, await floor.table(gateway))
        await floor.settled()
        told = floor.desk.table_version
        store.where = where
        if where == "commit":
            # What is decided here is written, and then it is looked whether more follows from it.
            await floor.plane.ask(lambda: floor.plane.set_scale("m", nodes + 1))
        elif where == "renew":
            while store.where:
                await pass_by(floor, time, 1, *peers)
        else:
            store.stand_still(where)
        await floor.settled()
        assert store.where == "", "it stood still"
        assert (lost(floor), decided(floor, before)) == ([], before)
        words = [event.words for event in await floor.store.events() if event.kind == "control.stalled"]
        (said,) = words
        assert 0 <= float(said.split()[5]) - BLOCKED_S <= 1

        # What was sent meanwhile is read at last: all is as it was, and no gateway was told otherwise of a replica.
        for peer in peers:
            floor.beat(peer)
        await floor.settled()
        assert {node.state for node in floor.plane.cluster.nodes.values()} == {NodeState.READY}
        assert decided(floor, before) == before
        if floor.desk.table_version > told:
            (route,) = (await floor.table(gateway)).routes
            assert {endpoint.replica for endpoint in route.endpoints} >= before[0].keys()


async def test_who_stays_silent_afterwards_is_lost_when_a_fresh_grace_period_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path, 3) as (floor, time, _, peers):
        time.move(BLOCKED_S)
        await pass_by(floor, time, GRACE_S - 1, *peers[:2])
        assert lost(floor) == []
        await pass_by(floor, time, 2, *peers[:2])
        assert lost(floor) == ["n3"]
