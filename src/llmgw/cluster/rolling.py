"""What runs otherwise than the catalog says is rolled over: one replica of a model at a time, its replacement first.

A roll goes back by itself: where the replacement does not become ready, the originals serve on as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmgw.cluster.actions import Action, Note, PutReplica
from llmgw.cluster.beside import Round, original
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.differing import changes, running_differs, same_to_run, version_change
from llmgw.cluster.engines import brings, is_bad, missing_engine, rollback_note, rolled_back
from llmgw.cluster.lifecycle import (
    LEAVING,
    RUNNING,
    all_live,
    has_served,
    is_sure,
    stands,
    start_draining,
    stop,
    told,
)
from llmgw.cluster.model import Cluster, Instant, Replica, ReplicaState
from llmgw.cluster.placement import Planner
from llmgw.cluster.starting import gave_up_on, specs_elsewhere, specs_rolled
from llmgw.cluster.step import Step

GIVEN_UP = "not rolled over: "
"""How the line begins that a given-up roll leaves in a replica's story."""
_BY_RESTART = "an operator asked for a restart"


def outdated(cluster: Cluster, replica: Replica) -> str:
    """What the catalog says otherwise now than the generation that runs was started with; empty: nothing."""
    spec = cluster.catalog.model(replica.model)
    return ", ".join(changes(cluster.nodes, spec, replica)) if spec is not None and replica.state in RUNNING else ""


def runs_before(cluster: Cluster, replica: Replica) -> str:
    """The same as a sentence about the replica: what it runs as or on, and what is otherwise now."""
    spec = cluster.catalog.model(replica.model)
    if spec is not None and (change := version_change(spec, replica)) and outdated(cluster, replica) == str(change):
        return f"runs on {change.engine} {change.runs or 'of an unknown version'}, and {change.asked} is in effect"
    changed = outdated(cluster, replica)
    return f"runs as the catalog was before ({changed} changed since)" if changed else ""


def given_up(cluster: Cluster, replica: Replica) -> bool:
    """True where the catalog as it is now was tried in the replica's place, and did not become ready."""
    spec = cluster.catalog.model(replica.model)
    return spec is not None and gave_up_on(replica, spec)


def given_up_words(replica: Replica) -> str:
    """How the last roll that was given up ended."""
    lines = (line.why for line in reversed(replica.story))
    return next((why.removeprefix(GIVEN_UP) for why in lines if why.startswith(GIVEN_UP)), "")


def restart(cluster: Cluster, model: str, allow_downtime: bool, now: Instant) -> tuple[Action, ...]:
    """Have every replica of the model replaced by a fresh one; one that waits for its next generation gets it now.

    With ``allow_downtime`` one may stop first where there is no room for its replacement beside it.
    """
    actions: list[Action] = []
    for _, old in sorted(cluster.replicas.items()):
        if old.model != model or not stands(old) or old.state is ReplicaState.UNPLACED:
            continue
        if old.state is ReplicaState.FAILED:
            new = replace(old, retry_at=None)
        elif original(cluster, old) is not None:
            continue  # It is fresh, and on its way.
        else:
            new = replace(old, restart=True, may_stop_first=allow_downtime, not_rolled_to=None)
        if new != old:
            # A line of its story alone: it serves on, and its own words say so.
            actions.append(PutReplica(replace(told(new, _BY_RESTART, now), why=new.why) if new.restart else new))
    if actions:
        actions.append(Note("model.restart", model, f"{model} is restarted: {_BY_RESTART}"))
    return tuple(actions)


def reason(cluster: Cluster, replica: Replica) -> str:
    """Why the replica is to be rolled over; empty: it is not."""
    if replica.restart:
        return _BY_RESTART
    spec = cluster.catalog.model(replica.model)
    changed = changes(cluster.nodes, spec, replica) if spec is not None else []
    if spec is None or not changed or gave_up_on(replica, spec):
        return ""
    change = version_change(spec, replica)
    if change is not None and changed == [str(change)]:
        return f"{change.engine} {change.asked} is in effect, and it runs on {change.runs or 'an unknown version'}"
    return f"the catalog was changed since it was started ({', '.join(changed)})"


def roll(turn: Round) -> bool:
    """Take the next step of every roll. True where there is one."""
    step = turn.step
    due: dict[str, list[Replica]] = {}
    specs = {spec.name: spec for spec in step.cluster.catalog.models}
    for replica in step.replicas.values():
        if replica.restart or (replica.model in specs and running_differs(step.nodes, specs[replica.model], replica)):
            due.setdefault(replica.model, []).append(replica)
    for model in sorted(due):
        _roll_model(turn, model, sorted(due[model], key=lambda replica: (replica.number, replica.id)))
    return bool(due)


def give_up(step: Step, old: Replica, new: Replica, words: str) -> None:
    """Stop a replacement that failed for good. What it was to bring is not tried again until it changes.

    Where that was another version of its engine, the engine is rolled back as a whole, and whatever runs on it already.
    """
    spec = step.cluster.catalog.model(old.model)
    stop(step, new, f"given up: {words}")
    history = step.cluster.engines.get(new.profile.engine) if new.profile is not None else None
    if history is not None and brings(history, old.profile, new.profile):
        after = rolled_back(history, f"{words} (it was to take over from {old.id} of {old.model})", step.now)
        step.put_engine(after)
        note = rollback_note(after)
        step.note(note.kind, note.subject, note.words)
        return
    if spec is None:
        return
    tried = new.spec is not None and same_to_run(new.spec, spec)
    rolled = False
    for replica in list(step.replicas.values()):
        if replica.model != old.model or not stands(replica) or original(step, replica) is not None:
            continue
        stays = replica
        if tried and changes(step.nodes, spec, replica) and not gave_up_on(replica, spec):
            stays = replace(stays, not_rolled_to=spec)
        if replica.restart:
            stays = replace(stays, restart=False, may_stop_first=False)
        if stays is not replica:
            # A line of its story alone: it serves on, and its own words say so.
            step.put(replace(told(stays, f"{GIVEN_UP}{words}", step.now), why=replica.why))
            rolled = True
    if rolled:
        step.note("roll.given-up", old.id, f"{old.model} is not rolled over, {old.id} serves on as it was: {words}")


