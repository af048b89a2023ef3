"""Replicas that are made beside the one they take over from, and the room that is looked for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.lifecycle import stands
from llmgw.cluster.model import Cluster, Replica, ReplicaState
from llmgw.cluster.placement import Before, Placed, Planner
from llmgw.cluster.scaling import new_replica
from llmgw.cluster.step import Step


def original(where: Cluster | Step, replica: Replica) -> Replica | None:
    """The replica that this one is to take over from, as long as that one stands."""
    found = where.replicas.get(replica.replaces) if replica.replaces is not None else None
    return found if found is not None and stands(found) else None


def replacement(where: Cluster | Step, replica: Replica) -> Replica | None:
    """The replica that takes over from this one; of several, the one that is nearest to it."""
    return _nearest(replica, where.replicas.values())


def _nearest(replica: Replica, others: Iterable[Replica]) -> Replica | None:
    found = [other for other in others if other.replaces == replica.id and stands(other)]
    return min(found, key=lambda other: (other.state is not ReplicaState.READY, other.number, other.id), default=None)


def nodes_of(replica: Replica) -> tuple[str, ...]:
    """Nodes that it holds a place on, by rank."""
    return tuple(placement.node for placement in replica.placements)


class Round:
    """One round over all that is to go: what one of them takes, the next does not find free."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.given_up: dict[str, tuple[Replica, str]] = {}
        """By the id of the original: which replacement failed for good in this round, and how."""
        self._models: dict[str, list[str]] = {}
        """Ids of each model's replicas: many may be replaced at once, and each looks at the others of its model."""
        for replica in step.replicas.values():
            self._models.setdefault(replica.model, []).append(replica.id)

    def of_model(self, model: str) -> list[Replica]:
        """The model's replicas as they stand now."""
        replicas = self.step.replicas
        return [replicas[key] for key in self._models.get(model, ()) if key in replicas]

    def replacement(self, old: Replica) -> Replica | None:
        """The replica that takes over from this one, as ``replacement`` has it."""
        return _nearest(old, self.of_model(old.model))

    def make(self, spec: ModelSpec, old: Replica, why: str, before: Before | None = None) -> Replica | None:
        """A replacement made beside ``old``; None where there is no room for it. ``before``: where others that were to
        take over from it have failed, and which nodes it goes to by a plan."""
        before = before or Before()
        placed = self._planner.find(spec, before)
        return self._make(spec, old, why, placed, before) if placed is not None else None

    def has_room_without(self, old: Replica, specs: Sequence[ModelSpec]) -> bool:
        """Whether there would be room for one of the specs once ``old`` has stopped; it is held for that then."""
        self._planner.release(old)
        if self._planner.find_first(specs) is not None:
            return True
        self._planner.hold(old)
        return False

    def short_of(self, spec: ModelSpec) -> str:
        """In words why there was no room."""
        return self._planner.summary(spec)

    def _make(self, spec: ModelSpec, old: Replica, why: str, placed: Placed, before: Before) -> Replica:
        new = new_replica(self.step, old.model, f"takes over from {old.id}: {why}")
        # It is placed with all others in this step; what it finds under ``previous`` it prefers.
        new = replace(new, replaces=old.id, spec=spec, not_rolled_to=old.not_rolled_to, previous=placed.placements)
        new = replace(new, failed_on=before.failed_on)
        self.step.put(new)
        self._models.setdefault(new.model, []).append(new.id)
        return new

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.step.snapshot())
