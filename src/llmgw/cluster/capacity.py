"""What is free where: GPUs, memory and ports of each node, less what is placed on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmgw.cluster.catalog import Profile
from llmgw.cluster.lifecycle import ENDED
from llmgw.cluster.model import PORT_BLOCK, Cluster, Gpu, Node, Placement, PortRange

MEMORY_RESERVE_BYTES = 512 << 20
"""Memory of every node that is never given to replicas: for the system and the agent."""


class Room:
    """What one node still has. Changes as replicas are placed; ``placed`` is what it was made from."""

    __slots__ = ("blocks", "free", "leftovers", "memory_free_bytes", "memory_total_bytes", "node", "weights")

    def __init__(self, node: Node, placed: Sequence[Placement], leftovers: Sequence[str]) -> None:
        held = {uuid for placement in placed for uuid in placement.gpu_uuids}
        self.node = node
        self.free = [gpu for gpu in usable_gpus(node) if gpu.uuid not in held]
        self.memory_total_bytes = memory_for_replicas(node)
        self.memory_free_bytes = self.memory_total_bytes - sum(placement.memory_bytes for placement in placed)
        self.blocks = [placement.port for placement in placed if placement.port]
        self.leftovers = leftovers
        """Ids of shards that the node still runs and should not: what they hold is not known here."""
        self.weights = frozenset(node.weights)

    def take(self, placement: Placement) -> None:
        self.free = [gpu for gpu in self.free if gpu.uuid not in placement.gpu_uuids]
        self.memory_free_bytes -= placement.memory_bytes
        self.blocks.append(placement.port)

    def block(self, after: int = 0) -> int | None:
        """First port of the lowest free block; with ``after``, of the next one above it, starting over at the end."""
        if self.node.inventory is None:
            return None
        lowest = None
        for first in port_blocks(self.node.inventory.ports):
            # By distance: blocks handed out before the range was changed may lie askew to it.
            if all(abs(first - taken) >= PORT_BLOCK for taken in self.blocks):
                if first > after:
                    return first
                lowest = first if lowest is None else lowest
        return lowest

    def placement(self, profile: Profile, after_port: int = 0) -> Placement:
        """What a shard of the profile gets here. Only where the profile fits."""
        gpus = choose_gpus(self.free, profile.gpus_per_node)
        port = self.block(after_port)
        assert port is not None
        return Placement(
            node=self.node.id,
            gpus=tuple(gpu.index for gpu in gpus),
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            memory_bytes=profile.memory_bytes or 0,
            port=port,
        )


class Capacity:
    """The rooms of all nodes, made once per plan."""

    def __init__(self, cluster: Cluster) -> None:
        placed: dict[str, list[Placement]] = {}
        self._per_model: dict[tuple[str, str], int] = {}
        for replica in cluster.replicas.values():
            for placement in replica.placements:
                placed.setdefault(placement.node, []).append(placement)
                self._count(replica.model, placement.node)
        self.rooms = {
            node.id: Room(node, placed.get(node.id, ()), leftovers(cluster, node))
            for _, node in sorted(cluster.nodes.items())
        }

    def replicas_on(self, model: str, node: str) -> int:
        """How many shards of the model the node holds."""
        return self._per_model.get((model, node), 0)

    def take(self, model: str, placement: Placement) -> None:
        self.rooms[placement.node].take(placement)
        self._count(model, placement.node)

    def _count(self, model: str, node: str) -> None:
        self._per_model[model, node] = self._per_model.get((model, node), 0) + 1


def leftovers(cluster: Cluster, node: Node) -> tuple[str, ...]:
    """Shards that the node reports running although they have no place there."""
    return tuple(
        shard.id
        for shard in node.shards
        if shard.state not in ENDED and not _belongs(cluster, node, shard.id, shard.generation)
    )


def _belongs(cluster: Cluster, node: Node, shard_id: str, generation: int) -> bool:
    replica_id, _, rank = shard_id.rpartition("/")
    replica = cluster.replicas.get(replica_id)
    if replica is None or replica.generation != generation or not rank.isdecimal():
        return False
    return int(rank) < len(replica.placements) and replica.placements[int(rank)].node == node.id


def usable_gpus(node: Node) -> list[Gpu]:
    return [gpu for gpu in node.inventory.gpus if gpu.problem is None] if node.inventory else []


def memory_for_replicas(node: Node) -> int:
    """Bytes of the node's memory that replicas may have, placed or not."""
    if node.vitals is not None:
        total = node.vitals.memory_bytes
    else:
        total = node.inventory.memory_bytes if node.inventory else 0
    return max(total - MEMORY_RESERVE_BYTES, 0)


def port_blocks(ports: PortRange) -> range:
    """First ports of the whole blocks inside the range."""
    return range(ports.first, ports.last - PORT_BLOCK + 2, PORT_BLOCK)


def choose_gpus(free: Iterable[Gpu], wanted: int) -> tuple[Gpu, ...]:
    """``wanted`` of the free GPUs: from the smallest NVLink group that suffices, else from as few groups as can be."""
    if wanted == 0:
        return ()
    groups: dict[int, list[Gpu]] = {}
    for gpu in sorted(free, key=lambda gpu: gpu.index):
        groups.setdefault(-1 if gpu.nvlink_group is None else gpu.nvlink_group, []).append(gpu)
    enough = [group for group in groups.values() if len(group) >= wanted]
    if enough:
        return tuple(min(enough, key=lambda group: (len(group), group[0].index))[:wanted])
    largest_first = sorted(groups.values(), key=lambda group: (-len(group), group[0].index))
    chosen = [gpu for group in largest_first for gpu in group][:wanted]
    return tuple(sorted(chosen, key=lambda gpu: gpu.index))
