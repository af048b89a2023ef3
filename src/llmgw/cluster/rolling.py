"""What runs otherwise than the catalog says is rolled over: one replica of a model at a time, its replacement first.

A roll goes back by itself: where the replacement does not become ready, the originals serve on as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from llmgw.cluster.actions import Action, Note, PutReplica
from llmgw.cluster.beside import Round, has_served, original
from llmgw.cluster.catalog import ModelSpec, Profile
from llmgw.cluster.engines import (
    brings,
    is_bad,
    missing_engine,
    on_own,
    on_spares,
    rollback_note,
    rolled_back,
    spare,
)
from llmgw.cluster.lifecycle import RUNNING, stands, start_draining, stop, told
from llmgw.cluster.model import Cluster, DrainState, Instant, Node, Replica, ReplicaState
from llmgw.cluster.placement import Planner
from llmgw.cluster.step import Step

FAILURES_GIVEN_UP = 3
"""Failures in a row after which a replacement is taken for one that never becomes ready, and after which a replica's
next generation is tried on another version of its engine, where there is one."""
GIVEN_UP = "not rolled over: "
"""How the line begins that a given-up roll leaves in a replica's story."""
_BY_RESTART = "an operator asked for a restart"


def outdated(cluster: Cluster, replica: Replica) -> str:
    """What the catalog says otherwise now than the generation that runs was started with; empty: nothing."""
    spec = cluster.catalog.model(replica.model)
    return ", ".join(_changes(cluster.nodes, spec, replica)) if spec is not None and replica.state in RUNNING else ""


def runs_before(cluster: Cluster, replica: Replica) -> str:
    """The same as a sentence about the replica: what it runs as or on, and what is otherwise now."""
    spec = cluster.catalog.model(replica.model)
    if spec is not None and (change := _version_change(spec, replica)) and outdated(cluster, replica) == change[0]:
        _, engine, runs, asked = change
        return f"runs on {engine} {runs or 'of an unknown version'}, and {asked} is in effect"
    changed = outdated(cluster, replica)
    return f"runs as the catalog was before ({changed} changed since)" if changed else ""


def given_up(cluster: Cluster, replica: Replica) -> bool:
    """True where the catalog as it is now was tried in the replica's place, and did not become ready."""
    spec = cluster.catalog.model(replica.model)
    return spec is not None and _gave_up_on(replica, spec)


def given_up_words(replica: Replica) -> str:
    """How the last roll that was given up ended."""
    lines = (line.why for line in reversed(replica.story))
    return next((why.removeprefix(GIVEN_UP) for why in lines if why.startswith(GIVEN_UP)), "")


def spec_beside(cluster: Cluster, replica: Replica) -> ModelSpec | None:
    """What a replacement of the replica is started from: the catalog, unless that was tried and did not get ready."""
    spec = cluster.catalog.model(replica.model)
    return replica.spec if spec is not None and _gave_up_on(replica, spec) else spec


def specs_elsewhere(cluster: Cluster, replica: Replica) -> tuple[ModelSpec, ...]:
    """From what a replacement may be started of one that goes for another reason than the version of its engine, the
    best first: it need not wait until that version is there."""
    spec = spec_beside(cluster, replica)
    if spec is None:
        return ()
    return _distinct([spec, *_on_own(cluster, spec, replica), on_spares(cluster, spec)])


def specs_beside(where: Cluster | Step, replica: Replica) -> tuple[ModelSpec, ...]:
    """From what a replacement of the replica may be started, the best first."""
    cluster = where.cluster if isinstance(where, Step) else where
    specs = specs_elsewhere(cluster, replica)
    return specs if replica.restart or _is_drained(where, replica) else specs[:1]


