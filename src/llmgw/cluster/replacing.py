"""Replicas that go make way for others: the replacement is ready before the original stops, one at a time."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.beside import Round, nodes_of, original
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.differing import differs
from llmgw.cluster.drain import may_stop_first
from llmgw.cluster.lifecycle import (
    FAILURES_GIVEN_UP,
    RUNNING,
    blamed,
    failures_on,
    is_sure,
    stands,
    start_draining,
    stop,
)
from llmgw.cluster.model import Drain, DrainState, Replica, ReplicaState
from llmgw.cluster.moves import carry_on
from llmgw.cluster.placement import Before, Planner
from llmgw.cluster.rolling import give_up, reason, roll
from llmgw.cluster.starting import specs_beside, specs_elsewhere
from llmgw.cluster.step import Step


def replace_outgoing(step: Step) -> bool:
    """Take every replacement one step further: made, placed, ready, requests shifted, the original stopped.

    True where something is to be replaced: what follows in this step may then let it go on at once.
    """
    if step.cluster.halting:
        return False
    turn = Round(step)
    for replica in list(step.replicas.values()):
        if replica.replaces is not None and replica.id in step.replicas:
            _carry_over(turn, replica)
    carry_on(turn)
    rolls = roll(turn)
    return rolls or bool(step.drains) or any(replica.replaces is not None for replica in step.replicas.values())


def _carry_over(turn: Round, new: Replica) -> None:
    """One replacement: dropped, given up, waited for, or the original makes way for it."""
    step = turn.step
    assert new.replaces is not None
    old = step.replicas.get(new.replaces)
    if old is None:
        step.put(replace(new, replaces=None))
        return
    if not stands(new) or original(step, new) is None:
        return
    drains = _drains_of(step, old)
    why_not = _not_needed(turn, new, old, drains)
    if why_not:
        stop(step, new, why_not)
    elif is_sure(step.nodes, new):
        start_draining(step, old, f"{new.id} is ready in its place ({_why_goes(step, old, drains)})")
    elif old.state not in RUNNING and new.state in RUNNING and (drains or not new.failures):
        start_draining(step, old, f"it has ended, and {new.id} takes over from it")
    elif new.failures >= FAILURES_GIVEN_UP and not _goes_on_elsewhere(step, new, old):
        where = f" (so far {failures_on(new.failed_on)})" if len(new.failed_on) > 1 else ""
        words = f"{new.id} failed {new.failures} times in a row{where}: {new.why}"
        turn.given_up[old.id] = new, words
        give_up(step, old, new, words)
        if any(may_stop_first(drain, old) for drain in drains):
            start_draining(step, old, f"it may stop before there is another, and {words}")


def _goes_on_elsewhere(step: Step, new: Replica, old: Replica) -> bool:
    """True while it may be a node's fault that it fails, and there is a place without that node, or it is tried there:
    what it is to bring must not be given up for one bad node."""
    if new.state in RUNNING:
        return bool(new.failed_on)
    nodes = set(blamed(new))
    if not nodes:
        return False
    planner = Planner(step.snapshot())
    planner.release(new)
    found = planner.find_first(specs_beside(step, old), Before.of(new))
    return found is not None and not nodes <= {placement.node for placement in found[1].placements}


def _not_needed(turn: Round, new: Replica, old: Replica, drains: list[Drain]) -> str:
    """Why a replacement on its way is dropped; empty: it is not."""
    step = turn.step
    if not _why_goes(step, old, drains):
        return f"{old.id} need not be replaced any more"
    if _is_outdated(step, new, old):
        return "the catalog has changed again since it was started"
    if new.state is ReplicaState.READY:
        return ""
    best = turn.replacement(old)
    if best is not None and best.id != new.id:
        return f"{best.id} takes over from {old.id} already"
    ahead = None if drains else _rolled_before(turn, new)
    if ahead is not None:
        return f"{ahead.id} takes over from {ahead.replaces} first: one replica of {new.model} is rolled at a time"
    closed = _drains_of(step, new)
    if closed and new.placements:
        return f"{closed[0].node} is being drained"
    if new.state is ReplicaState.UNPLACED and new.story:
        return f"there is no room for it beside {old.id} any more: {new.why}"
    return ""


def _is_outdated(step: Step, new: Replica, old: Replica) -> bool:
    """True where it was started from something else than another would be now."""

    def other_than(specs: tuple[ModelSpec, ...]) -> bool:
        return bool(specs) and all(differs(step.nodes, spec, new) for spec in specs)

    if other_than(specs_beside(step, old)):
        return True
    # By what the original runs by, which is for where there is no place for what the catalog says.
    today = specs_elsewhere(step.cluster, old)
    if not _drains_of(step, old) or not other_than(today):
        return False
    planner = Planner(step.snapshot())
    if planner.find_first(today) is not None:
        return True
    # Not where another could be started like it before it has made room: they would take turns for ever.
    if planner.find_first(specs_beside(step, old)) is not None:
        return False
    planner.release(new)
    return planner.find_first(today) is not None


def _rolled_before(turn: Round, new: Replica) -> Replica | None:
    """Another replacement of the model's roll that is further: the two met when an original came back that was lost."""
    step = turn.step
    rolled = [
        other
        for other in turn.of_model(new.model)
        if other.replaces is not None and stands(other)
        if (old := original(step, other)) is not None and not _drains_of(step, old)
    ]
    first = min(rolled, key=lambda other: (other.state is not ReplicaState.READY, other.number, other.id), default=new)
    return None if first.id == new.id else first


def _drains_of(step: Step, replica: Replica) -> list[Drain]:
    """Drains that are moving, of nodes on which the replica has a rank, or had one until it ended."""
    nodes = nodes_of(replica) or tuple(placement.node for placement in replica.previous)
    found = (step.drains.get(node) for node in nodes)
    return [drain for drain in found if drain is not None and drain.state is not DrainState.WAITING]


def _why_goes(step: Step, replica: Replica, drains: list[Drain]) -> str:
    if drains:
        return f"{drains[0].node} is being drained"
    return reason(step.cluster, replica)
