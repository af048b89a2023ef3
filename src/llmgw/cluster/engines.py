"""Which build of each engine is in effect, and on which a replica may run meanwhile: upgrades, and their return.

A changed build is installed beside the one before it. Replicas are rolled over to it like to any other change of the
catalog, and those that must be placed again before it is there come back on the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from llmgw.cluster.actions import Action, Note, PutEngine
from llmgw.cluster.catalog import Catalog, EngineName, EngineSpec, ModelSpec, Profile
from llmgw.cluster.model import Cluster, EngineHistory, Instant, Node, Replica, ReplicaState


class CantRollBack(Exception):
    """The engine stays at the build that is in effect; the message says why."""


# -- the catalog in effect


def in_effect(catalog: Catalog, engines: Mapping[str, EngineHistory]) -> Catalog:
    """The catalog with the builds that are in effect, and their versions in its profiles. Given one that is in effect
    already it is the same value."""
    builds = tuple(engines[spec.name].in_effect if spec.name in engines else spec for spec in catalog.engines)
    versions: dict[str, str] = {spec.name: spec.version for spec in builds}
    models = tuple(_on_versions(model, versions) for model in catalog.models)
    if builds == catalog.engines and all(new is old for new, old in zip(models, catalog.models, strict=True)):
        return catalog
    return replace(catalog, models=models, engines=builds)


def _on_versions(spec: ModelSpec, versions: Mapping[str, str]) -> ModelSpec:
    """The model with each profile on the version given for its engine; on none where none is given."""
    asked = tuple(_on_version(profile, versions.get(profile.engine, "")) for profile in spec.profiles)
    if all(new is old for new, old in zip(asked, spec.profiles, strict=True)):
        return spec
    return replace(spec, profiles=asked)


def _on_version(profile: Profile, version: str) -> Profile:
    return profile if profile.engine_version == version else replace(profile, engine_version=version)


def with_engine(cluster: Cluster, history: EngineHistory) -> Cluster:
    """The cluster once the engine is as ``history`` says."""
    engines = {**cluster.engines, history.name: history}
    return replace(cluster, engines=engines, catalog=in_effect(cluster.catalog, engines))


# -- what the file says


def with_file(cluster: Cluster, catalog: Catalog, now: Instant) -> tuple[Cluster, tuple[Action, ...]]:
    """The cluster once it follows ``catalog``, as a file has it; and what of its engines is to be stored and said.

    Where the file names another build than before, the one before is remembered, and a rollback ends.
    """
    engines, actions = dict(cluster.engines), list[Action]()
    listed: dict[str, EngineSpec] = {spec.name: spec for spec in catalog.engines}
    for name in sorted(engines.keys() | listed.keys()):
        before, spec = engines.get(name), listed.get(name)
        after = _unlisted(before, now) if spec is None else followed(before, spec, cluster, now)
        if after == before:
            continue
        engines[name] = after
        actions.append(PutEngine(after))
        if before is not None and spec is not None:
            actions.append(Note("engine.changed", name, _change_words(before, after)))
    return replace(cluster, engines=engines, catalog=in_effect(catalog, engines)), tuple(actions)


def followed(before: EngineHistory | None, spec: EngineSpec, cluster: Cluster, now: Instant) -> EngineHistory:
    """The engine once the file says ``spec``. The build before it is the last that was seen to serve, or else the last
    that a node has."""
    if before is None:
        return EngineHistory(name=spec.name, spec=spec, since=now.wall_s)
    if spec == before.spec:
        return before
    if spec.version == before.spec.version:
        return replace(before, spec=spec, rolled_back="", since=now.wall_s)
    ready, used = _versions_run(spec.name, cluster.replicas.values())
    known = (before.in_effect, *((before.kept,) if before.kept is not None else ()))
    left = [build for build in known if build.version != spec.version]
    served = [build for build in left if build.version in ready]
    runs = [build for build in left if build.version in used]
    trusted = [build for build in left if not (before.rolled_back and build == before.spec)]
    there = _versions_there(spec.name, cluster.nodes.values())
    installed = [build for build in trusted if build.version in there]
    previous = next(iter([*served, *runs, *installed, *trusted]), None)
    others = [build for build in (*known, *before.older) if build.version in used and build not in (spec, previous)]
    older = tuple(dict.fromkeys(build for build in others if build.version != spec.version))
    return EngineHistory(name=spec.name, spec=spec, previous=previous, since=now.wall_s, older=older)


def _unlisted(before: EngineHistory | None, now: Instant) -> EngineHistory:
    """The file does not list it any more. Remembered, since replicas may run on it."""
    assert before is not None
    if not before.rolled_back:
        return before
    return replace(before, spec=before.in_effect, previous=None, rolled_back="", since=now.wall_s)


def _versions_run(name: EngineName, replicas: Iterable[Replica]) -> tuple[set[str], set[str]]:
    """Versions of the engine that replicas are ready on, and all that replicas run or ran on last."""
    ready, used = set(), set()
    for replica in replicas:
        if replica.profile is not None and replica.profile.engine == name:
            used.add(replica.profile.engine_version)
            if replica.state is ReplicaState.READY:
                ready.add(replica.profile.engine_version)
    return ready, used


def _versions_there(name: EngineName, nodes: Iterable[Node]) -> set[str]:
    """Versions of the engine that can be run on some node."""
    engines = (engine for node in nodes for engine in node.engines)
    return {engine.version for engine in engines if engine.name == name and engine.usable and not engine.named}


def _change_words(before: EngineHistory, after: EngineHistory) -> str:
    was, now = before.in_effect, after.in_effect
    ends = f"; with that the rollback from {before.spec.version} ends" if before.rolled_back else ""
    if was.version == now.version:
        return f"{after.name} {now.version} comes from elsewhere now ({_source(was)} -> {_source(now)}){ends}"
    return (
        f"{after.name} {was.version} -> {now.version}: nodes install it beside the other, then replicas follow, one at "
        f"a time, each once its replacement is ready{ends}"
    )


def _source(spec: EngineSpec) -> str:
    return f"{spec.source} package {spec.package}" if spec.package else spec.source


# -- back to the build before


def roll_back(cluster: Cluster, name: str, why: str, now: Instant) -> tuple[Action, ...]:
    """Have the build before the file's be in effect. Raises CantRollBack, in words, where there is none."""
    history = cluster.engines.get(name)
    if history is None or cluster.catalog.engine(name) is None:
        raise CantRollBack(f"{name} is not among the engines of the file")
    if history.rolled_back:
        raise CantRollBack(
            f"{name} is rolled back already, from {history.spec.version} to {history.in_effect.version}: "
            f"{history.rolled_back}"
        )
    if history.previous is None:
        raise CantRollBack(
            f"there is no version of {name} before {history.spec.version} to go back to: it has not been changed yet"
        )
    after = rolled_back(history, why, now)
    return PutEngine(after), rollback_note(after)


