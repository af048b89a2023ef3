"""A node that is taken away at any moment between the plan and the answer to the first request: on what is left, a
replica is never called ready, and it ends up whole elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmgw.cluster.model import Cluster, NodeState, ReplicaState, ShardState
from llmgw.cluster.reconcile import desired, routes

from .building import NOW, cluster, heard, later, model, observed, only, profile, reported, settled, with_node
from .fabrics import on

S = ShardState
PHASES = ("placed", "preparing", "prepared", "told to start", "the leader is ready", "the worker is ready")


def at(state: Cluster, seconds: float) -> Cluster:
    return settled(heard(state, later(seconds)), later(seconds))


def rank_of(state: Cluster, name: str, shard_state: ShardState, **fields: object) -> Cluster:
    replica = only(state)
    rank = [placement.node for placement in replica.placements].index(name)
    endpoint = None if rank else f"10.0.0.1:{replica.placements[0].port}"
    return with_node(
        state,
        name,
        shards=(observed(replica.shard_id(rank), replica.generation, shard_state, endpoint, **fields),),
    )


def begun(phase: str) -> Cluster:
    """A replica over n1 and n2, as far as that; n3 and n4 are free, on another fabric."""
    nodes = [on(f"n{number}", "ib-a" if number < 3 else "ib-b", gpus=4) for number in (1, 2, 3, 4)]
    state = settled(cluster(nodes, [model("m", profile(nodes=2, gpus_per_node=4))]))
    if phase == "placed":
        return state
    state = settled(reported(state, S.PREPARING))
    if phase == "preparing":
        return state
    if phase == "prepared":
        return settled(rank_of(state, "n1", S.PREPARING, prepared=True))
    state = settled(reported(state, S.PREPARING, prepared=True))
    assert only(state).state is ReplicaState.STARTING
    if phase == "told to start":
        return state
    first, other = ("n1", "n2") if phase == "the leader is ready" else ("n2", "n1")
    return settled(rank_of(rank_of(state, first, S.READY), other, S.LOADING))


def silent(state: Cluster, name: str) -> Cluster:
    return at(with_node(state, name, session=None, heard_at_s=NOW.monotonic_s), 31)


def removed(state: Cluster, name: str) -> Cluster:
    return at(replace(state, nodes={id: node for id, node in state.nodes.items() if id != name}), 31)


def revoked(state: Cluster, name: str) -> Cluster:
    return at(with_node(state, name, session=None, state=NodeState.REVOKED), 31)


def served(state: Cluster) -> set[str]:
    return {endpoint.replica for route in routes(state) for endpoint in route.endpoints}


@pytest.mark.parametrize("name", ["n1", "n2"])
@pytest.mark.parametrize("take", [silent, removed, revoked])
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_left_is_never_ready(phase: str, take: Callable[[Cluster, str], Cluster], name: str) -> None:
    before = begun(phase)
    victim, left = only(before), "n2" if name == "n1" else "n1"
    # Before it is noticed, the other says that all is well.
    state = settled(rank_of(with_node(before, name, session=None), left, S.READY))
    assert victim.id not in served(state)
    state = take(state, name)
    assert served(state) == set()
    assert desired(state, left) == (), "what is left of it is stopped"
    state = at(rank_of_left(state, left, victim.shard_id(int(left == "n2"))), 32)
    assert served(state) == set()
    assert victim.id not in {replica.id for replica in state.replicas.values() if replica.state is ReplicaState.READY}
    state = at(with_node(state, left, shards=()), 33)
    state = settled(reported(state, S.PREPARING, prepared=True), later(34))
    state = settled(reported(state, S.READY), later(35))
    assert only(state).state is ReplicaState.READY
    assert [placement.node for placement in only(state).placements] == ["n3", "n4"]
    assert served(state) == {only(state).id}


def rank_of_left(state: Cluster, name: str, shard_id: str) -> Cluster:
    """The rank that was left says once more that it is ready, before it hears that it is to stop."""
    return with_node(state, name, shards=(observed(shard_id, 1, S.READY, "10.0.0.1:20000"),))


@pytest.mark.parametrize("name", ["n1", "n2"])
@pytest.mark.parametrize("phase", ["the leader is ready", "the worker is ready"])
def test_a_node_that_was_off_for_a_moment_and_has_lost_its_rank_fails_the_generation(phase: str, name: str) -> None:
    """It was switched off and on again faster than it could be missed."""
    state = at(with_node(begun(phase), name, session=7, shards=()), 5)
    assert (only(state).state, only(state).generation, only(state).restarts) == (ReplicaState.FAILED, 1, 1)
    assert served(state) == set()
    assert not any(desired(state, each) for each in state.nodes)
