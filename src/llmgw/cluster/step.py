"""One step of the cluster in the making: the working copy that the parts of reconcile change, and what changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from llmgw.cluster.actions import (
    Action,
    CountReplica,
    Note,
    PutBrake,
    PutDrain,
    PutEngine,
    PutNode,
    PutReplica,
    RemoveDrain,
    RemoveReplica,
)
from llmgw.cluster.engines import with_engine
from llmgw.cluster.model import Brake, Cluster, Drain, EngineHistory, Instant, Node, Replica


class Step:
    """Collects changes against ``cluster``; ``actions`` says them, each subject once and in the order of ids."""

    def __init__(self, cluster: Cluster, now: Instant) -> None:
        self.cluster = cluster
        """As it was, but for the catalog where an engine was rolled back in this step."""
        self.now = now
        self.nodes: dict[str, Node] = dict(cluster.nodes)
        self.replicas: dict[str, Replica] = {key: cluster.replicas[key] for key in sorted(cluster.replicas)}
        self.made: dict[str, int] = dict(cluster.replicas_made)
        self.drains: dict[str, Drain] = dict(cluster.drains)
        self.brake: Brake | None = cluster.brake
        self._engines = cluster.engines
        self._notes: list[Note] = []

    def note(self, kind: str, subject: str, words: str) -> None:
        self._notes.append(Note(kind, subject, words))

    def put(self, replica: Replica) -> None:
        self.replicas[replica.id] = replica

    def put_engine(self, history: EngineHistory) -> None:
        """At once: what follows in this step goes by the catalog that is in effect then."""
        self.cluster = with_engine(self.cluster, history)

    def snapshot(self) -> Cluster:
        """The cluster as it stands in the middle of the step."""
        return replace(
            self.cluster,
            nodes=self.nodes,
            replicas=self.replicas,
            replicas_made=self.made,
            drains=self.drains,
            brake=self.brake,
        )

    def highest_generation(self, replica: Replica) -> int:
        """The highest generation of the replica that is known, or that any node still reports."""
        seen = self._generations.get(replica.id, 0)
        return max(replica.generation, seen)

    def is_known(self, replica_id: str) -> bool:
        """True where the id is in use, if only by a shard that some node still reports."""
        return replica_id in self.replicas or replica_id in self._generations

    @cached_property
    def _generations(self) -> dict[str, int]:
        generations: dict[str, int] = {}
        for node in self.nodes.values():
            for shard in node.shards:
                replica_id = shard.id.rpartition("/")[0]
                generations[replica_id] = max(generations.get(replica_id, 0), shard.generation)
        return generations

    def actions(self) -> tuple[Action, ...]:
        old = self.cluster
        changes: list[Action] = [PutNode(self.nodes[key]) for key in sorted(_changed(self.nodes, old.nodes))]
        changes += [
            CountReplica(model, made)
            for model, made in sorted(self.made.items())
            if made != old.replicas_made.get(model)
        ]
        changes += [
            PutReplica(self.replicas[key])
            for key in sorted(_changed(self.replicas, old.replicas))
            if self.replicas[key] != old.replicas.get(key)
        ]
        changes += [RemoveReplica(key) for key in sorted(old.replicas.keys() - self.replicas.keys())]
        engines = self.cluster.engines
        changes += [PutEngine(engines[key]) for key in sorted(_changed(engines, self._engines))]
        changes += [PutDrain(drain) for key, drain in sorted(self.drains.items()) if drain != old.drains.get(key)]
        changes += [RemoveDrain(key) for key in sorted(old.drains) if key not in self.drains]
        if self.brake != old.brake:
            changes.append(PutBrake(self.brake))
        return (*changes, *self._notes)


def _changed(now: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    return [key for key, value in now.items() if value is not before.get(key)]
