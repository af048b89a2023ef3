"""What changed in the cluster since it was last looked at, so that what is sent out costs no more than that.

Values of the cluster are frozen: identity tells whether one can have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmgw.cluster.model import Cluster, Node, Replica


@dataclass(frozen=True, slots=True)
class Changed:
    models: frozenset[str] = field(default_factory=frozenset)
    """Those of replicas that are new, gone or another value, or that have a rank on a node that changed."""
    nodes: frozenset[str] = field(default_factory=frozenset)
    """Those that changed, and those that have, or had, a rank of a replica that changed or that such a node is in."""


class Watch:
    """Also knows which replicas each node is in (``here``)."""

    def __init__(self) -> None:
        self.here: dict[str, set[str]] = {}
        self._nodes: Mapping[str, Node] = {}
        self._replicas: Mapping[str, Replica] = {}

    def look(self, cluster: Cluster) -> Changed:
        models: set[str] = set()
        nodes: set[str] = set()
        if cluster.replicas is not self._replicas:
            for replica_id in _differing(self._replicas, cluster.replicas):
                old, new = self._replicas.get(replica_id), cluster.replicas.get(replica_id)
                models |= {replica.model for replica in (old, new) if replica is not None}
                nodes |= self._move(replica_id, _nodes_of(old), _nodes_of(new))
            self._replicas = cluster.replicas
        if cluster.nodes is not self._nodes:
            for node_id in _differing(self._nodes, cluster.nodes):
                if _is_alike(self._nodes.get(node_id), cluster.nodes.get(node_id)):
                    continue
                nodes.add(node_id)
                for replica_id in self.here.get(node_id, ()):
                    replica = cluster.replicas[replica_id]
                    models.add(replica.model)
                    nodes |= _nodes_of(replica)
            self._nodes = cluster.nodes
        return Changed(frozenset(models), frozenset(nodes))

    def _move(self, replica_id: str, before: set[str], after: set[str]) -> set[str]:
        for node_id in before - after:
            self.here[node_id].discard(replica_id)
            if not self.here[node_id]:
                del self.here[node_id]
        for node_id in after - before:
            self.here.setdefault(node_id, set()).add(replica_id)
        return before | after


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    changed = [key for key, value in new.items() if value is not old.get(key)]
    return changed + [key for key in old if key not in new]


def _nodes_of(replica: Replica | None) -> set[str]:
    return {placement.node for placement in replica.placements} if replica is not None else set()


def _is_alike(old: Node | None, new: Node | None) -> bool:
    """Heartbeats make every node a new value; what is sent out depends on no more of it than this."""
    if old is None or new is None:
        return old is new
    return (
        old.state is new.state
        and old.session == new.session
        and old.silent is new.silent
        and (old.heard_at_s > 0.0) is (new.heard_at_s > 0.0)
        and old.probed is new.probed
        and old.shards is new.shards
        and old.inventory is new.inventory
    )
