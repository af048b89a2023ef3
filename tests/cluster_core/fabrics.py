"""Short ways to write down nodes on fabrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmgw.cluster.model import Fabric, Hca, Node, NodeState

from .building import NOW, node

SUBNET = "fe80:0000:0000:{:04x}:0002:c903:00ef:5ed1"


def port(name: str, state: str = "ACTIVE", *, subnet: int | None = 1, **changes: Any) -> Hca:
    """An InfiniBand port; ``subnet`` of None: its GID can't be read."""
    gid = None if subnet is None else SUBNET.format(subnet)
    return replace(Hca(name=name, port=1, state=state, link_layer="InfiniBand", gid=gid), **changes)


def on(name: str, *fabrics: str, subnet: int | None = 1, hcas: tuple[Hca, ...] | None = None, **fields: Any) -> Node:
    """A node with two adapters on each fabric, at an address of its own."""
    stated = tuple(
        Fabric(name=fabric, hcas=(f"mlx5_{2 * number}", f"mlx5_{2 * number + 1}"))
        for number, fabric in enumerate(fabrics)
    )
    if hcas is None:
        hcas = tuple(port(adapter, subnet=subnet) for fabric in stated for adapter in fabric.hcas)
    at = node(name, **fields)
    assert at.inventory is not None
    address = f"10.0.0.{''.join(letter for letter in name if letter.isdigit()) or 1}"
    return replace(at, inventory=replace(at.inventory, fabrics=stated, hcas=hcas, mgmt_addr=address))


def lost(at: Node) -> Node:
    return replace(at, state=NodeState.LOST, session=None, since=NOW.wall_s, why="silent for 31 s")
