"""From what a replica's next generation is started, or the replacement of one: what the catalog says, on which version
of its engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from llmgw.cluster.beside import original
from llmgw.cluster.catalog import EngineSpec, ModelSpec, Profile
from llmgw.cluster.differing import same_to_run
from llmgw.cluster.engines import is_bad, on_own, on_spares, on_versions_in_effect, spare
from llmgw.cluster.lifecycle import FAILURES_GIVEN_UP, stands
from llmgw.cluster.model import Cluster, DrainState, Replica, ReplicaState
from llmgw.cluster.step import Step


def gave_up_on(replica: Replica, spec: ModelSpec) -> bool:
    return replica.not_rolled_to is not None and same_to_run(replica.not_rolled_to, spec)


def spec_beside(cluster: Cluster, replica: Replica) -> ModelSpec | None:
    """What a replacement of the replica is started from: the catalog, unless that was tried and did not get ready."""
    spec = cluster.catalog.model(replica.model)
    return replica.spec if spec is not None and gave_up_on(replica, spec) else spec


def specs_elsewhere(cluster: Cluster, replica: Replica) -> tuple[ModelSpec, ...]:
    """From what a replacement may be started of one that goes for another reason than the version of its engine, the
    best first: it need not wait until that version is there."""
    spec = spec_beside(cluster, replica)
    if spec is None:
        return ()
    return _distinct([spec, *_on_own(cluster, spec, replica), on_spares(cluster, spec)])


def specs_drained(cluster: Cluster, replica: Replica) -> tuple[ModelSpec, ...]:
    """The same of one that leaves a node that is drained: last, by what it runs by. A change that fits nowhere must not
    keep it there, nor stop it."""
    return _distinct([*specs_elsewhere(cluster, replica), *specs_before(cluster, replica)])


def specs_rolled(where: Cluster | Step, replica: Replica) -> tuple[ModelSpec, ...]:
    """From what a replacement may be started of one that is rolled over, the best first."""
    cluster = where.cluster if isinstance(where, Step) else where
    specs = specs_elsewhere(cluster, replica)
    return specs if replica.restart or _is_drained(where, replica) else specs[:1]


def specs_beside(where: Cluster | Step, replica: Replica) -> tuple[ModelSpec, ...]:
    """From what a replacement of the replica may be started, for whichever reason it goes; the best first."""
    if _is_drained(where, replica):
        return specs_drained(where.cluster if isinstance(where, Step) else where, replica)
    return specs_rolled(where, replica)


def specs_in_place(where: Cluster | Step, replica: Replica, ready: ReadyOn) -> tuple[ModelSpec, ...]:
    """From what the replica's own next generation may be started, the best first: on the version of its engine that it
    ran on, as long as the one in effect has not been ready for its model; on the one before, where that one can't be
    had. Where it fails again and again, the next of them has its turn. Last, by what it ran by before the catalog was
    changed: a change that fits nowhere must not keep down what has a place."""
    cluster = where.cluster if isinstance(where, Step) else where
    old = original(where, replica)
    if old is not None:
        return specs_beside(where, old)
    spec = spec_in_place(where, replica)
    if spec is None:
        return ()
    if spec is not cluster.catalog.model(replica.model):
        return (spec,)
    return _distinct([*_by_the_catalog(cluster, spec, replica, ready), *specs_before(cluster, replica)])


def specs_before(cluster: Cluster, replica: Replica) -> tuple[ModelSpec, ...]:
    """What the replica ran by last, or the one in whose place it was made, where the catalog says otherwise now by more
    than the version of an engine: on the version that it ran on, unless that was rolled back from, and on the one in
    effect."""
    spec, ran = cluster.catalog.model(replica.model), replica.spec
    if spec is None or ran is None:
        return ()
    today = on_versions_in_effect(cluster, ran)
    if same_to_run(today, spec):
        return ()
    is_good = not any(is_bad(cluster, profile) for profile in ran.profiles)
    return _in_turn(_distinct([ran, today] if is_good else [today]), replica)


def _by_the_catalog(cluster: Cluster, spec: ModelSpec, replica: Replica, ready: ReadyOn) -> tuple[ModelSpec, ...]:
    spares, own = on_spares(cluster, spec), _on_own(cluster, spec, replica)
    if spares is spec and (not own or own[0] is spec):
        return (spec,)
    proved = all(ready.is_proved(replica.model, each) for each in spec.profiles if spare(cluster, each.engine))
    first = own
    if not proved and ready.ran(replica.model, spares) and (not own or (own[0] is spec and replica.failures)):
        first = [spares]
    chosen = _distinct([spec, *own, spares] if proved else [*first, spec, spares])
    return _in_turn(chosen, replica)


def _in_turn(specs: Sequence[ModelSpec], replica: Replica) -> tuple[ModelSpec, ...]:
    """Where it fails again and again, the next of them comes first."""
    turn = replica.failures // FAILURES_GIVEN_UP % len(specs)
    return (*specs[turn:], *specs[:turn])


def builds_for_all(cluster: Cluster) -> tuple[EngineSpec, ...]:
    """Builds that every node should have: those in effect, and the one before where a replica failed again and again on
    an engine. Its next generation is tried on that one, and a node that came later never had it."""
    failing = {
        profile.engine
        for replica in cluster.replicas.values()
        if replica.failures >= FAILURES_GIVEN_UP and (spec := cluster.catalog.model(replica.model)) is not None
        for profile in spec.profiles
    }
    listed = cluster.catalog.engines
    before = (cluster.engines[spec.name].build(spare(cluster, spec.name)) for spec in listed if spec.name in failing)
    return (*listed, *(build for build in before if build is not None))


class ReadyOn:
    """On which versions of engines the replicas of each model are ready, and on which they run, or ran last."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = tuple(replicas)

    def is_proved(self, model: str, profile: Profile) -> bool:
        return (model, profile.engine, profile.engine_version) in self._ready

    def ran(self, model: str, spec: ModelSpec) -> bool:
        return any((model, each.engine, each.engine_version) in self._ran for each in spec.profiles)

    @cached_property
    def _ready(self) -> frozenset[tuple[str, str, str]]:
        return _versions(replica for replica in self._replicas if replica.state is ReplicaState.READY)

    @cached_property
    def _ran(self) -> frozenset[tuple[str, str, str]]:
        return _versions(self._replicas)


def _versions(replicas: Iterable[Replica]) -> frozenset[tuple[str, str, str]]:
    return frozenset(
        (replica.model, replica.profile.engine, replica.profile.engine_version)
        for replica in replicas
        if replica.profile is not None
    )


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
    if gave_up_on(replica, spec):
        return replica.spec
    on_trial = replica.replaces is None and any(
        other.model == replica.model and stands(other) and original(where, other) is not None
        for other in where.replicas.values()
    )
    return replica.spec if on_trial else spec
