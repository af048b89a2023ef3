"""What a generation that runs was started from, held against what the catalog says now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from llmgw.cluster.catalog import ModelSpec, Profile
from llmgw.cluster.lifecycle import RUNNING
from llmgw.cluster.model import Node, Replica


class VersionChange(NamedTuple):
    """A profile differs by the version of its engine alone."""

    engine: str
    runs: str
    asked: str

    def __str__(self) -> str:
        return f"{self.engine} {self.asked} in place of {self.runs or 'an unknown version'}"


def same_to_run(one: ModelSpec, other: ModelSpec) -> bool:
    """True where the two differ at most in how many replicas they ask for."""
    return one is other or replace(one, replicas=other.replicas) == other


def differs(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> bool:
    """True where the generation that runs was started from something else than ``spec``."""
    return bool(changes(nodes, spec, replica))


def running_differs(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> bool:
    """As ``changes``, without the words, of one that runs: asked of every replica in every step."""
    was = replica.spec
    if was is None or was is spec or replica.profile is None or replica.state not in RUNNING:
        return False
    if was.source == spec.source and was.task == spec.task and was.aliases == spec.aliases:
        return replica.profile not in spec.profiles and bool(changes(nodes, spec, replica))
    return True


def changes(nodes: Mapping[str, Node], spec: ModelSpec, replica: Replica) -> list[str]:
    """What of ``spec`` is otherwise than what the generation that runs was started from, in words."""
    was, profile = replica.spec, replica.profile
    if was is None or profile is None or was is spec:
        return []
    changed = [name for name in ("source", "task", "aliases") if getattr(spec, name) != getattr(was, name)]
    same_name = next((other for other in spec.profiles if other.name == profile.name), None)
    if same_name is None:
        changed.append(f"profile {profile.name}, which is gone")
    elif same_name != profile:
        change = version_change(spec, replica)
        if change is None:
            changed.append(f"profile {same_name.name}")
        elif same_name.engine_version and not _has_own_programs(nodes, replica, profile):
            changed.append(str(change))
    return changed


def version_change(spec: ModelSpec, replica: Replica) -> VersionChange | None:
    """None where the profile differs by nothing, or by more than the version of its engine."""
    profile = replica.profile
    asked = next((each for each in spec.profiles if profile is not None and each.name == profile.name), None)
    if profile is None or asked is None or asked.engine_version == profile.engine_version:
        return None
    if replace(profile, engine_version=asked.engine_version) != asked:
        return None
    return VersionChange(asked.engine, profile.engine_version, asked.engine_version)


def _has_own_programs(nodes: Mapping[str, Node], replica: Replica, profile: Profile) -> bool:
    """True where all its nodes run the engine from a program that their own file names: no version changes that."""
    engines = [
        node.engine(profile.engine, profile.engine_version) if (node := nodes.get(placement.node)) else None
        for placement in replica.placements
    ]
    return bool(engines) and all(engine is not None and engine.named for engine in engines)
