"""Control planes and nodes that come back: one of everything, as it was, however often and however late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.cluster.model import NodeState, ObservedShard, Replica
from llmgw.link.messages import Hello
from llmgw.link.server import Peer
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore
from tests.control.clock import Time
from tests.control.floor import ENGINE, VITALS, ControlFloor, dialled_in, inventory, open_floor

NODES = ("n1", "n2")


def as_they_are(floor: ControlFloor) -> dict[str, tuple[object, ...]]:
    def of(replica: Replica) -> tuple[object, ...]:
        return replica.state, replica.generation, replica.restarts, replica.placements, replica.endpoint

    return {id: of(replica) for id, replica in floor.plane.cluster.replicas.items()}


def running(floor: ControlFloor) -> dict[str, tuple[ObservedShard, ...]]:
    return {name: node.shards for name, node in floor.plane.cluster.nodes.items()}


async def kinds(floor: ControlFloor) -> list[str]:
    return [event.kind for event in await floor.store.events(limit=1000)]


async def serving(floor: ControlFloor) -> list[Peer]:
    peers = [floor.join(name) for name in NODES]
    await floor.obey(*peers)
    assert {replica.state.value for replica in floor.plane.cluster.replicas.values()} == {"ready"}
    return peers


async def test_ten_restarts_over_one_store_make_one_row_of_everything(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "state" / "llmgw.db")
    try:
        async with open_floor(tmp_path, store) as floor:
            await serving(floor)
            before, shards = as_they_are(floor), running(floor)
            told = await kinds(floor)
        for _ in range(10):
            async with open_floor(tmp_path, store) as floor:
                await floor.obey(*[floor.join(name, shards[name]) for name in NODES])
                assert as_they_are(floor) == before
        saved = await store.load()
        assert sorted(node.id for node in saved.nodes) == list(NODES)
        assert sorted(replica.id for replica in saved.replicas) == sorted(before)
        once = {"node.registered": 2, "replica.created": 2, "replica.placed": 2}
        after = [event.kind for event in await store.events(limit=1000)]
        assert {kind: after.count(kind) for kind in once} == {kind: told.count(kind) for kind in once} == once
        assert "replica.failed" not in after
    finally:
        await store.close()


@pytest.mark.parametrize("late", [("n2",), NODES])
@pytest.mark.parametrize(("holder", "late_s"), [("cp-1", 25), ("cp-2", 25), ("cp-2", 55)])
async def test_agents_that_find_the_next_control_plane_late_have_lost_nothing(
    tmp_path: Path, holder: str, late_s: int, late: tuple[str, ...]
) -> None:
    """It was killed; ten seconds later one leads again, and the agents' backoff takes them back only much later. To
    another machine they take longer than to the same."""
    time = Time()
    store = MemoryStore(clock=lambda: time().wall_s)
    async with open_floor(tmp_path, store, clock=time, holder="cp-1") as floor:
        await serving(floor)
        before, shards = as_they_are(floor), running(floor)
    told = await store.events(limit=1000)
    time.move(10)
    async with open_floor(tmp_path, store, clock=time, holder=holder) as floor:
        peers = [floor.join(name, shards[name]) for name in NODES if name not in late]
        for _ in range(late_s):
            time.move(1)
            for peer in peers:
                floor.beat(peer)
            await floor.settled()
            assert (as_they_are(floor), floor.plane.cluster.brake) == (before, None)
        peers += [floor.join(name, shards[name]) for name in late]
        await floor.obey(*peers)
        assert as_they_are(floor) == before
        assert {node.state for node in floor.plane.cluster.nodes.values()} == {NodeState.READY}
        new = [event.kind for event in (await store.events(limit=1000))[len(told) :]]
        assert not [kind for kind in new if kind.startswith("replica.") or kind == "node.lost"]


async def test_an_upgraded_agent_is_the_node_that_it_was(tmp_path: Path) -> None:
    """The same certificate and hostname with another version: its name is not taken, and what it runs is its own."""
    async with open_floor(tmp_path) as floor:
        first, second = await serving(floor)
        before, shards = as_they_are(floor), running(floor)
        floor.desk.on_closed(first, "stopped")
        await floor.settled()
        upgraded = dialled_in(
            replace(first.hello, version="2", instance="another process", shards=shards["n1"]), session=99
        )
        floor.desk.on_welcomed(upgraded)
        await floor.obey(upgraded, second)
        nodes = floor.plane.cluster.nodes
        assert {name: node.agent_version for name, node in nodes.items()} == {"n1": "2", "n2": "1"}
        assert as_they_are(floor) == before
        assert (await kinds(floor)).count("node.registered") == 2


async def test_machines_with_one_hostname_and_certificates_of_their_own_are_two(tmp_path: Path) -> None:
    """``localhost`` twice: each goes by the name in its certificate, and neither overwrites the other."""
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        peers = []
        for session, (id, address) in enumerate((("rack1-a", "10.0.0.1"), ("rack1-b", "10.0.0.2")), 1):
            machine = replace(inventory("localhost"), mgmt_addr=address)
            hello = Hello(
                role="node", id=id, inventory=machine, vitals=VITALS, probed=True, engines=(ENGINE,), version="1"
            )
            peers.append(dialled_in(hello, session))
            floor.desk.on_welcomed(peers[-1])
        await floor.obey(*peers)
        found = (await client.get("/api/v1/nodes")).json()
        assert [(node["id"], node["inventory"]["hostname"]) for node in found] == [
            ("rack1-a", "localhost"),
            ("rack1-b", "localhost"),
        ]
        assert sorted(node["inventory"]["mgmt_addr"] for node in found) == ["10.0.0.1", "10.0.0.2"]
        placed = {at.node for replica in floor.plane.cluster.replicas.values() for at in replica.placements}
        assert placed == {"rack1-a", "rack1-b"}