def rolled_back(history: EngineHistory, why: str, now: Instant) -> EngineHistory:
    return replace(history, rolled_back=why, since=now.wall_s)


def rollback_note(history: EngineHistory) -> Note:
    words = f"{history.name} is rolled back {rollback_words(history)}"
    return Note("engine.rolled-back", history.name, words)


def rollback_words(history: EngineHistory) -> str:
    """From which version to which, why, and until when. Of one that is rolled back."""
    return (
        f"from {history.spec.version} to {history.in_effect.version}: {history.rolled_back}; it stays so until the "
        f"file names another, or `llmgw ctl engines rollback {history.name} --reset`"
    )


def reset(cluster: Cluster, name: str, now: Instant) -> tuple[Action, ...]:
    """Have the file's build be in effect again. Raises CantRollBack, in words, where it is."""
    history = cluster.engines.get(name)
    if history is None or cluster.catalog.engine(name) is None:
        raise CantRollBack(f"{name} is not among the engines of the file")
    if not history.rolled_back:
        raise CantRollBack(f"{name} is not rolled back: {history.spec.version} is in effect, as the file says")
    after = replace(history, rolled_back="", since=now.wall_s)
    words = f"{name} {after.spec.version} is in effect again, and tried anew: an operator ended the rollback"
    return PutEngine(after), Note("engine.changed", name, words)


def brings(history: EngineHistory | None, old: Profile | None, new: Profile | None) -> bool:
    """True where what ``new`` runs on is the file's build, ``old`` runs on another, and there is one to go back to."""
    if history is None or history.previous is None or history.rolled_back or new is None or old is None:
        return False
    return new.engine == history.name and new.engine_version == history.spec.version != old.engine_version


