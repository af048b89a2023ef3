"""What would become of a cluster that is changed in thought: the same planner, run on a copy.

It says where everything would be once all is done, not by which way: nothing waits, fails or is drained in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.engines import on_spares
from llmgw.cluster.lifecycle import away, judged
from llmgw.cluster.model import Cluster, Instant, Placement, Replica, ReplicaState
from llmgw.cluster.placement import Before, Placed, Planner
from llmgw.cluster.refusal import Refusal
from llmgw.cluster.rolling import outdated
from llmgw.cluster.scaling import by_model, standing, wanted
from llmgw.cluster.starting import ReadyOn, specs_in_place
from llmgw.cluster.supposing import Addition, Changes, NotSupposable, suppose
from llmgw.cluster.wording import count

__all__ = [
    "Addition",
    "Changes",
    "NotSupposable",
    "WhatIf",
    "WouldFit",
    "WouldMove",
    "WouldNotFit",
    "WouldStop",
    "what_if",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldMove:
    """A replica that would run elsewhere, or be started anew where it is."""

    replica: str
    model: str
    from_nodes: tuple[str, ...]
    to_nodes: tuple[str, ...]
    """By rank."""
    weights_there: bool
    why: str
    fabric: str | None = None
    downtime: bool = False
    """True where there is no room for its replacement beside it: it has to stop first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldNotFit:
    """Replicas of a model that would find no place."""

    model: str
    replicas: int
    already: int
    """How many of them have none as things are either."""
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldFit:
    """A replica that has no place as things are, and would find one."""

    replica: str
    """Its id; of one that is not made yet ``MODEL (new)``."""
    model: str
    to_nodes: tuple[str, ...]
    weights_there: bool
    fabric: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldStop:
    replica: str
    model: str
    nodes: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    supposed: tuple[str, ...]
    """The changes in words."""
    moves: tuple[WouldMove, ...] = ()
    unplaced: tuple[WouldNotFit, ...] = ()
    new: tuple[WouldFit, ...] = ()
    stops: tuple[WouldStop, ...] = ()


def what_if(cluster: Cluster, changes: Changes, now: Instant) -> WhatIf:
    """What the changes alone would bring about. Nodes are judged by their silence up to ``now``.

    Raises NotSupposable where a node or a fabric is not known, or nothing is supposed.
    """
    nodes = {node.id: judged(cluster, node, now) for _, node in sorted(cluster.nodes.items())}
    today = replace(cluster, nodes=nodes)
    then, supposed = suppose(today, changes, now)
    before, after = _plan(today), _plan(then)
    moves: list[WouldMove] = []
    new: list[WouldFit] = []
    for key, outcome in sorted(after.outcomes.items()):
        was = before.outcomes.get(key)
        if outcome.placed is None:
            continue
        if outcome.moves_from:
            if was is None or not was.moves_from or was.placed != outcome.placed:
                moves.append(_would_move(outcome, outcome.placed))
        elif was is None or was.placed is None:
            new.append(_would_fit(outcome, outcome.placed))
    return WhatIf(
        supposed=supposed,
        moves=tuple(moves),
        unplaced=_would_not_fit(before, after),
        new=tuple(new),
        stops=tuple(stop for key, stop in sorted(after.stops.items()) if key not in before.stops),
    )


def _would_move(outcome: _Outcome, placed: Placed) -> WouldMove:
    return WouldMove(
        replica=outcome.name,
        model=outcome.model,
        from_nodes=outcome.moves_from,
        to_nodes=_nodes(placed.placements),
        weights_there=outcome.weights_there,
        why=outcome.why,
        fabric=placed.fabric,
        downtime=outcome.downtime,
    )


def _would_fit(outcome: _Outcome, placed: Placed) -> WouldFit:
    return WouldFit(
        replica=outcome.name,
        model=outcome.model,
        to_nodes=_nodes(placed.placements),
        weights_there=outcome.weights_there,
        fabric=placed.fabric,
    )


def _would_not_fit(before: _Plan, after: _Plan) -> tuple[WouldNotFit, ...]:
    found = []
    for model, refusal in after.refusals.items():
        short = [key for key, outcome in after.outcomes.items() if outcome.model == model and outcome.placed is None]
        already = sum(key in before.outcomes and before.outcomes[key].placed is None for key in short)
        found.append(WouldNotFit(model=model, replicas=len(short), already=already, refusal=refusal))
    return tuple(found)


# -- one plan

_LAST = 1 << 30
"""Number of replicas that are not made yet."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    name: str
    model: str
    placed: Placed | None
    weights_there: bool = False
    moves_from: tuple[str, ...] = ()
    """Where it runs and can't stay; empty: it had no place."""
    why: str = ""
    downtime: bool = False


