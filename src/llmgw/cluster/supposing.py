"""A cluster as it would be: less nodes or fabrics, with nodes that are not there yet, or with another catalog."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from llmgw.cluster.catalog import ENGINE_NAMES, Catalog
from llmgw.cluster.engines import with_file
from llmgw.cluster.model import (
    Cluster,
    Cpu,
    EngineOnNode,
    EngineState,
    Fabric,
    Gpu,
    Hca,
    Instant,
    Inventory,
    Node,
    NodeState,
)
from llmgw.cluster.wording import count

_SUPPOSED = "supposed"
_MEMORY_BYTES = 1 << 40
"""Of a node that is added where there is none to be like."""
_ADAPTERS = ("mlx5_0", "mlx5_1")


class NotSupposable(ValueError):
    """What was asked can't be supposed of this cluster; the words name what was typed, and the nearest that exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Nodes that are not there yet, such as ``2×8@ib-a``."""

    nodes: int
    gpus_per_node: int
    fabric: str | None = None

    def __str__(self) -> str:
        words = f"{count(self.nodes, 'node')} with {count(self.gpus_per_node, 'GPU')}"
        words += " each" if self.nodes > 1 else ""
        return words + (f" on fabric {self.fabric}" if self.fabric is not None else " on no fabric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is supposed, all at once."""

    lose_nodes: tuple[str, ...] = ()
    lose_fabrics: tuple[str, ...] = ()
    """Their nodes stay, without them."""
    add: tuple[Addition, ...] = ()
    catalog: Catalog | None = None
    """In place of the catalog that is."""


def suppose(cluster: Cluster, changes: Changes, now: Instant) -> tuple[Cluster, tuple[str, ...]]:
    """The changed cluster, and the changes in words. Raises NotSupposable."""
    words = _in_words(cluster, changes)
    nodes = dict(cluster.nodes)
    for name in changes.lose_nodes:
        nodes[name] = replace(
            nodes[name], state=NodeState.LOST, session=None, since=now.wall_s, why="supposed to be lost"
        )
    for name, node in nodes.items():
        nodes[name] = _without(node, frozenset(changes.lose_fabrics))
    for addition in changes.add:
        for _ in range(addition.nodes):
            name = _free_name(nodes)
            nodes[name] = _new_node(name, addition, tuple(cluster.nodes.values()), now)
    supposed = replace(cluster, nodes=nodes)
    return (supposed if changes.catalog is None else with_file(supposed, changes.catalog, now)[0]), words


def _in_words(cluster: Cluster, changes: Changes) -> tuple[str, ...]:
    fabrics = {fabric.name for inventory in _described(cluster.nodes.values()) for fabric in inventory.fabrics}
    words = []
    for name in dict.fromkeys(changes.lose_nodes):
        _check_known("node", name, cluster.nodes)
        words.append(f"node {name} is lost")
    for name in dict.fromkeys(changes.lose_fabrics):
        _check_known("fabric", name, fabrics)
        words.append(f"fabric {name} is lost")
    words += [_addition_in_words(addition, fabrics) for addition in changes.add]
    if changes.catalog is not None:
        words.append(f"the catalog is another one, with {count(len(changes.catalog.models), 'model')}")
    if not words:
        raise NotSupposable("nothing is supposed: name nodes or fabrics to lose, nodes to add, or a file with models")
    return tuple(words)


def _addition_in_words(addition: Addition, fabrics: Iterable[str]) -> str:
    if addition.nodes < 1 or addition.gpus_per_node < 0:
        raise NotSupposable(
            f"{addition.nodes}×{addition.gpus_per_node} can't be added: 1 node or more is expected, "
            "and 0 GPUs or more on each, such as 2×8@ib-a"
        )
    words = f"{addition} {'is' if addition.nodes == 1 else 'are'} added"
    if addition.fabric is not None and addition.fabric not in fabrics:
        there = ", ".join(sorted(fabrics))
        words += f" (a new fabric: there {f'is {there}' if there else 'is none yet'})"
    return words


def _check_known(what: str, name: str, names: Iterable[str]) -> None:
    there = sorted(names)
    if name in there:
        return
    close = get_close_matches(name, there, n=1)
    if close:
        raise NotSupposable(f"no {what} is named {name}; did you mean {close[0]}?")
    raise NotSupposable(f"no {what} is named {name}; there is {', '.join(there) or 'none'}")


def _described(nodes: Iterable[Node]) -> list[Inventory]:
    return [node.inventory for node in nodes if node.inventory is not None]


def _without(node: Node, fabrics: frozenset[str]) -> Node:
    inventory = node.inventory
    if inventory is None or all(fabric.name not in fabrics for fabric in inventory.fabrics):
        return node
    stated = tuple(fabric for fabric in inventory.fabrics if fabric.name not in fabrics)
    return replace(node, inventory=replace(inventory, fabrics=stated))


def _free_name(nodes: Mapping[str, Node]) -> str:
    number = 1
    while f"new-{number}" in nodes:
        number += 1
    return f"new-{number}"


def _new_node(name: str, addition: Addition, others: Sequence[Node], now: Instant) -> Node:
    """A node as the others are: with their engines, the memory of the largest, and the labels that all of them have."""
    return Node(
        id=name,
        state=NodeState.READY,
        since=now.wall_s,
        session=1,
        heard_at_s=now.monotonic_s,
        inventory=_new_inventory(name, addition, _described(others)),
        probed=True,
        engines=_usable_engines(others),
    )


def _usable_engines(nodes: Sequence[Node]) -> tuple[EngineOnNode, ...]:
    """Every engine and version that any node has and can use; all engines where there are no nodes."""
    if not nodes:
        return tuple(
            EngineOnNode(name=name, version="", state=EngineState.INSTALLED, named=True) for name in ENGINE_NAMES
        )
    found: dict[tuple[str, str], EngineOnNode] = {}
    for node in nodes:
        for engine in node.engines:
            if engine.usable and not engine.named:
                found.setdefault((engine.name, engine.version), engine)
    named = [engine for node in nodes for engine in node.engines if engine.usable and engine.named]
    there = {name for name, _ in found}
    # What only a program of a node's own runs, a new node is supposed to have such a program for.
    own = {engine.name: engine for engine in named if engine.name not in there}
    return (*(engine for _, engine in sorted(found.items())), *(engine for _, engine in sorted(own.items())))


def _new_inventory(name: str, addition: Addition, others: Sequence[Inventory]) -> Inventory:
    largest = max(others, key=lambda inventory: inventory.memory_bytes, default=None)
    on_fabric = (each for each in others if any(fabric.name == addition.fabric for fabric in each.fabrics))
    like = next(on_fabric, largest)
    linked = any(gpu.nvlink_group is not None for inventory in others for gpu in inventory.gpus)
    fabrics, hcas = _attached(addition.fabric, like)
    common = set.intersection(*(set(inventory.labels.items()) for inventory in others)) if others else set()
    return Inventory(
        hostname=name,
        os=_SUPPOSED,
        kernel=_SUPPOSED,
        libc=_SUPPOSED,
        cpu=like.cpu if like is not None else Cpu(model=_SUPPOSED, architecture=_SUPPOSED, cores=1),
        memory_bytes=largest.memory_bytes if largest is not None else _MEMORY_BYTES,
        mgmt_addr=name,
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"{name}-{index}",
                name=_SUPPOSED,
                memory_bytes=None,
                nvlink_group=0 if linked and addition.gpus_per_node > 1 else None,
            )
            for index in range(addition.gpus_per_node)
        ),
        fabrics=fabrics,
        hcas=hcas,
        labels=dict(sorted(common)),
        launch_modes=like.launch_modes if like is not None else {},
    )


def _attached(name: str | None, like: Inventory | None) -> tuple[tuple[Fabric, ...], tuple[Hca, ...]]:
    """A place on a fabric, with as many adapters as others have; to which of its subnets is not said."""
    if name is None:
        return (), ()
    stated = like.fabrics if like is not None else ()
    adapters = next((fabric.hcas for fabric in stated if fabric.name == name), _ADAPTERS)
    hcas = tuple(Hca(name=adapter, port=1, state="ACTIVE", link_layer="InfiniBand") for adapter in adapters)
    return (Fabric(name=name, hcas=adapters),), hcas
