"""What goes out to nodes and gateways, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.model import (
    Cluster,
    DesiredShard,
    Instant,
    Node,
    NodeState,
    ObservedShard,
    Placement,
    Replica,
    ReplicaState,
    ShardState,
)
from llmgw.control.clock import Clock, system_clock
from llmgw.control.desk import HELD_S, Desk
from llmgw.control.logs import Logs
from llmgw.control.plane import Plane
from llmgw.link.messages import Desired, Heartbeat, Hello, Observed, Role, Routes, RoutesAck
from llmgw.link.server import Peer
from llmgw.store.base import Saved
from llmgw.store.memory import MemoryStore
from tests.control.floor import ENGINE, GIB, VITALS, dialled_in, inventory
from tests.control.leading import leading

SIM = Catalog(models=(ModelSpec(name="m", profiles=(Profile(name="p", engine="sim", memory_bytes=GIB),), replicas=3),))


class Floor:
    """A plane and its desk, with peers whose outboxes are read in place of connections."""

    def __init__(self, plane: Plane, desk: Desk) -> None:
        self.plane = plane
        self.desk = desk
        self._sessions = 0

    def join(self, id: str, role: Role = "node", **fields: Any) -> Peer:
        self._sessions += 1
        hello = Hello(role=role, id=id)
        if role == "node":
            hello = Hello(
                role=role, id=id, inventory=inventory(id), vitals=VITALS, probed=True, engines=(ENGINE,), version="1"
            )
        peer = dialled_in(replace(hello, **fields), self._sessions)
        self.desk.on_welcomed(peer)
        return peer

    async def settled(self) -> None:
        """All that was told so far is taken up, decided, stored, and what follows is in the outboxes."""

        async def nothing() -> None:
            return None

        async with asyncio.timeout(10):
            await self.plane.ask(nothing)
            await self.plane.ask(nothing)

    async def shards(self, peer: Peer) -> tuple[DesiredShard, ...]:
        frame = await sent(peer)
        assert isinstance(frame, Desired)
        return frame.shards

    def ready(self, peer: Peer, shards: tuple[DesiredShard, ...]) -> None:
        observed = tuple(
            ObservedShard(
                id=shard.id,
                generation=shard.generation,
                state=ShardState.READY,
                since=1.0,
                endpoint=f"127.0.0.1:{shard.placement.port}",
            )
            for shard in shards
        )
        self.desk.on_frame(peer, Observed(epoch=1, session=peer.session, revision=1, shards=observed))

    def beat(self, peer: Peer) -> None:
        self.desk.on_heartbeat(peer, Heartbeat(epoch=1, session=peer.session, sent_at=0.0, vitals=VITALS))


async def sent(peer: Peer) -> object:
    async with asyncio.timeout(10):
        return await peer.outbox.get()


@asynccontextmanager
async def open_floor(cluster: Cluster | None = None, clock: Clock = system_clock) -> AsyncIterator[Floor]:
    store = MemoryStore()
    cluster = cluster or Cluster(name="c", catalog=SIM, secret="s")
    plane = Plane(cluster, store=store, leadership=await leading(store), saved=Saved(), clock=clock)
    desk = Desk(plane, Logs())
    task = asyncio.ensure_future(plane.run())
    try:
        yield Floor(plane, desk)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_node_is_sent_its_own_shards_and_gateways_the_table() -> None:
    async with open_floor() as floor:
        peers = [floor.join(f"n{number}") for number in range(3)]
        gateway = floor.join("gw", "gateway")
        await floor.settled()
        wanted = {peer.id: await floor.shards(peer) for peer in peers}
        assert {shard.placement.node for shards in wanted.values() for shard in shards} == {"n0", "n1", "n2"}
        assert all(shard.placement.node == node for node, shards in wanted.items() for shard in shards)

        for peer in peers:
            floor.ready(peer, wanted[peer.id])
        await floor.settled()
        table = await sent(gateway)
        assert isinstance(table, Routes)
        assert {endpoint.replica for endpoint in table.routes[0].endpoints} == {
            shard.id.rpartition("/")[0] for shards in wanted.values() for shard in shards
        }


async def test_heartbeats_send_nothing_and_a_broken_stream_changes_the_table() -> None:
    async with open_floor() as floor:
        peers = [floor.join(f"n{number}") for number in range(3)]
        gateway = floor.join("gw", "gateway")
        await floor.settled()
        for peer in peers:
            floor.ready(peer, await floor.shards(peer))
        await floor.settled()
        first = await sent(gateway)
        assert isinstance(first, Routes)
        assert all(endpoint.preferred for endpoint in first.routes[0].endpoints)

        version = floor.desk.table_version
        for peer in peers:
            floor.beat(peer)
        await floor.settled()
        assert [len(peer.outbox) for peer in (*peers, gateway)] == [0, 0, 0, 0]
        assert floor.desk.table_version == version

        floor.desk.on_closed(peers[0], "the connection broke")
        await floor.settled()
        second = await sent(gateway)
        assert isinstance(second, Routes)
        assert second.version == floor.desk.table_version > version
        assert sorted(endpoint.preferred for endpoint in second.routes[0].endpoints) == [False, True, True]


async def test_a_gateway_may_send_by_a_table_from_the_moment_it_was_sent() -> None:
    """What is on its way may be taken up at any moment, and is not known to be before its acknowledgement is here."""
    async with open_floor() as floor:
        gateway = floor.join("gw", "gateway")
        peers = [floor.join(f"n{number}") for number in range(3)]
        await floor.settled()
        empty = await sent(gateway)
        assert isinstance(empty, Routes)
        assert floor.plane.cluster.gateways["gw"].may_send is None
        floor.desk.on_frame(gateway, RoutesAck(epoch=1, session=gateway.session, version=empty.version))
        await floor.settled()
        assert floor.plane.cluster.gateways["gw"].may_send == frozenset()

        for peer in peers:
            floor.ready(peer, await floor.shards(peer))
        await floor.settled()
        full = await sent(gateway)
        assert isinstance(full, Routes)
        assert floor.plane.cluster.gateways["gw"].may_send == floor.plane.cluster.replicas.keys()

        floor.plane.halt()
        await floor.settled()
        last = await sent(gateway)
        assert isinstance(last, Routes)
        assert last.routes[0].endpoints == ()
        floor.desk.on_frame(gateway, RoutesAck(epoch=1, session=gateway.session, version=full.version))
        await floor.settled()
        assert len(floor.plane.cluster.gateways["gw"].may_send or ()) == 3
        floor.desk.on_frame(gateway, RoutesAck(epoch=1, session=gateway.session, version=last.version))
        await floor.settled()
        assert floor.plane.cluster.gateways["gw"].may_send == frozenset()


def over_two_nodes() -> Cluster:
    """As the store gives it back: a replica on n0 and n1 that was ready."""
    profile = Profile(name="p", engine="sim", nodes=2, memory_bytes=GIB)
    spec = ModelSpec(name="m", profiles=(profile,))
    replica = Replica(
        id="m-aaaaa",
        model="m",
        state=ReplicaState.READY,
        since=1.0,
        why="ready on n0, n1",
        generation=1,
        number=1,
        profile=profile,
        spec=spec,
        placements=tuple(Placement(node=name, memory_bytes=GIB, port=20000, address="127.0.0.1") for name in TWO),
        endpoint="127.0.0.1:20000",
    )
    return Cluster(
        name="c",
        secret="s",
        catalog=Catalog(models=(spec,)),
        nodes={
            name: Node(id=name, state=NodeState.READY, since=1.0, inventory=inventory(name), probed=True)
            for name in TWO
        },
        replicas={"m-aaaaa": replica},
    )


TWO = ("n0", "n1")


def runs(rank: int) -> tuple[ObservedShard, ...]:
    endpoint = None if rank else "127.0.0.1:20000"
    return (ObservedShard(id=f"m-aaaaa/{rank}", generation=1, state=ShardState.READY, since=1.0, endpoint=endpoint),)


async def test_a_gateway_keeps_its_older_table_until_replicas_over_several_nodes_are_known_to_be_whole() -> None:
    async with open_floor(over_two_nodes()) as floor:
        gateway = floor.join("gw", "gateway", routes_version=7)
        fresh = floor.join("fresh", "gateway")
        await floor.settled()
        table = await sent(fresh)
        assert isinstance(table, Routes)
        assert table.routes[0].endpoints == ()
        floor.join("n1", shards=runs(1))
        await floor.settled()
        assert len(gateway.outbox) == 0
        floor.join("n0", shards=runs(0))
        await floor.settled()
        for peer in (gateway, fresh):
            table = await sent(peer)
            assert isinstance(table, Routes)
            assert [endpoint.replica for endpoint in table.routes[0].endpoints] == ["m-aaaaa"]


async def test_a_leader_that_ended_meanwhile_is_in_no_table_at_all() -> None:
    async with open_floor(over_two_nodes()) as floor:
        gateway = floor.join("gw", "gateway", routes_version=7)
        floor.join("n1", shards=runs(1))
        floor.join("n0", shards=())
        await floor.settled()
        table = await sent(gateway)
        assert isinstance(table, Routes)
        assert (table.routes[0].endpoints, len(gateway.outbox)) == ((), 0)
        assert floor.plane.cluster.replicas["m-aaaaa"].state is ReplicaState.FAILED


async def test_tables_are_not_held_back_for_long() -> None:
    start = system_clock()
    passed = [0.0]

    def clock() -> Instant:
        return Instant(start.wall_s + passed[0], start.monotonic_s + passed[0])

    async with open_floor(over_two_nodes(), clock) as floor:
        gateway = floor.join("gw", "gateway", routes_version=7)
        passed[0] = HELD_S - 0.5
        await floor.settled()
        assert len(gateway.outbox) == 0
        passed[0] = HELD_S
        await floor.settled()
        table = await sent(gateway)
        assert isinstance(table, Routes)
        assert table.routes[0].endpoints == ()
