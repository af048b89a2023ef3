"""What is free where: GPUs, memory and ports of each node, less what is placed on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from llmgw.cluster.catalog import Profile
from llmgw.cluster.holdings import Held, Holdings
from llmgw.cluster.lifecycle import ENDED
from llmgw.cluster.model import PORT_BLOCK, Cluster, Gpu, Inventory, Node, ObservedShard, Placement, PortRange, Replica
from llmgw.cluster.topology import Seat, choose_gpus, islands, seats

MEMORY_RESERVE_BYTES = 512 << 20
"""Memory of every node that is never given to replicas: for the system and the agent."""

_NO_BLOCK = -1


class Room:
    """What one node still has. Changes as replicas are placed and released."""

    __slots__ = (
        "_first_block",
        "_islands",
        "_seats",
        "blocks",
        "free",
        "inventory",
        "leftovers",
        "memory_free_bytes",
        "memory_total_bytes",
        "weights",
    )

    def __init__(
        self, node: Node, held: Sequence[Held], leftovers: tuple[str, ...], of_same_machine: Room | None = None
    ) -> None:
        taken: set[str] = set()
        memory_bytes, blocks = 0, []
        for _, _, _, placement in held:
            taken.update(placement.gpu_uuids)
            memory_bytes += placement.memory_bytes
            if placement.port:
                blocks.append(placement.port)
        self.inventory = node.inventory
        gpus = node.inventory.gpus if node.inventory is not None else ()
        self.free = tuple([gpu for gpu in gpus if gpu.uuid not in taken and gpu.problem is None])
        self.memory_total_bytes = memory_for_replicas(node)
        self.memory_free_bytes = self.memory_total_bytes - memory_bytes
        self.blocks = tuple(blocks)
        self.leftovers = leftovers
        """Ids of shards that the node still runs and should not: what they hold is not known here."""
        self.weights = frozenset(node.weights)
        self._seats: tuple[Seat, ...] | None = of_same_machine._seats if of_same_machine is not None else None
        self._first_block: int | None = None
        self._islands: dict[tuple[int, int], int] = {}

    def copy(self) -> Room:
        twin = object.__new__(Room)
        for name in Room.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._forget()
        return twin

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The fabrics that the node is on."""
        if self._seats is None:
            self._seats = seats(self.inventory) if self.inventory is not None else ()
        return self._seats

    def take(self, placement: Placement) -> None:
        self.free = tuple(gpu for gpu in self.free if gpu.uuid not in placement.gpu_uuids)
        self.memory_free_bytes -= placement.memory_bytes
        self.blocks = (*self.blocks, placement.port)
        self._forget()

    def give_back(self, placement: Placement) -> None:
        back = set(placement.gpu_uuids)
        gpus = self.inventory.gpus if self.inventory is not None else ()
        there = {gpu.uuid for gpu in self.free}
        self.free = tuple(gpu for gpu in gpus if gpu.uuid in there or (gpu.uuid in back and gpu.problem is None))
        self.memory_free_bytes += placement.memory_bytes
        self.blocks = tuple(block for block in self.blocks if block != placement.port)
        self._forget()

    def islands(self, wanted: int, together: int) -> int:
        """How many NVLink groups the GPUs of a shard would lie in. Only where as many are free."""
        found = self._islands.get((wanted, together))
        if found is None:
            found = self._islands[wanted, together] = islands(self.free, wanted, together)
        return found

    def block(self, after: int = 0) -> int | None:
        """First port of the lowest free block; with ``after``, of the next one above it, starting over at the end."""
        if after:
            return self._block(after)
        if self._first_block is None:
            self._first_block = self._block(0) or _NO_BLOCK
        return None if self._first_block == _NO_BLOCK else self._first_block

    def placement(self, node_id: str, profile: Profile, after_port: int = 0) -> Placement:
        """What a shard of the profile gets here. Only where the profile fits."""
        gpus = choose_gpus(self.free, profile.gpus_per_node, profile.tensor_parallel)
        port = self.block(after_port)
        assert port is not None
        assert self.inventory is not None
        return Placement(
            node=node_id,
            gpus=tuple(gpu.index for gpu in gpus),
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            memory_bytes=profile.memory_bytes or 0,
            port=port,
            address=self.inventory.mgmt_addr,
        )

    def _forget(self) -> None:
        self._first_block = None
        self._islands = {}

    def _block(self, after: int) -> int | None:
        if self.inventory is None:
            return None
        lowest = None
        for first in port_blocks(self.inventory.ports):
            # By distance: blocks handed out before the range was changed may lie askew to it.
            if all(abs(first - taken) >= PORT_BLOCK for taken in self.blocks):
                if first > after:
                    return first
                lowest = first if lowest is None else lowest
        return lowest


