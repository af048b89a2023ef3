"""In which order what follows from a change goes out, that nothing is left unsent, and what it costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.derived import desired
from llmgw.cluster.model import Cluster, DesiredShard, ObservedShard, ShardState
from llmgw.control import desk as desk_module
from llmgw.link.messages import Desired, Observed, Routes
from llmgw.link.server import Peer
from tests.control.floor import GIB, ControlFloor, open_floor

TWO_NODES = Catalog(
    models=(ModelSpec(name="m", profiles=(Profile(name="p", engine="sim", nodes=2, memory_bytes=GIB),)),),
)


def said(floor: ControlFloor, peer: Peer, *shards: ObservedShard) -> None:
    frame = Observed(epoch=floor.plane.epoch, session=peer.session, revision=99, shards=shards)
    floor.desk.on_frame(peer, frame)


def as_far_as_it_may(shard: DesiredShard) -> ObservedShard:
    return ObservedShard(
        id=shard.id,
        generation=shard.generation,
        state=ShardState.READY if shard.go else ShardState.PREPARING,
        since=1.0,
        prepared=not shard.go,
        endpoint=f"127.0.0.1:{shard.placement.port}" if shard.go and shard.rank == 0 else None,
    )


def watch(peer: Peer, order: list[object]) -> None:
    """Notes each frame that is sent to the peer, in the order of sending."""
    send = peer.send

    def noting(frame: object) -> None:
        order.append(frame)
        send(frame)  # type: ignore[arg-type]

    peer.send = noting  # type: ignore[assignment,method-assign]


async def test_ranks_are_told_to_start_once_all_are_prepared_and_not_before(tmp_path: Path) -> None:
    async with open_floor(tmp_path, catalog=TWO_NODES) as floor:
        peers = [floor.join(f"n{number}", fabric="ib-a") for number in range(2)]
        await floor.settled()
        shards = [(await floor.desired(peer)).shards[0] for peer in peers]
        assert [shard.go for shard in shards] == [False, False]
        assert [peer.node for peer in shards[0].peers] == ["n0", "n1"]
        said(floor, peers[0], as_far_as_it_may(shards[0]))
        await floor.settled()
        assert [len(peer.outbox) for peer in peers] == [0, 0]
        said(floor, peers[1], as_far_as_it_may(shards[1]))
        await floor.settled()
        again = [(await floor.desired(peer)).shards[0] for peer in peers]
        assert [(shard.go, shard.generation) for shard in again] == [(True, 1), (True, 1)]


async def test_a_lost_rank_leaves_the_table_in_the_turn_that_heard_of_it_before_any_node_is_told(
    tmp_path: Path,
) -> None:
    """Of a replica over two nodes: the moment that one rank is gone, no table names the whole."""
    async with open_floor(tmp_path, catalog=TWO_NODES) as floor:
        gateway = floor.join_gateway("gw")
        peers = [floor.join(f"n{number}", fabric="ib-a") for number in range(2)]
        for _ in range(3):
            await floor.settled()
            for peer in peers:
                while len(peer.outbox):
                    said(floor, peer, *map(as_far_as_it_may, (await floor.desired(peer)).shards))
        await floor.settled()
        table = await floor.table(gateway)
        assert [endpoint.replica for endpoint in table.routes[0].endpoints] == list(floor.plane.cluster.replicas)
        order: list[object] = []
        for peer in (*peers, gateway):
            watch(peer, order)
        worker = floor.plane.cluster.nodes["n1"].shards[0]
        said(floor, peers[1], replace(worker, state=ShardState.FAILED, why="killed by SIGKILL"))
        await floor.settled()
        kinds = [type(frame).__name__ for frame in order]
        assert kinds[0] == "Routes"
        assert kinds.count("Desired") == 2
        assert all(not frame.routes[0].endpoints for frame in order if isinstance(frame, Routes))
        assert all(not frame.shards for frame in order if isinstance(frame, Desired))


async def test_what_is_sent_out_costs_as_much_as_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each change times each node: hundreds of nodes that all change at once are looked at once each."""
    looked: list[str] = []

    def counting(cluster: Cluster, node_id: str) -> tuple[DesiredShard, ...]:
        looked.append(node_id)
        return desired(cluster, node_id)

    monkeypatch.setattr(desk_module, "desired", counting)
    profile = Profile(name="p", engine="sim", memory_bytes=10 * GIB)
    catalog = Catalog(models=(ModelSpec(name="m", profiles=(profile,), replicas=200),))
    async with open_floor(tmp_path, catalog=catalog) as floor:
        peers = [floor.join(f"n{number:03}") for number in range(200)]
        await floor.settled()
        assert len(looked) <= 2 * len(peers)
        for peer in peers:
            floor.observed(peer, await floor.desired(peer))
        looked.clear()
        await floor.settled()
        assert len(looked) <= 2 * len(peers)
        looked.clear()
        for peer in peers:
            floor.beat(peer)
        await floor.settled()
        assert looked == []
        shard = floor.plane.cluster.nodes["n007"].shards[0]
        said(floor, peers[7], replace(shard, state=ShardState.FAILED, why="killed"))
        await floor.settled()
        assert set(looked) == {"n007"}


async def test_a_fault_while_sending_leaves_nothing_unsent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = True

    def broken(cluster: Cluster, node_id: str) -> tuple[DesiredShard, ...]:
        if breaks:
            raise RuntimeError("bug")
        return desired(cluster, node_id)

    monkeypatch.setattr(desk_module, "desired", broken)
    async with open_floor(tmp_path) as floor:
        peer = floor.join("n0")
        await floor.settled()
        assert len(peer.outbox) == 0
        breaks = False
        await floor.settled()
        async with asyncio.timeout(10):
            assert len((await floor.desired(peer)).shards) == 2