# -- on what a replica may run meanwhile


def spare(cluster: Cluster, engine: str) -> str:
    """The version that stands in for the one in effect where that can't be had; empty: none. Not the one that a
    rollback was from."""
    history = cluster.engines.get(engine)
    return history.previous.version if history is not None and history.previous and not history.rolled_back else ""


def is_bad(cluster: Cluster, profile: Profile) -> bool:
    """True where it runs on the version that its engine was rolled back from."""
    history = cluster.engines.get(profile.engine)
    return history is not None and bool(history.rolled_back) and profile.engine_version == history.spec.version


def on_own(spec: ModelSpec, profile: Profile) -> ModelSpec:
    """The model with the engine of ``profile`` at that profile's version."""
    versions: dict[str, str] = {each.engine: each.engine_version for each in spec.profiles}
    return _on_versions(spec, {**versions, profile.engine: profile.engine_version})


def on_versions_in_effect(cluster: Cluster, spec: ModelSpec) -> ModelSpec:
    """The model with every engine at the version in effect; on the one it names where the file lists that engine no
    more."""
    versions: dict[str, str] = {each.engine: each.engine_version for each in spec.profiles}
    return _on_versions(spec, {**versions, **{each.name: each.version for each in cluster.catalog.engines}})


def on_spares(cluster: Cluster, spec: ModelSpec) -> ModelSpec:
    """The model with every engine at its spare version; those that have none at the one in effect."""
    versions: dict[str, str] = {
        each.engine: spare(cluster, each.engine) or each.engine_version for each in spec.profiles
    }
    return _on_versions(spec, versions)


def missing_engine(nodes: Mapping[str, Node], spec: ModelSpec) -> str:
    """``llamacpp b10991``, where no node can use the engine of any profile; else empty."""
    for profile in spec.profiles:
        for node in nodes.values():
            engine = node.engine(profile.engine, profile.engine_version) if node.session is not None else None
            if engine is not None and engine.usable:
                return ""
    return " and ".join(dict.fromkeys(f"{each.engine} {each.engine_version}".strip() for each in spec.profiles))


# -- what nodes should have


def builds_for(cluster: Cluster, for_all: Iterable[EngineSpec], here: Iterable[Replica]) -> tuple[EngineSpec, ...]:
    """Builds that a node should have: those ``for_all`` nodes, and those of the replicas that are placed there."""
    builds = list(for_all)
    there = {(spec.name, spec.version) for spec in builds}
    profiles = [each.profile for each in here if each.profile is not None]
    for profile in sorted(profiles, key=_engine_of):
        history, key = cluster.engines.get(profile.engine), (profile.engine, profile.engine_version)
        build = history.build(profile.engine_version) if history is not None and key not in there else None
        if build is not None:
            there.add(key)
            builds.append(build)
    return tuple(builds)


def _engine_of(profile: Profile) -> tuple[str, str]:
    return profile.engine, profile.engine_version


def builds_kept(cluster: Cluster) -> tuple[EngineSpec, ...]:
    """Builds that stay on the nodes which have them: the other of the file's and the one before, and older ones that
    replicas still run on."""
    kept = []
    for spec in cluster.catalog.engines:
        history = cluster.engines.get(spec.name)
        if history is not None:
            kept += [history.kept] if history.kept is not None else []
            kept += history.older
    return tuple(kept)


def told_versions(cluster: Cluster) -> dict[str, Replica]:
    """Replicas whose profile does not say on which version they run, with the one that their node reports: an older
    release did not write it down, and they must not be rolled over for that alone."""
    listed = {spec.name for spec in cluster.catalog.engines}
    told = {}
    for key, replica in cluster.replicas.items():
        profile = replica.profile
        if profile is not None and replica.spec is not None and not profile.engine_version and profile.engine in listed:
            version = _version_there(cluster.nodes, replica, profile.engine)
            if version:
                known = _on_version(profile, version)
                told[key] = replace(replica, profile=known, spec=on_own(replica.spec, known))
    return told


def _version_there(nodes: Mapping[str, Node], replica: Replica, name: EngineName) -> str:
    for placement in (*replica.placements, *replica.previous):
        node = nodes.get(placement.node)
        engine = node.engine(name) if node is not None else None
        if engine is not None and engine.usable and not engine.named:
            return engine.version
    return ""
