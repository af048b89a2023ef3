"""Ranks of one replica on several nodes: prepared, started together, watched, and refused where they don't belong."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent import peers, vigil
from llmgw.cluster.model import DesiredShard, Fabric, Hca, Inventory, ObservedShard, ShardState
from tests.agent.node import Node, clear
from tests.agent.ranks import gone, host_of, inventory_of, machines, ranks


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for own in tmp_path.iterdir():
        clear(own)


async def prepared(node: Node) -> ObservedShard:
    await node.until(lambda: any(shard.prepared for shard in node.converge.shards()), "it is prepared")
    (shard,) = node.converge.shards()
    return shard


async def ready(*nodes: Node) -> list[ObservedShard]:
    return [await node.one(ShardState.READY) for node in nodes]


async def test_ranks_are_prepared_and_then_start_together(folder: Path) -> None:
    async with machines(folder) as (leader, worker):
        first, second = ranks()
        leader.want(first)
        worker.want(second)
        for node in (leader, worker):
            shard = await prepared(node)
            assert (shard.state, shard.why) == (ShardState.PREPARING, "prepared: waits for the other ranks")
            assert shard.pid is None
            assert node.supervisor.running() == ()
        first, second = gone(first, second)
        leader.want(first)
        worker.want(second)
        one, two = await ready(leader, worker)
        assert (one.why, one.endpoint) == ("answered its first request", f"127.0.0.1:{first.placement.port}")
        assert (two.why, two.endpoint) == ("runs; rank 0 on n1 answers for the replica", None)
        assert not one.prepared
        assert [shard.generation for shard in (one, two)] == [1, 1]


async def test_only_the_leader_has_a_port_open(folder: Path) -> None:
    async with machines(folder) as (leader, worker):
        shards = ranks(go=True)
        leader.want(shards[0])
        worker.want(shards[1])
        _, two = await ready(leader, worker)
        assert two.pid is not None
        assert listening(two.pid) == set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host_of(1), shards[1].placement.port), timeout=5).close()


async def test_being_asked_again_starts_nothing_again(folder: Path) -> None:
    async with machines(folder) as (leader, worker):
        shards = ranks(go=True)
        leader.want(shards[0])
        worker.want(shards[1])
        before = await ready(leader, worker)
        # Peers may be told anew: it is the same generation all the same.
        told = tuple(replace(peer, fabrics=(*peer.fabrics, "ib-b")) for peer in shards[0].peers)
        for node, shard in zip((leader, worker), shards, strict=True):
            node.want(replace(shard, peers=told))
        await leader.until(lambda: leader.converge.revision == 2, "it is taken up")
        after = await ready(leader, worker)
        assert [shard.pid for shard in after] == [shard.pid for shard in before]


async def test_who_is_waited_for_is_in_the_words_of_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that never meet: whom each waits for is shown, and the start ends at its limit with the same words."""
    monkeypatch.setattr("llmgw.engines.sim.Sim.starts_slowly_s", 4.0)
    monkeypatch.setattr(vigil, "OUTPUT_POLL_S", 0.1)
    async with machines(folder, 3) as (leader, worker, _missing):
        shards = ranks(3, go=True)
        leader.want(shards[0])
        worker.want(shards[1])
        words = f"waiting for rank 2 of 3 at {shards[0].dist_init}"
        await leader.until(lambda: any(words in shard.why for shard in leader.converge.shards()), "rank 2 is named")
        failed = await leader.one(ShardState.FAILED)
        assert failed.why.startswith("not up after 4 s: the engine is starting; it says: ")
        assert words in failed.why
        assert leader.supervisor.running() == ()


@pytest.mark.parametrize("dies", [0, 1])
async def test_the_end_of_a_rank_is_told_where_it_was_and_where_it_is_missed(folder: Path, dies: int) -> None:
    async with machines(folder) as nodes:
        shards = ranks(go=True)
        for node, shard in zip(nodes, shards, strict=True):
            node.want(shard)
        found = await ready(*nodes)
        pid = found[dies].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        failed = await nodes[dies].one(ShardState.FAILED)
        assert failed.why == "the engine killed by SIGKILL"
        missed = await nodes[1 - dies].one(ShardState.FAILED)
        assert missed.exit is not None
        assert missed.exit.status not in (0, None)
        assert any(f"rank {dies}" in line for line in missed.exit.last_lines)
        assert [node.supervisor.running() for node in nodes] == [(), ()]


