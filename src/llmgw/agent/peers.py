"""A rank among others, as its own node sees it: may it join them, and over which adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.cluster.model import DesiredShard, Fabric, Inventory

WHY_REFUSED = (
    "refused, since a wrong guess makes a replica that starts, passes its health checks, "
    "and hangs at its first all-reduce"
)


def refusal(shard: DesiredShard, inventory: Inventory, host: str) -> str | None:
    """Why this node may not run the rank, in words; None where it may. ``host``: the node's management address."""
    nodes, peers = shard.profile.nodes, shard.peers
    if nodes == 1:
        return None
    if len(peers) != nodes or shard.dist_init is None:
        return (
            f"rank {shard.rank} of {nodes} was told of {len(peers)} ranks and of "
            f"{shard.dist_init or 'no address'} to meet them at: this agent and its control plane do not fit together; "
            "bring both to the same version"
        )
    if peers[shard.rank].address != host:
        return (
            f"the other ranks look for rank {shard.rank} at {peers[shard.rank].address}, and this node's management "
            f"address is {host}: it has changed since the replica was placed (`mgmt_addr` in the agent's file "
            "states one)"
        )
    return _other_fabric(shard, inventory) or _without_port(shard, inventory)


def adapters(shard: DesiredShard, inventory: Inventory) -> tuple[str, ...]:
    """NAME:PORT of every port of the replica's fabric that can be used here; empty where it runs on one node."""
    fabric = _fabric(shard, inventory)
    if shard.profile.nodes == 1 or fabric is None:
        return ()
    return tuple(f"{hca.name}:{hca.port}" for hca in inventory.hcas if hca.name in fabric.hcas and hca.usable)


def _other_fabric(shard: DesiredShard, inventory: Inventory) -> str | None:
    if shard.fabric is None:
        return f"rank {shard.rank} of {shard.profile.nodes} was given no fabric that its nodes share: {WHY_REFUSED}"
    if _fabric(shard, inventory) is None:
        stated = _listed(fabric.name for fabric in inventory.fabrics)
        return f"this node has no fabric {shard.fabric} ({stated} in its agent's file): {WHY_REFUSED}"
    for rank, peer in enumerate(shard.peers):
        if shard.fabric not in peer.fabrics:
            return (
                f"rank {rank} is on {peer.node}, which has no fabric {shard.fabric} ({_listed(peer.fabrics)} there): "
                f"{WHY_REFUSED}"
            )
    return None


def _without_port(shard: DesiredShard, inventory: Inventory) -> str | None:
    fabric = _fabric(shard, inventory)
    for name in () if fabric is None else fabric.hcas:
        ports = [hca for hca in inventory.hcas if hca.name == name]
        if not any(hca.usable for hca in ports):
            found = ", ".join(f"port {hca.port} is {hca.state}" for hca in ports) or "it is not there"
            return f"{name}, which fabric {shard.fabric} names on this node, can't be used ({found})"
    return None


def _fabric(shard: DesiredShard, inventory: Inventory) -> Fabric | None:
    return next((fabric for fabric in inventory.fabrics if fabric.name == shard.fabric), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