class _Kept(NamedTuple):
    """A room as a cluster left it, and all that it was made from."""

    inventory: Inventory | None
    memory_bytes: int
    shards: tuple[ObservedShard, ...]
    weights: tuple[str, ...]
    held: Sequence[Held]
    room: Room


class Capacity:
    """The rooms of all nodes, and where the replicas of each model are."""

    _kept: ClassVar[Mapping[str, _Kept]] = {}
    """Rooms of the last cluster that was looked at. They are made anew only where something of a node has changed, and
    copied before they are changed: what is found does not hang on what was kept."""

    def __init__(self, cluster: Cluster) -> None:
        holdings = Holdings.of(cluster.replicas)
        held, nodes, before = holdings.by_node, cluster.nodes, Capacity._kept
        kept = {node_id: _keep(before.get(node_id), nodes[node_id], held.get(node_id, ())) for node_id in sorted(nodes)}
        Capacity._kept = kept
        self.rooms = {node_id: each.room for node_id, each in kept.items()}
        self._placed = holdings.by_model
        self._spread: dict[str, dict[str, int]] = {}
        self._own: set[str] = set()
        self.changed: list[str] = []
        """Nodes whose rooms changed, one after another."""

    def spread(self, model: str) -> Mapping[str, int]:
        """How many shards of the model each node holds, of those that hold any. It follows what is placed."""
        return self._counts(model)

    def take(self, model: str, placement: Placement) -> None:
        self._room(placement.node).take(placement)
        self._count(model, placement.node, 1)

    def give_back(self, replica: Replica) -> None:
        for placement in replica.placements:
            if placement.node in self.rooms:
                self._room(placement.node).give_back(placement)
            self._count(replica.model, placement.node, -1)

    def _counts(self, model: str) -> dict[str, int]:
        if model not in self._spread:
            self._spread[model] = dict(self._placed.get(model, {}))
        return self._spread[model]

    def _room(self, node_id: str) -> Room:
        self.changed.append(node_id)
        if node_id not in self._own:
            self._own.add(node_id)
            self.rooms[node_id] = self.rooms[node_id].copy()
        return self.rooms[node_id]

    def _count(self, model: str, node_id: str, by: int) -> None:
        counts = self._counts(model)
        counts[node_id] = counts.get(node_id, 0) + by
        if not counts[node_id]:
            del counts[node_id]


def _keep(kept: _Kept | None, node: Node, held: Sequence[Held]) -> _Kept:
    memory_bytes = memory_for_replicas(node)
    if kept is None or kept.inventory is not node.inventory:
        room = Room(node, held, _leftovers(node.shards, held))
    elif (
        kept.weights is not node.weights
        or kept.memory_bytes != memory_bytes
        or (kept.held is not held and kept.held != held)
    ):
        room = Room(node, held, _leftovers(node.shards, held), kept.room)
    elif kept.shards is node.shards:
        return kept
    else:
        left = _leftovers(node.shards, held)
        room = kept.room if left == kept.room.leftovers else Room(node, held, left, kept.room)
    return _Kept(node.inventory, memory_bytes, node.shards, node.weights, held, room)


def _leftovers(shards: Sequence[ObservedShard], held: Sequence[Held]) -> tuple[str, ...]:
    """Shards that a node reports running although they have no place there."""
    if not shards:
        return ()
    expected = {f"{replica}/{rank}": generation for replica, rank, generation, _ in held}
    found = [shard for shard in shards if shard.generation != expected.get(shard.id) and shard.state not in ENDED]
    return tuple([shard.id for shard in found])


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
