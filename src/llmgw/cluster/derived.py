"""What follows from the replicas: what each node should run, and where the gateway may send requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.lifecycle import EMPTIED, ENDED, RUNNING, is_suspect, observed
from llmgw.cluster.model import (
    Cluster,
    DesiredShard,
    Endpoint,
    Node,
    NodeState,
    Replica,
    ReplicaState,
    Route,
    ShardPeer,
    ShardState,
)
from llmgw.cluster.naming import replica_key
from llmgw.cluster.scaling import by_model, wanted


def desired(cluster: Cluster, node_id: str) -> tuple[DesiredShard, ...]:
    """All shards that the node should run now, in the order of their ids. For many nodes use ``desired_by_node``."""
    here = [
        (replica, rank)
        for replica in cluster.replicas.values()
        for rank, placement in enumerate(replica.placements)
        if placement.node == node_id
    ]
    return _desired(cluster, node_id, here)


def desired_by_node(cluster: Cluster) -> dict[str, tuple[DesiredShard, ...]]:
    """``desired`` of every node, in one pass over the replicas."""
    here: dict[str, list[tuple[Replica, int]]] = {node_id: [] for node_id in sorted(cluster.nodes)}
    for replica in cluster.replicas.values():
        for rank, placement in enumerate(replica.placements):
            if placement.node in here:
                here[placement.node].append((replica, rank))
    return {node_id: _desired(cluster, node_id, shards) for node_id, shards in here.items()}


def _desired(cluster: Cluster, node_id: str, here: list[tuple[Replica, int]]) -> tuple[DesiredShard, ...]:
    node = cluster.nodes.get(node_id)
    if node is None or node.state is NodeState.REVOKED:
        return ()
    return tuple(
        _desired_shard(cluster, replica, rank)
        for replica, rank in sorted(here, key=lambda shard: (shard[0].id, shard[1]))
        if _should_run(node, replica, rank)
    )


def _should_run(node: Node, replica: Replica, rank: int) -> bool:
    shard = observed(node, replica, rank)
    if replica.state in RUNNING:
        # What the node has not taken up yet is not asked of it before it has said which engines it has, nor any more
        # once it is to be emptied.
        return shard is not None or (node.probed and node.state not in EMPTIED)
    if not replica.lost:
        return False
    if shard is None:
        # It may have started what it was asked for without having said so yet. Told otherwise on a stream that is still
        # open, it would stop that before it is known whether it is taken up again.
        return node.state is NodeState.LOST
    # A lost node that has just come back keeps what it still runs, for the same reason.
    return shard.state not in ENDED and shard.state is not ShardState.STOPPING


def _desired_shard(cluster: Cluster, replica: Replica, rank: int) -> DesiredShard:
    assert replica.spec is not None
    assert replica.profile is not None
    together = len(replica.placements) > 1
    return DesiredShard(
        id=replica.shard_id(rank),
        generation=replica.generation,
        rank=rank,
        model=replica.model,
        aliases=replica.spec.aliases,
        task=replica.spec.task,
        source=replica.spec.source,
        profile=replica.profile,
        placement=replica.placements[rank],
        api_key=replica_key(cluster.secret, replica.id),
        fabric=replica.fabric,
        dist_init=replica.dist_init,
        peers=_peers(cluster, replica) if together else (),
        go=not together or replica.state in _TOLD_TO_START,
    )


_TOLD_TO_START = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)


def _peers(cluster: Cluster, replica: Replica) -> tuple[ShardPeer, ...]:
    nodes = [cluster.nodes.get(placement.node) for placement in replica.placements]
    return tuple(
        ShardPeer(
            node=placement.node,
            address=placement.address,
            port=placement.port,
            fabrics=tuple(fabric.name for fabric in node.inventory.fabrics) if node and node.inventory else (),
        )
        for placement, node in zip(replica.placements, nodes, strict=True)
    )


def gateway_addresses(cluster: Cluster) -> tuple[str, ...]:
    """From where gateways may send requests to engines on other machines. One that is not connected just now serves on
    by the table that it has."""
    named = {address for gateway in cluster.gateways.values() for address in gateway.addresses}
    return tuple(sorted(address for address in named if not _is_loopback(address)))


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return True  # No address at all.
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def routes(cluster: Cluster) -> tuple[Route, ...]:
    """One route per model of the catalog, and per model that still runs; by name."""
    replicas = by_model(cluster)
    specs = {spec.name: spec for spec in cluster.catalog.models}
    taken = set(specs) | {alias for spec in specs.values() for alias in spec.aliases}
    result = []
    for model in sorted(specs.keys() | replicas.keys()):
        routable = [replica for replica in replicas.get(model, ()) if _routable(cluster, replica)]
        leaving = any(replica.state is ReplicaState.DRAINING for replica in replicas.get(model, ()))
        if model in specs or routable or leaving:
            result.append(_route(cluster, model, specs.get(model), routable, replicas.get(model, ()), taken))
    return tuple(result)


def _route(
    cluster: Cluster,
    model: str,
    spec: ModelSpec | None,
    routable: list[Replica],
    replicas: Iterable[Replica],
    taken: set[str],
) -> Route:
    endpoints = tuple(_endpoint(cluster, replica) for replica in routable)
    if spec is not None:
        aliases = tuple(alias for alias in spec.aliases if all(_answers_to(replica, alias) for replica in routable))
        task = spec.task
    else:
        last = routable or [replica for replica in replicas if replica.state is ReplicaState.DRAINING]
        running = last[0].spec
        assert running is not None
        aliases, task = tuple(alias for alias in running.aliases if alias not in taken), running.task
    why = "" if endpoints else _why_none(cluster, model, replicas)
    draining = tuple(sorted(replica.id for replica in replicas if replica.state is ReplicaState.DRAINING))
    return Route(model=model, aliases=aliases, task=task, endpoints=endpoints, why_none=why, draining=draining)


def _routable(cluster: Cluster, replica: Replica) -> bool:
    if replica.state is not ReplicaState.READY or replica.endpoint is None:
        return False
    return not unheard(cluster, replica)


def unconfirmed(cluster: Cluster) -> tuple[str, ...]:
    """Ids of replicas that were ready when this control plane started, and are in no table before all of their nodes
    have been heard. A first table that waits for them takes nothing from gateways that still serve by an older one."""
    return tuple(
        replica.id
        for _, replica in sorted(cluster.replicas.items())
        if replica.state is ReplicaState.READY and unheard(cluster, replica)
    )


def unheard(cluster: Cluster, replica: Replica) -> tuple[str, ...]:
    """Nodes that must be heard before a ready replica is believed to be ready still.

    One on several nodes is not trusted to be whole because it once was: after a restart of this control plane, all of
    its nodes must have spoken first. One on a single node is sent requests meanwhile.
    """
    if len(replica.placements) == 1:
        return ()
    nodes = [(placement.node, cluster.nodes.get(placement.node)) for placement in replica.placements]
    return tuple(name for name, node in nodes if node is None or node.heard_at_s <= 0.0)


def _answers_to(replica: Replica, alias: str) -> bool:
    """An engine knows the names that it was started with, and no others."""
    return replica.spec is not None and alias in replica.spec.aliases


def _endpoint(cluster: Cluster, replica: Replica) -> Endpoint:
    nodes = [cluster.nodes.get(placement.node) for placement in replica.placements]
    return Endpoint(
        replica=replica.id,
        generation=replica.generation,
        url=f"http://{replica.endpoint}",
        api_key=replica_key(cluster.secret, replica.id),
        preferred=not any(node is None or is_suspect(node) for node in nodes),
        max_concurrency=replica.profile.max_concurrency if replica.profile is not None else None,
    )


def _why_none(cluster: Cluster, model: str, replicas: Iterable[Replica]) -> str:
    """In states and counts alone: clients need not know the nodes' names."""
    ready = ReplicaState.READY
    states = Counter("not heard again yet" if each.state is ready else each.state.value for each in replicas)
    if not states:
        return f"{model} is scaled to 0 replicas" if wanted(cluster, model) == 0 else f"{model} has no replica yet"
    return f"no replica of {model} is ready: " + ", ".join(f"{states[state]} {state}" for state in sorted(states))
