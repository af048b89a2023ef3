"""How many replicas each model should have, and which go where there are too many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmgw.cluster.lifecycle import moved
from llmgw.cluster.model import Cluster, Replica, ReplicaState
from llmgw.cluster.naming import replica_id
from llmgw.cluster.observe import finish_stopping
from llmgw.cluster.step import Step
from llmgw.cluster.wording import count

_LEAST_MISSED = (
    ReplicaState.UNPLACED,
    ReplicaState.FAILED,
    ReplicaState.PLACING,
    ReplicaState.PREPARING,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.READY,
)


def wanted(cluster: Cluster, model: str) -> int:
    """Replicas that the model should have: the stored override, else what the catalog says."""
    spec = cluster.catalog.model(model)
    if cluster.halting or spec is None:
        return 0
    return max(cluster.scale.get(model, spec.replicas), 0)


def by_model(cluster: Cluster) -> dict[str, list[Replica]]:
    """Replicas of each model, in the order of their ids."""
    replicas: dict[str, list[Replica]] = {}
    for _, replica in sorted(cluster.replicas.items()):
        replicas.setdefault(replica.model, []).append(replica)
    return replicas


def scale(step: Step) -> None:
    """Make the replicas that are missing, and stop those that are too many."""
    replicas = by_model(step.snapshot())
    for model in sorted(replicas.keys() | {spec.name for spec in step.cluster.catalog.models}):
        standing = [replica for replica in replicas.get(model, ()) if replica.state is not ReplicaState.STOPPING]
        surplus = len(standing) - wanted(step.cluster, model)
        for _ in range(-surplus):
            _make(step, model)
        for replica in _to_stop(standing, surplus):
            _stop(step, replica)


def _to_stop(replicas: Iterable[Replica], surplus: int) -> list[Replica]:
    """Those that are not ready first, then the youngest."""
    order = sorted(replicas, key=lambda replica: (_LEAST_MISSED.index(replica.state), -replica.number, replica.id))
    return order[: max(surplus, 0)]


def _make(step: Step, model: str) -> None:
    number = step.made.get(model, 0) + 1
    while step.is_known(replica_id(step.cluster, model, number)):
        number += 1
    step.made[model] = number
    name = replica_id(step.cluster, model, number)
    new = Replica(
        id=name,
        model=model,
        state=ReplicaState.UNPLACED,
        since=step.now.wall_s,
        why=f"{count(wanted(step.cluster, model), 'replica')} of {model} wanted",
        number=number,
    )
    step.put(new)
    step.note("replica.created", name, f"{name} of {model} is made: {new.why}")


def _stop(step: Step, replica: Replica) -> None:
    why = _why_stop(step.cluster, replica.model)
    stopping = replace(moved(replica, ReplicaState.STOPPING, why, step.now), endpoint=None, retry_at=None)
    step.put(stopping)
    step.note("replica.stopping", replica.id, f"{replica.id} of {replica.model} stops: {why}")
    finish_stopping(step, stopping)


def _why_stop(cluster: Cluster, model: str) -> str:
    if cluster.halting:
        return "the cluster is being stopped"
    if cluster.catalog.model(model) is None:
        return f"{model} is no longer in the catalog"
    by = " (by ctl scale)" if model in cluster.scale else ""
    return f"{count(wanted(cluster, model), 'replica')} of {model} wanted{by}"