@dataclass(slots=True)
class _Plan:
    """Where everything that does not stay would go."""

    outcomes: dict[tuple[str, int, str], _Outcome] = field(default_factory=dict)
    """By model, number and id of the replica."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    stops: dict[str, WouldStop] = field(default_factory=dict)


def _plan(cluster: Cluster) -> _Plan:
    plan, planner = _Plan(), Planner(cluster)
    specs = {spec.name: spec for spec in cluster.catalog.models}
    models = sorted(specs.keys() | {replica.model for replica in cluster.replicas.values()})
    replicas = by_model(cluster)
    stays = {model: _staying(cluster, model, replicas.get(model, []), plan) for model in models}
    counted = {replica.id for replicas in stays.values() for replica in replicas}
    for replica in cluster.replicas.values():
        if replica.id not in counted and replica.replaces not in counted:
            planner.release(replica)  # It leaves, or is gone already.
    uprooted = {
        replica.id: why for replicas in stays.values() for replica in replicas if (why := _uprooted(cluster, replica))
    }
    for replica_id in uprooted:
        planner.release(cluster.replicas[replica_id])
    in_order = [
        (specs[model], replica)
        for model in models
        if model in specs
        for replica in sorted(stays[model], key=lambda each: (each.number, each.id))
    ]
    ready_on = ReadyOn(cluster.replicas.values())
    # What is rolled over gets its place before what has none, as in the cluster itself.
    _roll(
        plan,
        planner,
        [
            (spec, replica, changed)
            for spec, replica in in_order
            if replica.placements and replica.id not in uprooted and (changed := outdated(cluster, replica))
        ],
    )
    for spec, replica in in_order:
        if not replica.placements or replica.id in uprooted:
            specs_for = specs_in_place(cluster, replica, ready_on)
            outcome = _placed_anew(planner, specs_for or (spec,), replica, uprooted.get(replica.id, ""))
            plan.outcomes[spec.name, replica.number, replica.id] = outcome
    for model, spec in sorted(specs.items()):
        for number in range(wanted(cluster, model) - len(stays[model])):
            found = planner.find_first((spec, on_spares(cluster, spec)))
            placed = found[1] if found is not None else None
            there = placed is not None and planner.holds_weights(spec, placed)
            plan.outcomes[model, _LAST, f"{number:06}"] = _Outcome(f"{model} (new)", model, placed, there)
    short = {outcome.model for outcome in plan.outcomes.values() if outcome.placed is None}
    plan.refusals = {model: planner.refusal(specs[model]) for model in sorted(short)}
    return plan


def _roll(plan: _Plan, planner: Planner, due: list[tuple[ModelSpec, Replica, str]]) -> None:
    """Round by round: an original that has gone may make room for the replacement of another."""
    while due:
        left = []
        for spec, replica, changed in due:
            outcome = plan.outcomes[spec.name, replica.number, replica.id] = _rolled(planner, spec, replica, changed)
            if outcome.placed is None:
                left.append((spec, replica, changed))
        if len(left) == len(due):
            return
        due = left


def _rolled(planner: Planner, spec: ModelSpec, replica: Replica, changed: str) -> _Outcome:
    """Where the replacement of an outdated replica would go. Where there is no place at all, the original stays."""
    placed = planner.find(spec)
    planner.release(replica)
    downtime = placed is None
    if placed is None:
        placed = planner.find(spec)
        if placed is None:
            planner.hold(replica)
    there = placed is not None and planner.holds_weights(spec, placed)
    why = f"the catalog would say otherwise: {changed}"
    return _Outcome(replica.id, replica.model, placed, there, _nodes(replica.placements), why, downtime)


def _placed_anew(planner: Planner, specs: Sequence[ModelSpec], replica: Replica, uprooted: str) -> _Outcome:
    """Where a replica would go that has no place, or can't keep the one it has."""
    found = planner.find_first(specs, None if uprooted else Before.of(replica))
    placed = found[1] if found is not None else None
    there = found is not None and planner.holds_weights(*found)
    return _Outcome(replica.id, replica.model, placed, there, _nodes(replica.placements), uprooted)


def _nodes(placements: tuple[Placement, ...]) -> tuple[str, ...]:
    return tuple(placement.node for placement in placements)


def _staying(cluster: Cluster, model: str, of_model: list[Replica], plan: _Plan) -> list[Replica]:
    """The model's replicas less those that would be too many: first such as are not ready, then the youngest."""
    replicas = standing(replace(cluster, replicas={replica.id: replica for replica in of_model}), model)
    surplus = len(replicas) - wanted(cluster, model)
    if surplus <= 0:
        return replicas
    replicas.sort(
        key=lambda each: (
            each.state is ReplicaState.READY and not _uprooted(cluster, each),
            -each.number,
            each.id,
        )
    )
    known = cluster.catalog.model(model) is not None
    why = f"{count(wanted(cluster, model), 'replica')} of {model} wanted" if known else f"{model} is not in the catalog"
    for replica in replicas[:surplus]:
        plan.stops[replica.id] = WouldStop(replica=replica.id, model=model, nodes=_nodes(replica.placements), why=why)
    return replicas[surplus:]


def _uprooted(cluster: Cluster, replica: Replica) -> str:
    """Why a replica can't stay where it is: a node is gone, or what joins its nodes; empty: it can."""
    for placement in replica.placements:
        node = cluster.nodes.get(placement.node)
        if away(node):
            return f"node {placement.node} is {node.state.value if node is not None else 'removed'}"
        stated = node.inventory.fabrics if node is not None and node.inventory is not None else ()
        if replica.fabric is not None and all(fabric.name != replica.fabric for fabric in stated):
            return f"node {placement.node} is not on fabric {replica.fabric}"
    return ""
