"""What the simulation found, each in its smallest form."""

from __future__ import annotations

from llmgw.cluster.model import Placement, Replica, ReplicaState, ShardState
from llmgw.cluster.reconcile import reconcile

from .building import NOW, cluster, model, node, observed, profile


def _leaving(name: str, *nodes: str) -> Replica:
    return Replica(
        id=name,
        model="m",
        state=ReplicaState.STOPPING,
        since=NOW.wall_s,
        why="scaled down",
        generation=1,
        number=1,
        placements=tuple(Placement(node=at, port=20000) for at in nodes),
    )


def test_a_replica_is_placed_while_another_of_its_model_leaves_a_node_that_was_removed() -> None:
    leaving = _leaving("m-aaaaa", "n1", "n2")
    here = node("n1", shards=(observed("m-aaaaa/0", 1, ShardState.STOPPING),))
    state = cluster([here, node("n3")], [model("m", profile(memory_bytes=1 << 30))], replicas={leaving.id: leaving})
    placed = [
        placement.node
        for action in reconcile(state, NOW)
        for placement in getattr(getattr(action, "replica", None), "placements", ())
    ]
    assert placed == ["n3"]
