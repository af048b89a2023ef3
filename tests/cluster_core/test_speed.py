"""A big cluster is planned in about a second, and looked over in a fraction of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from llmgw.cluster.model import Cluster, ObservedShard, ReplicaState, ShardState
from llmgw.cluster.reconcile import apply, desired, desired_by_node, reconcile, routes

from .building import GIB, NOW, cluster, model, node, observed, profile

NODES, GPUS, MODELS, REPLICAS = 1000, 8, 100, 2000


def big() -> Cluster:
    nodes = [node(f"n{number:04}", gpus=GPUS, labels={"rack": f"r{number % 10}"}) for number in range(NODES)]
    models = [
        model(
            f"m{number:03}",
            profile(gpus_per_node=1 + number % 4, node_selector={"rack": f"r{number % 10}"} if number % 3 == 0 else {}),
            profile("cpu", memory_bytes=GIB),
            replicas=REPLICAS // MODELS,
        )
        for number in range(MODELS)
    ]
    return cluster(nodes, models)


def best_of(times: int, work: Callable[[], object]) -> float:
    """Processor seconds of the quickest run: the machine may be busy with other things."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def test_two_thousand_replicas_on_a_thousand_nodes() -> None:
    state = big()
    assert best_of(2, lambda: reconcile(state, NOW)) < 3.0
    placed = apply(state, reconcile(state, NOW))
    assert {replica.state for replica in placed.replicas.values()} == {ReplicaState.PLACING}
    assert reconcile(placed, NOW) == ()

    shards: dict[str, list[ObservedShard]] = {}
    for replica in placed.replicas.values():
        placement = replica.placements[0]
        shard = observed(replica.shard_id(0), 1, ShardState.READY, f"127.0.0.1:{placement.port}")
        shards.setdefault(placement.node, []).append(shard)
    nodes = {name: replace(at, shards=tuple(shards.get(name, ()))) for name, at in placed.nodes.items()}
    running = replace(placed, nodes=nodes)
    running = apply(running, reconcile(running, NOW))
    assert sum(len(route.endpoints) for route in routes(running)) == REPLICAS
    assert best_of(3, lambda: reconcile(running, NOW)) < 0.5
    assert best_of(3, lambda: routes(running)) < 0.5
    assert best_of(3, lambda: desired_by_node(running)) < 0.5
    assert desired_by_node(running)["n0007"] == desired(running, "n0007") != ()


def test_a_thousand_refusals() -> None:
    nodes = [node(f"n{number:04}", gpus=1) for number in range(NODES)]
    models = [model(f"m{number}", profile(gpus_per_node=8), replicas=20) for number in range(50)]
    state = cluster(nodes, models)
    assert best_of(2, lambda: reconcile(state, NOW)) < 3.0
