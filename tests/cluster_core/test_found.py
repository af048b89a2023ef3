"""What the simulation found, each in its smallest form."""

from __future__ import annotations

from llmgw.cluster import drain
from llmgw.cluster.model import DrainState, Placement, Replica, ReplicaState, ShardState
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


def test_a_drain_that_may_stop_what_serves_stops_what_was_never_started_too() -> None:
    waiting = Replica(
        id="m-aaaaa",
        model="m",
        state=ReplicaState.PREPARING,
        since=NOW.wall_s,
        why="prepared",
        generation=1,
        number=1,
        profile=profile(memory_bytes=1 << 30),
        spec=model("m", profile(memory_bytes=1 << 30)),
        placements=(Placement(node="n1", port=20000, memory_bytes=1 << 30),),
    )
    state = cluster([node("n1")], [model("m", profile(memory_bytes=1 << 30))], replicas={waiting.id: waiting})
    assert drain.plan(state, "n1", now=NOW, wait=True).state is DrainState.WAITING
    assert drain.plan(state, "n1", now=NOW, wait=True, force=True).state is DrainState.MOVING
    assert drain.plan(state, "n1", now=NOW, wait=True, allow_downtime=["m"]).state is DrainState.MOVING
    assert drain.plan(state, "n1", now=NOW, wait=True, allow_downtime=["other"]).state is DrainState.WAITING
