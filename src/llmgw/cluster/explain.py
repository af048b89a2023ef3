"""Why a model is as it is: the answer to ``ctl why MODEL``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from llmgw.cluster.beside import nodes_of, original, replacement
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.derived import unheard
from llmgw.cluster.lifecycle import BEFORE_READY, RUNNING, away, failed_elsewhere, failures_on, gone
from llmgw.cluster.model import Cluster, Drain, DrainState, Move, MoveState, NodeState, Replica, ReplicaState
from llmgw.cluster.placement import Before, Planner, Refusal
from llmgw.cluster.rolling import given_up, given_up_words, held_by, runs_before
from llmgw.cluster.scaling import by_model, standing, wanted
from llmgw.cluster.wording import clock, count

_WORST_FIRST = (
    ReplicaState.FAILED,
    ReplicaState.UNPLACED,
    ReplicaState.PLACING,
    ReplicaState.PREPARING,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.STOPPING,
)
"""Of which replica the summary tells: rather of one that lacks something than of one that is on its way."""


@dataclass(frozen=True, slots=True)
class ReplicaWhy:
    id: str
    state: ReplicaState
    why: str
    """What it is doing or what it lacks, and what happens next."""
    outdated: str = ""
    """What the catalog says now that the running generation does not follow; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Explanation:
    model: str
    """The model's own name, also where an alias was asked for."""
    wanted: int
    ready: int
    summary: str
    replicas: tuple[ReplicaWhy, ...] = ()
    refusal: Refusal | None = None
    """Where no place can be found for a replica that has none: why, node by node."""


def why(cluster: Cluster, model: str) -> Explanation:
    """Explain a model, by its name or an alias. A name that is not known gets the nearest one that is."""
    name = _named(cluster, model)
    replicas = by_model(cluster).get(name, [])
    spec = cluster.catalog.model(name)
    if spec is None and not replicas:
        return Explanation(model, 0, 0, _unknown(cluster, model))
    want = wanted(cluster, name)
    ready = sum(replica.state is ReplicaState.READY and not unheard(cluster, replica) for replica in replicas)
    lines = tuple(
        ReplicaWhy(replica.id, replica.state, why_replica(cluster, replica), why_outdated(cluster, replica))
        for replica in replicas
    )
    refusal = _refusal(cluster, spec, replicas)
    return Explanation(name, want, ready, _summary(cluster, name, want, ready, replicas, lines), lines, refusal)


def _named(cluster: Cluster, model: str) -> str:
    if cluster.catalog.model(model) is None:
        for spec in cluster.catalog.models:
            if model in spec.aliases:
                return spec.name
    return model


def _unknown(cluster: Cluster, model: str) -> str:
    names = [name for spec in cluster.catalog.models for name in (spec.name, *spec.aliases)]
    if not names:
        return f"no model is named {model}: the catalog is empty"
    close = get_close_matches(model, names, n=1)
    return f"no model is named {model}; " + (f"did you mean {close[0]}?" if close else f"there is {', '.join(names)}")


def _refusal(cluster: Cluster, spec: ModelSpec | None, replicas: list[Replica]) -> Refusal | None:
    if spec is None or not any(replica.state is ReplicaState.UNPLACED for replica in replicas):
        return None
    outcome = Planner(cluster).place(spec)
    return outcome if isinstance(outcome, Refusal) else None


