"""How many replicas each model should have, and which go where there are too many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from llmgw.cluster.lifecycle import all_live, away, stands, start_draining, stop
from llmgw.cluster.model import Cluster, Replica, ReplicaState
from llmgw.cluster.naming import replica_id
from llmgw.cluster.step import Step
from llmgw.cluster.wording import count

_LEAST_MISSED = (
    ReplicaState.UNPLACED,
    ReplicaState.FAILED,
    ReplicaState.PLACING,
    ReplicaState.PREPARING,
    ReplicaState.STARTING,
    ReplicaState.READY,
)


def wanted(cluster: Cluster, model: str) -> int:
    """Replicas that the model should have: the stored override, else what the catalog says."""
    spec = cluster.catalog.model(model)
    if cluster.halting or spec is None:
        return 0
    return max(cluster.scale.get(model, spec.replicas), 0)


def standing(where: Cluster | Step, model: str) -> list[Replica]:
    """The model's replicas that count as its own, in the order of their ids: not those that leave, nor one lost with
    its nodes, nor one that is to take over from a standing one: that counts beside it, not in addition."""
    return counted(sorted((each for each in where.replicas.values() if each.model == model), key=_id))


_id = attrgetter("id")


def counted(replicas: Iterable[Replica]) -> list[Replica]:
    """Of all replicas of a model those that are ``standing``."""
    stays = [replica for replica in replicas if stands(replica)]
    ids = {replica.id for replica in stays}
    return [replica for replica in stays if replica.replaces not in ids]


def by_model(cluster: Cluster | Step) -> dict[str, list[Replica]]:
    """Replicas of each model, in the order of their ids."""
    replicas: dict[str, list[Replica]] = {}
    for replica in cluster.replicas.values():
        replicas.setdefault(replica.model, []).append(replica)
    return {model: sorted(of_model, key=_id) for model, of_model in replicas.items()}


def scale(step: Step) -> None:
    """Make the replicas that are missing, and have those leave that are too many."""
    replicas = by_model(step)
    before: dict[str, list[Replica]] | None = None
    for model in sorted(replicas.keys() | {spec.name for spec in step.cluster.catalog.models}):
        surplus = len(counted(replicas.get(model, ()))) - wanted(step.cluster, model)
        if surplus < 0:
            before = by_model(step.cluster) if before is None else before
            _make(step, model, -surplus, before.get(model, ()), replicas.get(model, ()))
        while surplus > 0:
            for replica in _to_stop(step, model, surplus):
                _leave(step, replica)
            # Where one of those left was being replaced, what was made in its place counts from now on.
            surplus = len(standing(step, model)) - wanted(step.cluster, model)


def _to_stop(step: Step, model: str, surplus: int) -> list[Replica]:
    """Those that are not ready first, then those on nodes that are not heard just now, then those that are to leave
    their node anyway, then the youngest."""

    def missed(replica: Replica) -> tuple[int, bool, bool, int, str]:
        live = all_live(step.nodes, replica)
        stays = all(placement.node not in step.drains for placement in replica.placements)
        return _LEAST_MISSED.index(replica.state), live, stays, -replica.number, replica.id

    return sorted(standing(step, model), key=missed)[:surplus]


def _make(step: Step, model: str, number: int, before: Sequence[Replica], now: Sequence[Replica]) -> None:
    lost = [replica.id for replica in now if replica.lost]
    why = f"{count(wanted(step.cluster, model), 'replica')} of {model} wanted"
    why += f", and {', '.join(lost)} lost with the nodes they were on" if lost else ""
    taken = _taken_from_nodes(step, before, now)
    for index in range(number):
        new = new_replica(step, model, why)
        if index < len(taken):
            old = taken[index]
            new = replace(new, spec=old.spec, profile=old.profile, not_rolled_to=old.not_rolled_to)
        step.put(new)


def _taken_from_nodes(step: Step, before: Sequence[Replica], now: Sequence[Replica]) -> list[Replica]:
    """Of those ``before`` this step the ones that do not stand any more because of a node, lost or to be emptied; the
    oldest first. Another in such a one's place goes on as it did: a changed catalog that fits nowhere, or was given up,
    is no reason to leave it down."""
    stay = {replica.id for replica in now if stands(replica)}
    gone = [replica for replica in counted(before) if replica.id not in stay and _is_taken(step, replica)]
    return sorted(gone, key=lambda replica: (replica.number, replica.id))


def _is_taken(step: Step, replica: Replica) -> bool:
    nodes = (placement.node for placement in replica.placements or replica.previous)
    return any(node in step.drains or away(step.nodes.get(node)) for node in nodes)


def new_replica(step: Step, model: str, why: str) -> Replica:
    """A replica with an id that was never used before, and its note; it is still to be put into the step."""
    number = step.made.get(model, 0) + 1
    while step.is_known(name := replica_id(step.cluster, model, number)):
        number += 1
    step.made[model] = number
    step.note("replica.created", name, f"{name} of {model} is made: {why}")
    return Replica(id=name, model=model, state=ReplicaState.UNPLACED, since=step.now.wall_s, why=why, number=number)


def _leave(step: Step, replica: Replica) -> None:
    why = _why_stop(step.cluster, replica.model)
    if step.cluster.halting:
        stop(step, replica, why)
    else:
        start_draining(step, replica, why)


def _why_stop(cluster: Cluster, model: str) -> str:
    if cluster.halting:
        return "the cluster is being stopped"
    if cluster.catalog.model(model) is None:
        return f"{model} is no longer in the catalog"
    by = " (by ctl scale)" if model in cluster.scale else ""
    return f"{count(wanted(cluster, model), 'replica')} of {model} wanted{by}"