def specs_in_place(where: Cluster | Step, replica: Replica, ready: ReadyOn) -> tuple[ModelSpec, ...]:
    """From what the replica's own next generation may be started, the best first: on the version of its engine that it
    ran on, as long as the one in effect has not been ready for its model; on the one before, where that one can't be
    had. Where it fails again and again, the next of them has its turn."""
    cluster = where.cluster if isinstance(where, Step) else where
    old = original(where, replica)
    if old is not None:
        return specs_beside(where, old)
    spec = spec_in_place(where, replica)
    if spec is None:
        return ()
    if spec is not cluster.catalog.model(replica.model):
        return (spec,)
    spares, own = on_spares(cluster, spec), _on_own(cluster, spec, replica)
    if spares is spec and (not own or own[0] is spec):
        return (spec,)
    proved = all(ready.is_proved(replica.model, each) for each in spec.profiles if spare(cluster, each.engine))
    first = own or ([spares] if not proved and ready.ran(replica.model, spares) else [])
    chosen = _distinct([spec, *own, spares] if proved else [*first, spec, spares])
    turn = replica.failures // FAILURES_GIVEN_UP % len(chosen)
    return (*chosen[turn:], *chosen[:turn])


class ReadyOn:
    """On which versions of engines the replicas of each model are ready, and on which they run, or ran last."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._ready: set[tuple[str, str, str]] = set()
        self._ran: set[tuple[str, str, str]] = set()
        for replica in replicas:
            if replica.profile is not None:
                key = replica.model, replica.profile.engine, replica.profile.engine_version
                self._ran.add(key)
                if replica.state is ReplicaState.READY:
                    self._ready.add(key)

    def is_proved(self, model: str, profile: Profile) -> bool:
        return (model, profile.engine, profile.engine_version) in self._ready

    def ran(self, model: str, spec: ModelSpec) -> bool:
        return any((model, each.engine, each.engine_version) in self._ran for each in spec.profiles)


def _on_own(cluster: Cluster, spec: ModelSpec, replica: Replica) -> list[ModelSpec]:
    """The spec on the version that the replica runs or ran on: not on one that was rolled back from, nor where the
    model has no profile with that engine any more."""
    profile = replica.profile
    if profile is None or not profile.engine_version or is_bad(cluster, profile):
        return []
    if all(each.engine != profile.engine for each in spec.profiles):
        return []
    return [on_own(spec, profile)]


def _distinct(specs: Sequence[ModelSpec]) -> tuple[ModelSpec, ...]:
    found: list[ModelSpec] = []
    for spec in specs:
        if spec not in found:
            found.append(spec)
    return tuple(found)


def _is_drained(where: Cluster | Step, replica: Replica) -> bool:
    placements = replica.placements or replica.previous
    drains = (where.drains.get(placement.node) for placement in placements)
    return any(drain is not None and drain.state is not DrainState.WAITING for drain in drains)


def spec_in_place(where: Cluster | Step, replica: Replica) -> ModelSpec | None:
    """What the replica's own next generation is started from, whatever the version of its engine. While a changed
    catalog is on trial in a replacement, and after it has failed there, the others come back as they were."""
    cluster = where.cluster if isinstance(where, Step) else where
    spec = cluster.catalog.model(replica.model)
    if spec is None or replica.spec is None or same_to_run(replica.spec, spec):
        return spec
    if _gave_up_on(replica, spec):
        return replica.spec
    on_trial = replica.replaces is None and any(
        other.model == replica.model and stands(other) and original(where, other) is not None
        for other in where.replicas.values()
    )
    return replica.spec if on_trial else spec


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
    changed = _changes(cluster.nodes, spec, replica) if spec is not None else []
    if spec is None or not changed or _gave_up_on(replica, spec):
        return ""
    change = _version_change(spec, replica)
    if change is not None and changed == [change[0]]:
        return f"{change[1]} {change[3]} is in effect, and it runs on {change[2] or 'an unknown version'}"
    return f"the catalog was changed since it was started ({', '.join(changed)})"


def roll(turn: Round) -> bool:
    """Take the next step of every roll. True where there is one."""
    step = turn.step
    due: dict[str, list[Replica]] = {}
    specs = {spec.name: spec for spec in step.cluster.catalog.models}
    for replica in step.replicas.values():
        if replica.restart or (replica.model in specs and _differs(step.nodes, specs[replica.model], replica)):
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
        if tried and _changes(step.nodes, spec, replica) and not _gave_up_on(replica, spec):
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
    specs = specs_beside(cluster, replica)
    planner = Planner(cluster)
    if not specs or planner.find_first(specs) is not None:
        return "a replacement is made next"
    spec = specs[0]
    missing = missing_engine(cluster.nodes, spec)
    if missing:
        return f"no node has {missing} yet ({planner.summary(spec)})"
    words = f"there is no room for a replacement beside it ({planner.summary(spec)})"
    if replica.may_stop_first:
        return f"{words}; it stops first once all others of {replica.model} are ready"
    return f"{words}; `llmgw ctl restart {replica.model} --allow-downtime` stops it first"


def same_to_run(one: ModelSpec, other: ModelSpec) -> bool:
    """True where the two differ at most in how many replicas they ask for."""
    return one is other or replace(one, replicas=other.replicas) == other


def differs(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> bool:
    """True where the generation that runs was started from something else than ``spec``."""
    return bool(_changes(nodes, spec, replica))


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
        elif not on_trial and not _may_go_on(step, replica):
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
        for spec in specs_beside(step, replica):
            if spec not in no_room and turn.make(spec, replica, reason(step.cluster, replica)) is not None:
                return
            no_room.append(spec)
    for replica in serving:
        rest = [other for other in others if other.id != replica.id and stands(other)]
        if replica.may_stop_first and all(other.state is ReplicaState.READY for other in rest):
            start_draining(step, replica, f"{reason(step.cluster, replica)}; it may stop before there is another")
            return


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
            if spec is not None and not replica.restart and not _changes(cluster.nodes, spec, replica):
                return replica
    return None


def _is_rolled_out(cluster: Cluster, replica: Replica) -> bool:
    """True where it is to be replaced for a changed catalog's sake, rather than by an operator's restart alone."""
    return not replica.restart or bool(outdated(cluster, replica))


def _gave_up_on(replica: Replica, spec: ModelSpec) -> bool:
    return replica.not_rolled_to is not None and same_to_run(replica.not_rolled_to, spec)


def _may_go_on(step: Step, replica: Replica) -> bool:
    """True where one that has not served yet differs by no more than a version of its engine that it may run on: it is
    rolled over once it serves."""
    spec = step.cluster.catalog.model(replica.model)
    change = _version_change(spec, replica) if spec is not None else None
    if spec is None or change is None or _changes(step.nodes, spec, replica) != [change[0]]:
        return False
    return replica.profile is not None and not is_bad(step.cluster, replica.profile)


def _differs(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> bool:
    """As ``_changes``, without the words, of one that runs: asked of every replica in every step."""
    was = replica.spec
    if was is None or was is spec or replica.profile is None or replica.state not in RUNNING:
        return False
    if was.source == spec.source and was.task == spec.task and was.aliases == spec.aliases:
        return replica.profile not in spec.profiles and bool(_changes(nodes, spec, replica))
    return True


def _changes(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> list[str]:
    was, profile = replica.spec, replica.profile
    if was is None or profile is None or was is spec:
        return []
    changed = [name for name in ("source", "task", "aliases") if getattr(spec, name) != getattr(was, name)]
    same_name = next((other for other in spec.profiles if other.name == profile.name), None)
    if same_name is None:
        changed.append(f"profile {profile.name}, which is gone")
    elif same_name != profile:
        change = _version_change(spec, replica)
        if change is None:
            changed.append(f"profile {same_name.name}")
        elif same_name.engine_version and not _has_own_programs(nodes, replica, profile):
            changed.append(change[0])
    return changed


def _version_change(spec: ModelSpec, replica: Replica) -> tuple[str, str, str, str] | None:
    """In words, the engine, the version that runs and the one in effect, where the profile differs by that alone."""
    profile = replica.profile
    asked = next((each for each in spec.profiles if profile is not None and each.name == profile.name), None)
    if profile is None or asked is None or asked.engine_version == profile.engine_version:
        return None
    if replace(profile, engine_version=asked.engine_version) != asked:
        return None
    words = f"{asked.engine} {asked.engine_version} in place of {profile.engine_version or 'an unknown version'}"
    return words, asked.engine, profile.engine_version, asked.engine_version


def _has_own_programs(nodes: Mapping[str, Node], replica: Replica, profile: Profile) -> bool:
    """True where all its nodes run the engine from a program that their own file names: no version changes that."""
    engines = [
        node.engine(profile.engine, profile.engine_version) if (node := nodes.get(placement.node)) else None
        for placement in replica.placements
    ]
    return all(engine is not None and engine.named for engine in engines)