def held_by(cluster: Cluster, replica: Replica) -> str:
    """What the roll of a replica waits for, that is due and has no replacement yet."""
    others = [other for other in cluster.replicas.values() if other.model == replica.model]
    busy = _on_the_move(others)
    if busy is not None:
        return f"its turn comes when {busy.id} has moved"
    unready = _rolled_and_unready(cluster, others)
    if unready is not None and _is_rolled_out(cluster, replica):
        return f"its turn comes when {unready.id}, which follows the catalog already, is ready"
    specs = specs_rolled(cluster, replica)
    planner = Planner(cluster)
    if not specs or planner.find_first(specs) is not None:
        return "a replacement is made next"
    spec = specs[0]
    missing = missing_engine(cluster.nodes, spec)
    if missing:
        return f"no node has {missing} yet ({planner.summary(spec)})"
    words = f"there is no room for a replacement beside it ({planner.summary(spec)})"
    planner.release(replica)
    if not replica.may_stop_first and planner.find_first(specs) is None:
        return (
            f"what it says now fits nowhere, not in its place either ({planner.summary(spec)}), so that it goes on as "
            "it is until the catalog changes again, or a node can take it"
        )
    if replica.may_stop_first:
        return (
            f"{words}; it stops first once all others of {replica.model} are ready, those that leave are gone, and "
            "another would find a place then"
        )
    return f"{words}; `llmgw ctl restart {replica.model} --allow-downtime` stops it first"


def _roll_model(turn: Round, model: str, due: list[Replica]) -> None:
    step = turn.step
    on_trial = _on_the_move(turn.of_model(model)) is not None
    serving: list[Replica] = []
    for replica in due:
        if not stands(replica) or original(step, replica) is not None or not reason(step.cluster, replica):
            continue
        if replica.state not in RUNNING:
            # Its next generation is a fresh one, of the catalog as it is now.
            step.put(replace(replica, restart=False, may_stop_first=False))
        elif has_served(replica):
            serving.append(replica)
        elif (
            not on_trial
            and not _may_go_on(step, replica)
            and turn.has_room_without(replica, specs_elsewhere(step.cluster, replica))
        ):
            start_draining(step, replica, reason(step.cluster, replica))
    if serving:
        _replace_one(turn, model, serving)


def _replace_one(turn: Round, model: str, serving: list[Replica]) -> None:
    step = turn.step
    others = turn.of_model(model)
    if _on_the_move(others) is not None:
        return
    no_room: list[ModelSpec] = []
    bad = _rolled_and_unready(step.cluster, others)
    for replica in serving:
        if bad is not None and _is_rolled_out(step.cluster, replica):
            continue
        for spec in specs_rolled(step, replica):
            if spec not in no_room and turn.make(spec, replica, reason(step.cluster, replica)) is not None:
                return
            no_room.append(spec)
    for replica in serving:
        if not replica.may_stop_first or not _alone_is_missed(step, replica, others):
            continue
        if turn.has_room_without(replica, specs_rolled(step, replica)):
            start_draining(step, replica, f"{reason(step.cluster, replica)}; it may stop before there is another")
            return


def _alone_is_missed(step: Step, replica: Replica, others: Iterable[Replica]) -> bool:
    """True where all others of its model are surely ready. Those that leave are waited for, since they may make room
    beside it; not where their end would not be seen."""
    return all(
        is_sure(step.nodes, other)
        for other in others
        if other.id != replica.id and (stands(other) or (other.state in LEAVING and all_live(step.nodes, other)))
    )


def _on_the_move(replicas: Iterable[Replica]) -> Replica | None:
    """One that has a replacement on its way, or has yet to make way for it."""
    by_id = {replica.id: replica for replica in replicas}
    olds = (by_id.get(replica.replaces) for replica in by_id.values() if replica.replaces and stands(replica))
    return next((old for old in olds if old is not None and not old.lost), None)


def _rolled_and_unready(cluster: Cluster, replicas: Iterable[Replica]) -> Replica | None:
    """Of one model's replicas one that follows the catalog and is not ready, so that the catalog may be no good."""
    for replica in replicas:
        ran = replica.state in RUNNING or replica.state is ReplicaState.FAILED
        if ran and stands(replica) and replica.state is not ReplicaState.READY and replica.replaces is None:
            spec = cluster.catalog.model(replica.model)
            if spec is not None and not replica.restart and not changes(cluster.nodes, spec, replica):
                return replica
    return None


def _is_rolled_out(cluster: Cluster, replica: Replica) -> bool:
    """True where it is to be replaced for a changed catalog's sake, rather than by an operator's restart alone."""
    return not replica.restart or bool(outdated(cluster, replica))


def _may_go_on(step: Step, replica: Replica) -> bool:
    """True where one that has not served yet differs by no more than a version of its engine that it may run on: it is
    rolled over once it serves."""
    spec = step.cluster.catalog.model(replica.model)
    change = version_change(spec, replica) if spec is not None else None
    if spec is None or change is None or changes(step.nodes, spec, replica) != [str(change)]:
        return False
    return replica.profile is not None and not is_bad(step.cluster, replica.profile)