def _summary(
    cluster: Cluster, name: str, want: int, ready: int, replicas: list[Replica], lines: tuple[ReplicaWhy, ...]
) -> str:
    words = f"{ready} of {count(want, 'replica')} ready" + _who_wants(cluster, name)
    others = Counter(replica.state.value for replica in replicas if replica.state is not ReplicaState.READY)
    believed = sum(replica.state is ReplicaState.READY for replica in replicas)
    if believed > ready:
        others["not heard again yet"] = believed - ready
    if others:
        words += ", " + ", ".join(f"{others[state]} {state}" for state in sorted(others))
    missing = want - len(standing(cluster, name))
    if missing > 0:
        words += f", {missing} not made yet"
    troubled = [line for line in lines if line.state is not ReplicaState.READY]
    if troubled:
        worst = min(troubled, key=lambda line: (_WORST_FIRST.index(line.state), line.id))
        words += f"; {worst.id}: {worst.why}"
    shaky = next((replica for replica in replicas if _is_shaky(cluster, replica)), None)
    if shaky is None:
        # Only then, since its words may say both.
        shaky = next((replica for replica in replicas if _is_held_up(cluster, replica)), None)
    if shaky is not None:
        words += f"; {shaky.id}: {why_replica(cluster, shaky)}"
    outdated = sorted({line.outdated for line in lines if line.outdated})
    return "; ".join([words, *outdated, *_experimental(cluster, name, replicas)])


def _experimental(cluster: Cluster, name: str, replicas: list[Replica]) -> list[str]:
    """Said of what runs so, or else of what might."""
    spec = cluster.catalog.model(name)
    profiles = [replica.profile for replica in replicas if replica.profile is not None]
    profiles = profiles or list(spec.profiles if spec is not None else ())
    spread = any(profile.engine == "llamacpp" and profile.nodes > 1 for profile in profiles)
    return ["llamacpp over several nodes is experimental"] if spread else []


def _is_shaky(cluster: Cluster, replica: Replica) -> bool:
    """Ready as last heard, on a node that does not answer now, or has not yet."""
    return replica.state is ReplicaState.READY and bool(_about_nodes(cluster, replica))


def _is_held_up(cluster: Cluster, replica: Replica) -> bool:
    """Ready, and to go, and not able to."""
    return replica.state is ReplicaState.READY and any(
        move.state is MoveState.BLOCKED for _, move in _moves(cluster, replica)
    )


def _who_wants(cluster: Cluster, name: str) -> str:
    if cluster.halting:
        return " (the cluster is being stopped)"
    spec = cluster.catalog.model(name)
    if spec is None:
        return f" ({name} is not in the catalog)"
    return f" (by ctl scale; the catalog says {spec.replicas})" if name in cluster.scale else ""


def why_replica(cluster: Cluster, replica: Replica) -> str:
    """What a replica is doing or lacks, what is the matter with its nodes, and what happens next."""
    words = replica.why or replica.state.value
    if replica.lost:
        nodes = "node returns" if len(replica.placements) == 1 else "nodes return"
        words += f"; generation {replica.generation} is taken up again if its {nodes} with it while it is still missed"
    elif replica.state is ReplicaState.FAILED:
        words += "".join(f"; {note}" for note in _before_next(cluster, replica))
    elif replica.state is ReplicaState.STOPPING:
        waits = _still_there(cluster, replica)
        words += f"; waits until {waits} has stopped it" if waits else ""
    elif replica.state in RUNNING:
        if replica.state in BEFORE_READY and (instead := failed_elsewhere(replica, nodes_of(replica))):
            words += f"; {instead}"
        if replica.state is ReplicaState.READY and (missing := unheard(cluster, replica)):
            words += f" when this control plane started; sent nothing before it has heard {', '.join(missing)} again"
        words += "".join(f"; {note}" for note in (*_about_nodes(cluster, replica), *_about_moves(cluster, replica)))
    return words


def _before_next(cluster: Cluster, replica: Replica) -> list[str]:
    notes = []
    waits = _still_there(cluster, replica)
    if waits:
        notes.append(f"waits until {waits} has ended generation {replica.generation}")
    if replica.retry_at is not None:
        failures = f"failure {replica.failures} in a row"
        notes.append(f"generation {replica.generation + 1} starts at {clock(replica.retry_at)} ({failures})")
    if Before.of(replica).failed_too_often:
        notes.append(f"elsewhere if it fits there, since it failed {failures_on(replica.failed_on)}")
    return notes


