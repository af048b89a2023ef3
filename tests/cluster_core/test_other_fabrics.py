"""A node that comes back on other fabrics than before, or as another node: what was known of it joins it to nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.model import Cluster, ReplicaState, ShardState
from llmgw.cluster.placement import Placed, Refusal, place
from llmgw.cluster.reconcile import desired, routes

from .building import NOW, cluster, heard, later, model, only, profile, ready, reported, settled, with_node
from .fabrics import on

SPEC = model("m", profile(nodes=2, gpus_per_node=4))
PAIR = [on("n1", "ib-a", gpus=4), on("n2", "ib-a", gpus=4)]


def at(state: Cluster, seconds: float) -> Cluster:
    return settled(heard(state, later(seconds)), later(seconds))


def moved_to(state: Cluster, name: str, *fabrics: str) -> Cluster:
    """Its file names other fabrics now, and its agent was started again: all else is as it was."""
    other = on(name, *fabrics, gpus=4, subnet=7)
    return with_node(state, name, session=9, inventory=other.inventory)


def nodes_of(found: Placed | Refusal | None) -> tuple[str, ...]:
    assert isinstance(found, Placed), found
    return tuple(placement.node for placement in found.placements)


def test_it_is_counted_where_it_is_now_and_nowhere_else() -> None:
    state = cluster([*PAIR, on("n3", "ib-b", gpus=4, subnet=7)], [SPEC])
    assert nodes_of(place(state, SPEC, NOW)) == ("n1", "n2")
    assert nodes_of(place(moved_to(state, "n2", "ib-b"), SPEC, NOW)) == ("n2", "n3")
    alone = cluster(PAIR, [SPEC])
    for fabrics in ((), ("ib-b",)):
        refusal = place(moved_to(alone, "n2", *fabrics), SPEC, NOW)
        assert isinstance(refusal, Refusal), f"n1 and n2 share no fabric any more: {refusal}"
        assert refusal.summary.startswith("ib-a has 1 of 2 nodes with 4 free GPUs")


@pytest.mark.parametrize(
    ("how", "summary"),
    [
        ("removed", "ib-a has 1 of 2 nodes with 4 free GPUs"),
        ("enrolled anew under another name", "ib-a has 1 of 2 nodes with 4 free GPUs; ib-b has 1 of 2"),
    ],
)
def test_of_a_node_that_is_gone_no_edge_is_left(how: str, summary: str) -> None:
    """The same machine with a new identity is one more node, and takes its adapters along."""
    state = cluster(PAIR, [SPEC])
    nodes = {name: found for name, found in state.nodes.items() if name != "n2"}
    if how != "removed":
        nodes["new"] = on("new", "ib-b", gpus=4, subnet=7)
    refusal = place(replace(state, nodes=nodes), SPEC, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == summary


def test_the_next_generation_goes_to_nodes_that_share_a_fabric_now() -> None:
    """What runs is left alone. When it fails, its old nodes come first, but only where they still belong together."""
    before = ready(cluster([*PAIR, *(on(name, "ib-b", gpus=4, subnet=7) for name in ("n3", "n4"))], [SPEC]))
    assert [placement.node for placement in only(before).placements] == ["n1", "n2"]
    state = at(moved_to(before, "n2", "ib-b"), 1)
    assert only(state).state is ReplicaState.READY
    state = at(reported(state, ShardState.FAILED), 2)
    state = at(with_node(with_node(state, "n1", shards=()), "n2", shards=()), 4)
    found = only(state)
    assert (found.generation, found.fabric) == (2, "ib-b")
    assert {placement.node for placement in found.placements} <= {"n2", "n3", "n4"}


def test_a_rank_that_was_prepared_on_the_old_fabric_is_never_part_of_a_ready_replica() -> None:
    """Its agent refuses to start it there; the replica fails as a whole and is placed where it belongs together."""
    state = settled(cluster([*PAIR, *(on(name, "ib-b", gpus=4, subnet=7) for name in ("n3", "n4"))], [SPEC]))
    state = settled(reported(state, ShardState.PREPARING, prepared=True))
    state = moved_to(state, "n2", "ib-b")
    state = at(reported(state, ShardState.FAILED, why="this node has no fabric ib-a (ib-b in its agent's file)"), 1)
    assert only(state).state is ReplicaState.FAILED
    assert "no fabric ib-a" in only(state).why
    assert not [endpoint for route in routes(state) for endpoint in route.endpoints]
    assert not any(desired(state, name) for name in state.nodes)
    state = at(with_node(with_node(state, "n1", shards=()), "n2", shards=()), 4)
    assert only(state).fabric == "ib-b"