# -- an agent that comes and goes


async def test_an_agent_that_is_restarted_while_prepared_prepares_again(folder: Path) -> None:
    first, second = ranks()
    async with machines(folder) as (leader, worker):
        leader.want(first)
        worker.want(second)
        await prepared(leader)
        await prepared(worker)
    async with machines(folder) as (leader, worker):
        assert leader.converge.shards() == ()
        leader.want(first)
        worker.want(*gone(second))
        await prepared(leader)
        leader.want(*gone(first))
        await ready(leader, worker)


async def test_an_agent_that_is_restarted_while_the_ranks_look_for_one_another_goes_on(folder: Path) -> None:
    shards = ranks(go=True)
    async with machines(folder) as (leader, worker):
        leader.want(shards[0])
        before = await leader.one(ShardState.LOADING)
    async with machines(folder) as (leader, worker):
        assert leader.converge.shards()[0].state in (ShardState.STARTING, ShardState.LOADING)
        leader.want(shards[0])
        worker.want(shards[1])
        one, _ = await ready(leader, worker)
        assert one.pid == before.pid


async def test_ready_ranks_that_outlived_their_agents_are_ready_at_once(folder: Path) -> None:
    shards = ranks(go=True)
    async with machines(folder) as (leader, worker):
        leader.want(shards[0])
        worker.want(shards[1])
        before = await ready(leader, worker)
    async with machines(folder) as (leader, worker):
        after = [shard for node in (leader, worker) for shard in node.converge.shards()]
        assert [shard.state for shard in after] == [ShardState.READY, ShardState.READY]
        assert [(shard.pid, shard.endpoint) for shard in after] == [(shard.pid, shard.endpoint) for shard in before]


async def test_a_rank_of_which_nothing_is_remembered_is_recognised(folder: Path) -> None:
    shards = ranks(go=True)
    async with machines(folder) as (leader, worker):
        leader.want(shards[0])
        worker.want(shards[1])
        before = await ready(leader, worker)
    for file in folder.glob("n2/work/wanted/*.json"):
        file.unlink()
    async with machines(folder) as (leader, worker):
        assert worker.converge.shards()[0].state is ShardState.STARTING
        worker.want(shards[1])
        after = await worker.one(ShardState.READY)
        assert (after.pid, after.endpoint) == (before[1].pid, None)


async def test_a_rank_that_is_no_longer_wanted_while_it_waits_is_gone(folder: Path) -> None:
    async with machines(folder) as (leader, _worker):
        leader.want(ranks()[0])
        await prepared(leader)
        leader.want()
        await leader.none()


# -- what is refused


async def test_the_port_where_the_ranks_meet_is_named_when_it_is_taken(folder: Path) -> None:
    first, second = ranks()
    assert first.dist_init is not None
    port = int(first.dist_init.rpartition(":")[2])
    with socket.socket() as other:
        other.bind((host_of(0), port))
        other.listen()
        async with machines(folder) as (leader, worker):
            leader.want(first)
            worker.want(second)  # meets there, and listens nowhere
            failed = await leader.one(ShardState.FAILED)
            await prepared(worker)
    assert failed.port_taken
    assert failed.why.startswith(f"port {port} is taken by pid {os.getpid()} (")


async def test_a_port_that_is_taken_while_it_waits_is_named_before_anything_starts(folder: Path) -> None:
    first, _ = ranks()
    async with machines(folder) as (leader, _worker):
        leader.want(first)
        await prepared(leader)
        with socket.socket() as other:
            other.bind((host_of(0), first.placement.port))
            other.listen()
            leader.want(*gone(first))
            failed = await leader.one(ShardState.FAILED)
    assert failed.port_taken


async def test_a_rank_is_refused_on_a_node_without_its_fabric(folder: Path) -> None:
    """Nothing of it is started, and the replica says why."""
    async with machines(folder) as (leader, worker):
        worker.inventory = replace(worker.inventory, fabrics=(Fabric(name="ib-b", hcas=("mlx5_0",)),))
        shards = ranks(go=True)
        worker.want(shards[1])
        failed = await worker.one(ShardState.FAILED)
    assert failed.why.startswith("this node has no fabric ib-a (ib-b in its agent's file): refused")
    assert failed.why.endswith("hangs at its first all-reduce")
    assert leader.converge.shards() == ()