def _still_there(cluster: Cluster, replica: Replica) -> str:
    nodes = [
        placement.node for rank, placement in enumerate(replica.placements) if not gone(cluster.nodes, replica, rank)
    ]
    return ", ".join(f"{node} (not connected)" if cluster.nodes[node].session is None else node for node in nodes)


def _about_nodes(cluster: Cluster, replica: Replica) -> list[str]:
    notes = []
    for placement in replica.placements:
        node = cluster.nodes.get(placement.node)
        if node is None or away(node):
            continue
        if node.state is NodeState.SUSPECT:
            notes.append(f"node {node.id} is suspect: {node.why}")
        elif node.silent:
            notes.append(f"node {node.id}, which is {node.state.value}, does not answer")
        elif node.session is None:
            notes.append(f"node {node.id} has not come back yet")
        for gpu in node.inventory.gpus if node.inventory else ():
            if gpu.uuid in placement.gpu_uuids and gpu.problem is not None:
                notes.append(f"GPU {gpu.index} of {node.id}: {gpu.problem}")
    return notes


def _about_moves(cluster: Cluster, replica: Replica) -> list[str]:
    """From whom it takes over, who takes over from it, and which drain it waits for or holds up."""
    notes = []
    old = original(cluster, replica)
    if old is not None:
        notes.append(f"takes over from {old.id} once it is ready")
    new = _replacement(cluster, replica)
    if new is not None:
        notes.append(f"{new.id} takes over from it: {new.why}")
    elif replica.restart and replica.state in RUNNING and replica.state is not ReplicaState.DRAINING:
        notes.append(f"is to be restarted: {held_by(cluster, replica)}")
    for drain, move in _moves(cluster, replica):
        if move.state is MoveState.BLOCKED:
            waits = "waits to be drained" if drain.state is DrainState.WAITING else "can't be drained of it"
            notes.append(f"node {drain.node} {waits}: {move.why}")
        elif move.state is MoveState.PENDING and new is None:
            notes.append(f"node {drain.node} is to be drained: its turn has not come yet")
    return notes


_last: tuple[Mapping[str, Replica], frozenset[str]] = ({}, frozenset())
"""Replicas of the cluster that was last explained, and which of them are replaced: asked of each where all are listed.
A cluster's replicas are never changed in place."""


def _replacement(cluster: Cluster, replica: Replica) -> Replica | None:
    global _last
    of_last, replaced = _last
    if of_last is not cluster.replicas:
        replaced = frozenset(each.replaces for each in cluster.replicas.values() if each.replaces is not None)
        _last = cluster.replicas, replaced
    return replacement(cluster, replica) if replica.id in replaced else None


def _moves(cluster: Cluster, replica: Replica) -> list[tuple[Drain, Move]]:
    """What the drains of its nodes have noted of it."""
    drains = (cluster.drains.get(placement.node) for placement in replica.placements)
    return [
        (drain, move) for drain in drains if drain is not None for move in drain.moves if move.replica == replica.id
    ]


def why_outdated(cluster: Cluster, replica: Replica) -> str:
    """What a running generation does not follow of a catalog that was changed, and what comes of that; else empty."""
    runs = runs_before(cluster, replica)
    if not runs:
        return ""
    words = f"{replica.id} {runs}: "
    new = _replacement(cluster, replica)
    if new is not None:
        return f"{words}{new.id} takes over from it once it is ready"
    if replica.state is ReplicaState.DRAINING:
        return f"{words}it leaves"
    if given_up(cluster, replica):
        how = given_up_words(replica)
        return (
            f"{words}the changed one did not become ready{f' ({how})' if how else ''}, so that this one serves on; it "
            f"is tried again when the catalog changes, or by `llmgw ctl restart {replica.model}`"
        )
    return words + held_by(cluster, replica)
