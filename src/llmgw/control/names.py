"""Things by the name that somebody typed. One that is not known is answered with those that are."""

from __future__ import annotations

from llmgw.cluster.model import Cluster, Node
from llmgw.control.errors import not_found


def model_named(cluster: Cluster, name: str) -> str:
    """The model's own name, by it or an alias. Raises ApiError."""
    for spec in cluster.catalog.models:
        if name == spec.name or name in spec.aliases:
            return spec.name
    raise not_found("model", name, [spec.name for spec in cluster.catalog.models])


def running_model_named(cluster: Cluster, name: str) -> str:
    """The same, also for one that has left the catalog and still runs."""
    if any(replica.model == name for replica in cluster.replicas.values()):
        return name
    return model_named(cluster, name)


def node_named(cluster: Cluster, name: str) -> Node:
    """Raises ApiError."""
    if (node := cluster.nodes.get(name)) is None:
        raise not_found("node", name, list(cluster.nodes))
    return node
