"""A replica over several nodes of this machine: each node an address of the loopback network, all on one fabric."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmgw.cluster.model import DesiredShard, Fabric, Hca, Inventory, ShardPeer
from tests.agent.node import INVENTORY, Node, free_port, opened, sim

FABRIC = "ib-a"


def host_of(rank: int) -> str:
    return f"127.0.0.{rank + 1}"


def inventory_of(rank: int, **changes: Any) -> Inventory:
    return replace(
        INVENTORY,
        hostname=f"n{rank + 1}",
        mgmt_addr=host_of(rank),
        mgmt_interface="lo",
        hcas=(Hca(name="mlx5_0", port=1, state="ACTIVE"), Hca(name="mlx5_1", port=1, state="ACTIVE")),
        fabrics=(Fabric(name=FABRIC, hcas=("mlx5_0",)),),
        **changes,
    )


def ranks(nodes: int = 2, generation: int = 1, *, go: bool = False, **options: Any) -> tuple[DesiredShard, ...]:
    """One generation of a replica over so many nodes, as the control plane asks its nodes for it."""
    port = free_port()
    dist_init = f"{host_of(0)}:{free_port()}"
    peers = tuple(ShardPeer(node=f"n{rank + 1}", address=host_of(rank), fabrics=(FABRIC,)) for rank in range(nodes))
    shards = []
    for rank in range(nodes):
        shard = sim(generation, port=port, id=f"m-abcde/{rank}", **options)
        shards.append(
            replace(
                shard,
                rank=rank,
                profile=replace(shard.profile, nodes=nodes),
                placement=replace(shard.placement, node=f"n{rank + 1}", address=host_of(rank)),
                fabric=FABRIC,
                dist_init=dist_init,
                peers=peers,
                go=go,
            )
        )
    return tuple(shards)


def gone(*shards: DesiredShard) -> tuple[DesiredShard, ...]:
    """The same, once all of them may start."""
    return tuple(replace(shard, go=True) for shard in shards)


@asynccontextmanager
async def machines(folder: Path, nodes: int = 2, **options: Any) -> AsyncIterator[tuple[Node, ...]]:
    async with AsyncExitStack() as stack:
        found = []
        for rank in range(nodes):
            own = folder / f"n{rank + 1}"
            own.mkdir(exist_ok=True)
            node = await stack.enter_async_context(opened(own, host=host_of(rank), **options))
            node.inventory = inventory_of(rank)
            found.append(node)
        yield tuple(found)