async def test_a_port_of_the_fabric_that_goes_down_while_ranks_are_prepared_is_seen_at_the_start(folder: Path) -> None:
    async with machines(folder) as (leader, _worker):
        first, _ = ranks()
        leader.want(first)
        await prepared(leader)
        leader.inventory = replace(leader.inventory, hcas=(Hca(name="mlx5_0", port=1, state="DOWN"),))
        leader.want(*gone(first))
        failed = await leader.one(ShardState.FAILED)
    assert failed.why == "mlx5_0, which fabric ib-a names on this node, can't be used (port 1 is DOWN)"


Change = Callable[[DesiredShard, Inventory], tuple[DesiredShard, Inventory]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, i: (replace(s, fabric=None), i), "rank 1 of 2 was given no fabric that its nodes share"),
        (lambda s, i: (s, replace(i, fabrics=())), "this node has no fabric ib-a (none in its agent's file)"),
        (
            lambda s, i: (replace(s, peers=(replace(s.peers[0], fabrics=("ib-b",)), s.peers[1])), i),
            "rank 0 is on n1, which has no fabric ib-a (ib-b there)",
        ),
        (
            lambda s, i: (replace(s, peers=(s.peers[0], replace(s.peers[1], address="10.0.0.9"))), i),
            "the other ranks look for rank 1 at 10.0.0.9, and this node's management address is 127.0.0.2",
        ),
        (lambda s, i: (replace(s, peers=()), i), "rank 1 of 2 was told of 0 ranks"),
        (lambda s, i: (replace(s, dist_init=None), i), "of no address to meet them at"),
        (lambda s, i: (s, replace(i, hcas=())), "can't be used (it is not there)"),
    ],
)
def test_who_may_not_join_is_told_why(change: Change, words: str) -> None:
    shard, inventory = change(ranks()[1], inventory_of(1))
    said = peers.refusal(shard, inventory, host_of(1))
    assert said is not None
    assert words in said


def test_who_fits_may_join() -> None:
    for rank, shard in enumerate(ranks(3)):
        assert peers.refusal(shard, inventory_of(rank), host_of(rank)) is None


def test_a_replica_on_one_node_needs_no_fabric() -> None:
    (shard,) = ranks(1)
    alone = replace(shard, fabric=None, dist_init=None, peers=())
    assert peers.refusal(alone, replace(inventory_of(0), fabrics=(), hcas=()), "192.0.2.1") is None
    assert peers.adapters(alone, inventory_of(0)) == ()


def test_an_engine_gets_the_adapters_of_its_fabric_and_no_others() -> None:
    """Those whose state can't be read are taken on trust, those that are known to be down never."""
    hcas = (
        Hca(name="mlx5_0", port=1, state="ACTIVE"),
        Hca(name="mlx5_0", port=2, state="DOWN"),
        Hca(name="mlx5_1", port=1, state="unknown"),
        Hca(name="mlx5_10", port=1, state="ACTIVE"),
    )
    inventory = replace(
        inventory_of(0),
        hcas=hcas,
        fabrics=(Fabric(name="ib-b", hcas=("mlx5_10",)), Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1"))),
    )
    shard = ranks()[0]
    assert peers.refusal(shard, inventory, host_of(0)) is None
    assert peers.adapters(shard, inventory) == ("mlx5_0:1", "mlx5_1:1")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["waiting for ranks 1, 3 of 4 at 10.0.0.1:20050", ""], "waiting for ranks 1, 3 of 4 at 10.0.0.1:20050"),
        (["loading", 'INFO: 127.0.0.1 - "GET /health HTTP/1.1" 503'], "loading"),
        (["\x1b[32mloading\x1b[0m", "   "], "loading"),
        ([" 10 %\r 20 %\r 30 %\r"], "30 %"),
        (["x" * 500], "x" * 199 + "…"),
        (["", "\x07"], ""),
        ([], ""),
    ],
)
def test_the_last_telling_line(lines: list[str], said: str) -> None:
    assert vigil.telling(lines) == said


def listening(pid: int) -> set[int]:
    """Ports that a process listens on."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets}
