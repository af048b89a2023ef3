"""What is worked out for a cluster grows with the cluster, and not with its square.

Counted in instructions of bytecode, which are as many on a busy machine as on an idle one. How long they take is
measured in benchmarks/plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import pytest

from llmgw.cluster.catalog import Catalog
from llmgw.cluster.model import Cluster, ObservedShard, Replica, ReplicaState, ShardState
from llmgw.cluster.placement import Planner
from llmgw.cluster.reconcile import apply, desired, desired_by_node, reconcile, routes
from llmgw.cluster.what_if import Changes, what_if

from .building import GIB, NOW, cluster, heard, later, model, node, observed, profile, ready, with_node
from .fabrics import on

SMALL, TIMES = 64, 4
"""Nodes of the smaller cluster, and how many times as large the other is."""
MOST = 1.5 * TIMES
"""How many times as many steps the larger may take. With the square of its size they would be 16 times as many."""
GPUS, PER_FABRIC = 8, 16


def grows(make: Callable[[int], Any], work: Callable[[Any], object]) -> None:
    """Fails where ``work`` takes more than MOST times the steps with what ``make`` makes of the larger number."""
    made = [make(nodes) for nodes in (SMALL, TIMES * SMALL)]
    small, large = (steps(lambda made=made: work(made)) for made in made)
    words = f"{small} steps for {SMALL}, {large} for {TIMES * SMALL}"
    assert large < MOST * small, f"{words}: {large / small:.1f} times"


def steps(work: Callable[[], object]) -> int:
    """Instructions that are executed in it, all that it calls in Python included."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def big(nodes: int) -> Cluster:
    """Two replicas a node, twenty of each model; every other model spans two nodes."""
    machines = [
        on(f"n{number:04}", f"ib-{number // PER_FABRIC:02}", gpus=GPUS, labels={"rack": f"r{number % 10}"})
        for number in range(nodes)
    ]
    models = []
    for number in range(nodes // 10):
        spans = number % 2 == 1
        rack = {"rack": f"r{number % 10}"} if number % 3 == 0 and not spans else {}
        wide = profile(nodes=2 if spans else 1, gpus_per_node=1 + number % 4, node_selector=rack)
        models.append(model(f"m{number:03}", wide, profile("cpu", memory_bytes=GIB), replicas=20))
    return cluster(machines, models)


@cache
def at_work(nodes: int) -> Cluster:
    """Everything placed, and every shard ready."""
    state = big(nodes)
    placed = apply(state, reconcile(state, NOW))
    assert {replica.state for replica in placed.replicas.values()} == {ReplicaState.PLACING}
    assert {len(replica.placements) for replica in placed.replicas.values()} == {1, 2}
    shards: dict[str, list[ObservedShard]] = {}
    for replica in placed.replicas.values():
        for rank, placement in enumerate(replica.placements):
            endpoint = f"{placement.address}:{placement.port}" if rank == 0 else None
            shard = observed(replica.shard_id(rank), 1, ShardState.READY, endpoint)
            shards.setdefault(placement.node, []).append(shard)
    machines = {name: replace(at, shards=tuple(shards.get(name, ()))) for name, at in placed.nodes.items()}
    running = replace(placed, nodes=machines)
    return apply(running, reconcile(running, NOW))


def refused(nodes: int) -> Cluster:
    """None of the replicas fits any node."""
    machines = [node(f"n{number:04}", gpus=1) for number in range(nodes)]
    models = [model(f"m{number}", profile(gpus_per_node=8), replicas=20) for number in range(nodes // 20)]
    return cluster(machines, models)


def refused_over_fabrics(nodes: int) -> Cluster:
    machines = [on(f"n{number:04}", f"ib-{number // PER_FABRIC:02}", gpus=1) for number in range(nodes)]
    models = [model(f"m{number}", profile(nodes=2, gpus_per_node=8), replicas=20) for number in range(nodes // 20)]
    return cluster(machines, models)


def waiting(state: Cluster) -> Cluster:
    waits = apply(state, reconcile(state, NOW))
    assert {replica.state for replica in waits.replicas.values()} == {ReplicaState.UNPLACED}
    return waits


def lost_one(nodes: int) -> Cluster:
    """A node has fallen silent, and is not called lost yet."""
    running = at_work(nodes)
    name = first(running).placements[-1].node
    silent = with_node(running, name, heard_at_s=NOW.monotonic_s - 100)
    assert apply(silent, reconcile(silent, NOW)).nodes[name].state == "lost"
    return silent


def shards_gone(nodes: int) -> Cluster:
    """A node reports nothing of what it ran, and its replicas are to be placed anew."""
    running = at_work(nodes)
    gone = with_node(running, first(running).placements[-1].node, shards=())
    gone = heard(apply(gone, reconcile(gone, NOW)), later(2))
    placed = apply(gone, reconcile(gone, later(2)))
    assert any(replica.state is ReplicaState.PLACING for replica in placed.replicas.values())
    return gone


def all_roll(nodes: int) -> Cluster:
    """Every model has a new profile, and rolls over to it."""
    machines = [node(f"n{number:04}", gpus=GPUS) for number in range(nodes)]
    models = [model(f"m{number:04}", profile(gpus_per_node=1), replicas=2) for number in range(2 * nodes)]
    running = ready(cluster(machines, models))
    changed = [replace(spec, profiles=(profile(gpus_per_node=1, context=4096),)) for spec in models]
    rolling = replace(running, catalog=Catalog(models=tuple(changed)))
    rolling = apply(rolling, reconcile(rolling, NOW))
    assert sum(replica.replaces is not None for replica in rolling.replicas.values()) == 2 * nodes
    return rolling


def first(running: Cluster) -> Replica:
    return next(iter(running.replicas.values()))


def lose_the_first(running: Cluster) -> Changes:
    return Changes(lose_nodes=(first(running).placements[-1].node,))


def one_less(nodes: int) -> Cluster:
    """All but one of the replicas that are wanted are there."""
    running = at_work(nodes)
    gone = first(running).id
    return replace(running, replicas={key: each for key, each in running.replicas.items() if key != gone})


WORK: dict[str, tuple[Callable[[int], Cluster], Callable[[Cluster], object]]] = {
    "a full plan": (big, lambda state: reconcile(state, NOW)),
    "nothing to do": (at_work, lambda state: reconcile(state, NOW)),
    "a node is lost": (lost_one, lambda state: reconcile(state, NOW)),
    "shards are gone": (shards_gone, lambda state: reconcile(state, later(2))),
    "what if a node were lost": (at_work, lambda state: what_if(state, lose_the_first(state), NOW)),
    "one more replica": (one_less, lambda state: Planner(state).find(state.catalog.models[1])),
    "routes": (at_work, routes),
    "what every node should run": (at_work, desired_by_node),
    "refusals": (refused, lambda state: reconcile(state, NOW)),
    "refused still": (lambda nodes: waiting(refused(nodes)), lambda state: reconcile(state, NOW)),
    "refused over fabrics": (lambda nodes: waiting(refused_over_fabrics(nodes)), lambda state: reconcile(state, NOW)),
    "all models roll": (all_roll, lambda state: reconcile(state, NOW)),
}


@pytest.mark.parametrize(("make", "work"), WORK.values(), ids=WORK)
def test_growth(make: Callable[[int], Cluster], work: Callable[[Cluster], object]) -> None:
    grows(make, work)


def test_steps_are_counted_where_loops_hide() -> None:
    """In a comprehension, in a generator, and in what another calls."""

    def square(numbers: range) -> object:
        return [sum(1 for _ in numbers) for _ in numbers]

    with pytest.raises(AssertionError, match=r"1[56]\.\d times"):
        grows(range, square)


def test_what_all_nodes_should_run_is_what_each_should() -> None:
    running = at_work(SMALL)
    told = desired_by_node(running)
    assert told == {name: desired(running, name) for name in running.nodes}
    assert sum(len(route.endpoints) for route in routes(running)) == len(running.replicas)


def test_a_refusal_over_many_fabrics_is_counted() -> None:
    (why,) = {replica.why for replica in waiting(refused_over_fabrics(1000)).replicas.values()}
    assert why.startswith("ib-00 has 0 of 2 nodes with 8 free GPUs; ib-01 has 0 of 2; ib-02 has 0 of 2; 60 more")
