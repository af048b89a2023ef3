"""Where a replica may go, which place is best, and why not where it may not. See docs/placement.md."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from llmgw.cluster.capacity import Capacity, Room
from llmgw.cluster.catalog import ModelSpec, Profile
from llmgw.cluster.fitness import RUNNABLE_ENGINES, basic_rules, failed_rule, impossible, refusal, source_needed
from llmgw.cluster.lifecycle import judged
from llmgw.cluster.model import Cluster, Instant, Placement
from llmgw.cluster.refusal import NodeRefusal, ProfileRefusal, Refusal, Rule, of_model, of_nodes

__all__ = ["RUNNABLE_ENGINES", "Before", "NodeRefusal", "Placed", "Planner", "ProfileRefusal", "Refusal", "place"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A place for every rank."""

    profile: Profile
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Before:
    """Where a replica's last generation ran: preferred, if it still fits there."""

    node: str
    taken_port: int = 0
    """Block that was found taken on that node; 0: none was."""


def place(cluster: Cluster, spec: ModelSpec, now: Instant) -> Placed | Refusal:
    """Where one more replica of the model would go now. Nodes are judged by their silence up to ``now``."""
    nodes = {node.id: judged(cluster, node, now) for node in cluster.nodes.values()}
    return Planner(replace(cluster, nodes=nodes)).place(spec)


class Planner:
    """Places replicas one after another, each on what the ones before it left."""

    def __init__(self, cluster: Cluster) -> None:
        self._capacity = Capacity(cluster)
        self._rooms = self._capacity.rooms
        self._held_sources = frozenset(source for room in self._rooms.values() for source in room.weights)
        self._basic: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, Rule | None]] = {}
        self._full: dict[str, ModelSpec] = {}
        self._ranking: _Ranking | None = None

    def place(self, spec: ModelSpec, before: Before | None = None) -> Placed | Refusal:
        """The first profile that can be placed, on the best node; or why none can. What is placed is taken."""
        return self.find(spec, before) or self.refusal(spec)

    def find(self, spec: ModelSpec, before: Before | None = None) -> Placed | None:
        """As ``place``, without the words."""
        if self._full.get(spec.name) is spec:
            return None  # What is free only shrinks, so the answer stands for every further replica.
        for profile in spec.profiles:
            placement = self._find(spec, profile, before)
            if placement is not None:
                self._capacity.take(spec.name, placement)
                return Placed(profile, (placement,))
        self._full[spec.name] = spec
        return None

    def refusal(self, spec: ModelSpec) -> Refusal:
        """Why no profile of the model can be placed, as things stand after all that has been placed. Only if so."""
        return of_model(spec.name, [self._profile_refusal(spec, profile) for profile in spec.profiles])

    def _find(self, spec: ModelSpec, profile: Profile, before: Before | None) -> Placement | None:
        if impossible(spec, profile, self._held_sources) is not None:
            return None
        basic = self._basic_rules(profile)
        if before is not None and before.node in self._rooms:
            room = self._rooms[before.node]
            if basic[before.node] is None and failed_rule(room, spec, profile) is None:
                self._ranking = None  # It does not hear of what is placed past it.
                return room.placement(profile, before.taken_port)
        if self._ranking is None or not self._ranking.is_for(spec, profile):
            self._ranking = _Ranking(self._capacity, basic, spec, profile)
        best = self._ranking.best()
        return None if best is None else best.placement(profile)

    def _profile_refusal(self, spec: ModelSpec, profile: Profile) -> ProfileRefusal:
        why_never = impossible(spec, profile, self._held_sources)
        if why_never is not None:
            return ProfileRefusal(profile.name, why_never)
        return of_nodes(profile.name, self._refusals(spec, profile, self._basic_rules(profile)))

    def _basic_rules(self, profile: Profile) -> dict[str, Rule | None]:
        key = profile.engine, tuple(sorted(profile.node_selector.items()))
        if key not in self._basic:
            self._basic[key] = basic_rules(self._rooms.values(), profile)
        return self._basic[key]

    def _refusals(self, spec: ModelSpec, profile: Profile, basic: dict[str, Rule | None]) -> list[NodeRefusal]:
        refusals = []
        for node_id, room in self._rooms.items():
            rule = basic[node_id] or failed_rule(room, spec, profile)
            assert rule is not None
            refusals.append(refusal(room, spec, profile, rule))
        return refusals


_Key = tuple[bool, int, int, int, str]


class _Ranking:
    """The nodes that can take a profile, best first. Stays right while only its own model is placed."""

    def __init__(self, capacity: Capacity, basic: dict[str, Rule | None], spec: ModelSpec, profile: Profile) -> None:
        self._capacity = capacity
        self._spec = spec
        self._profile = profile
        self._source = source_needed(spec, profile)
        self._heap = [
            self._key(room)
            for node_id, room in capacity.rooms.items()
            if basic[node_id] is None and failed_rule(room, spec, profile) is None
        ]
        heapq.heapify(self._heap)

    def is_for(self, spec: ModelSpec, profile: Profile) -> bool:
        return self._spec is spec and self._profile is profile

    def best(self) -> Room | None:
        while self._heap:
            key = self._heap[0]
            room = self._capacity.rooms[key[-1]]
            if failed_rule(room, self._spec, self._profile) is not None:
                heapq.heappop(self._heap)
                continue
            current = self._key(room)
            if current == key:
                return room
            heapq.heapreplace(self._heap, current)
        return None

    def _key(self, room: Room) -> _Key:
        """Smaller is better: holds the weights, strands few GPUs, few replicas of the model, much memory, its name."""
        return (
            self._source is not None and self._source not in room.weights,
            len(room.free) - self._profile.gpus_per_node,
            self._capacity.replicas_on(self._spec.name, room.node.id),
            -room.memory_free_bytes,
            room.node.id,
        )
