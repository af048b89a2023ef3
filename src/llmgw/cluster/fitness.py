"""The rules that a node must pass to take a shard, one by one, and what each says where it is not passed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from llmgw.cluster.capacity import Room, memory_for_replicas, port_blocks, usable_gpus
from llmgw.cluster.catalog import EngineName, ModelSpec, Profile
from llmgw.cluster.model import PORT_BLOCK, Drain, EngineOnNode, EngineState, Inventory, Node, NodeState
from llmgw.cluster.refusal import Rule
from llmgw.cluster.topology import seats
from llmgw.cluster.wording import clock, count, size

FETCHABLE = ("file://", "/", "index:")
"""What a source starts with that this build's agents can fetch or find."""
FETCHABLE_WORDS = "file:///PATH, an absolute path, or index:NAME==VERSION/FILE"

_STATES = {
    NodeState.REVOKED: Rule.REVOKED,
    NodeState.LOST: Rule.LOST,
    NodeState.SUSPECT: Rule.SUSPECT,
    NodeState.DRAINING: Rule.DRAINING,
    NodeState.DRAINED: Rule.DRAINING,
}


def source_needed(spec: ModelSpec, profile: Profile) -> str | None:
    """The source whose weights a shard of the profile loads; None where it loads none."""
    return None if profile.engine == "sim" else spec.source


def must_hold_weights(spec: ModelSpec, profile: Profile) -> bool:
    """True where the weights can't be fetched by this build, so that only a node that has them will do."""
    source = source_needed(spec, profile)
    return source is not None and not source.startswith(FETCHABLE)


def impossible(profile: Profile) -> str | None:
    """Why no node at all could run the profile, whatever it had; None where one might."""
    if profile.nodes < 1:
        return f"asks for {profile.nodes} nodes: a replica runs on 1 or more"
    if profile.gpus_per_node < 0 or (profile.memory_bytes or 0) < 0:
        return "asks for less than nothing: gpus_per_node and memory must be 0 or more"
    return None


def held_by_none(source: str) -> str:
    """Why a source that must be held can't be used, where no node holds it."""
    return f"{source} is held by no node, and can't be fetched by this build yet; it takes {FETCHABLE_WORDS}"


@dataclass(frozen=True, slots=True)
class Needs:
    """What every rank of a profile asks of its node. Models that ask for the same are measured once."""

    engine: EngineName
    version: str
    """Of the engine; empty: whichever the node has."""
    selector: tuple[tuple[str, str], ...]
    nodes: int
    gpus: int
    together: int
    """GPUs of a tensor-parallel group: rather joined by NVLink."""
    memory_bytes: int
    held: str | None
    """A source that the node must hold already, since it can't be fetched."""
    mode: str | None
    """How the ranks are launched, where the profile says so and there are several."""


def needs(spec: ModelSpec, profile: Profile) -> Needs:
    return Needs(
        engine=profile.engine,
        version=profile.engine_version,
        selector=tuple(sorted(profile.node_selector.items())),
        nodes=profile.nodes,
        gpus=profile.gpus_per_node,
        together=profile.tensor_parallel,
        memory_bytes=profile.memory_bytes or 0,
        held=spec.source if must_hold_weights(spec, profile) else None,
        mode=profile.launch_mode if profile.nodes > 1 else None,
    )


def basic_rule(node: Node, needs: Needs, drains: Container[str]) -> Rule | None:
    """The first failed of the rules that placing something does not change, but for the fabric's."""
    if node.state is not NodeState.READY and node.state in _STATES:
        return _STATES[node.state]
    if node.id in drains:
        return Rule.DRAINING
    if node.session is None:
        return Rule.OFFLINE
    if node.inventory is None:
        return Rule.UNKNOWN
    if not node.probed or node.state is NodeState.JOINING:
        return Rule.UNPROBED
    if needs.selector and not _matches(node.inventory, needs):
        return Rule.LABELS
    name, version = needs.engine, needs.version
    for engine in node.engines:
        there = engine.name == name and engine.state is EngineState.INSTALLED
        if there and (not version or engine.version == version or engine.named):
            return None
    return Rule.ENGINE


def _matches(inventory: Inventory, needs: Needs) -> bool:
    labels = inventory.labels
    return all([labels.get(key) == value for key, value in needs.selector])  # noqa: C419 - a list is quicker here


def fits(room: Room, needs: Needs) -> bool:
    """True where ``failed_rule`` finds none. Asked of every node over and over: the rule that most fail comes first."""
    return (
        len(room.free) >= needs.gpus
        and room.memory_free_bytes >= needs.memory_bytes
        and (needs.held is None or needs.held in room.weights)
        and not room.leftovers
        and room.block() is not None
    )


def failed_rule(room: Room, needs: Needs) -> Rule | None:
    """The first failed of the other rules; None where there is room for a shard now."""
    if needs.held is not None and needs.held not in room.weights:
        return Rule.WEIGHTS
    if room.leftovers:
        return Rule.LEFTOVER
    if len(room.free) < needs.gpus:
        return Rule.GPUS
    if room.memory_free_bytes < needs.memory_bytes:
        return Rule.MEMORY
    return Rule.PORTS if room.block() is None else None


def short_by(room: Room, needs: Needs, rule: Rule) -> int:
    """By how much the rule is failed, in its unit: GPUs, or bytes of memory; 0 for the other rules."""
    if rule is Rule.GPUS:
        return needs.gpus - len(room.free)
    return needs.memory_bytes - room.memory_free_bytes if rule is Rule.MEMORY else 0


def capable(node: Node, spec: ModelSpec, profile: Profile) -> bool:
    """True where the node could take a rank of the profile if it were empty and connected: by what it is."""
    inventory, asked = node.inventory, needs(spec, profile)
    if inventory is None or not node.probed or impossible(profile) is not None:
        return False
    if asked.held is not None and asked.held not in node.weights:
        return False
    if asked.nodes > 1 and all(seat.problem is not None for seat in seats(inventory)):
        return False
    engine = node.engine(profile.engine, profile.engine_version)
    return (
        engine is not None
        and engine.usable
        and _matches(inventory, asked)
        and len(usable_gpus(node)) >= asked.gpus
        and memory_for_replicas(node) >= asked.memory_bytes
        and len(port_blocks(inventory.ports)) > 0
    )


def launch_mode(node: Node, needs: Needs) -> str:
    """How the engine's ranks are launched there: as the profile says, else as the node's file does; "" if neither."""
    return needs.mode or (node.inventory.launch_modes.get(needs.engine, "") if node.inventory is not None else "")


def in_words(node: Node, room: Room, needs: Needs, rule: Rule, drain: Drain | None = None) -> str:
    """The failed rule in words. Those of a fabric are said where the fabric is known."""
    match rule:
        case Rule.DRAINING if node.state not in _STATES and drain is not None:
            return f"draining since {clock(drain.since)}" + (f": {drain.why}" if drain.why else "")
        case Rule.REVOKED | Rule.LOST | Rule.SUSPECT | Rule.DRAINING:
            return f"{node.state.value} since {clock(node.since)}" + (f": {node.why}" if node.why else "")
        case Rule.OFFLINE:
            return "not connected: its agent has not come back yet"
        case Rule.UNKNOWN:
            return "has not said yet what machine it is"
        case Rule.UNPROBED:
            return "has not said yet which engines it has"
        case Rule.LABELS:
            return _labels(node.inventory.labels if node.inventory else {}, needs.selector)
        case Rule.ENGINE:
            return _engine(node, needs.engine, needs.version)
        case Rule.WEIGHTS:
            return f"does not hold {needs.held}, which this build can't fetch yet"
        case Rule.LEFTOVER:
            left = ", ".join(room.leftovers)
            return f"still runs {left}, which has no place there any more: waits until it has ended"
        case Rule.GPUS:
            return _gpus(room, needs.gpus)
        case Rule.MEMORY:
            return _memory(room, needs.memory_bytes)
        case Rule.PORTS:
            return _ports(room)
        case _:
            return rule.value


def _labels(labels: Mapping[str, str], selector: Iterable[tuple[str, str]]) -> str:
    faults = []
    for key, value in selector:
        if key not in labels:
            faults.append(f"has no label {key} ({value} is needed)")
        elif labels[key] != value:
            faults.append(f"label {key} is {labels[key]}, not {value}")
    return ", ".join(faults)


def _engine(node: Node, name: str, version: str) -> str:
    engine = node.engine(name, version)
    if engine is None:
        others = sorted(engine.version for engine in node.engines if engine.usable and engine.name == name)
        if others:
            return f"has {name} {', '.join(others)}, and {version} is asked for"
        others = sorted({engine.name for engine in node.engines if engine.usable})
        asked = f"{name} {version}".strip()
        return f"has no {asked}" + (f" (it has {', '.join(others)})" if others else "")
    return _unusable(engine)


def _unusable(engine: EngineOnNode) -> str:
    words = engine.words or engine.state.value
    which = f"{engine.name} {engine.version}".strip()
    if engine.state is EngineState.FAILED:
        return f"{which} can't be used: {words}"
    if engine.state is EngineState.WAITING:
        return f"{which} is not installed yet: {words}"
    return f"installing: {words}" if engine.words else f"installing: {which} ({words})"


def _gpus(room: Room, needed: int) -> str:
    inventory = room.inventory
    gpus = inventory.gpus if inventory else ()
    if not gpus:
        return f"no GPUs, {needed} needed"
    broken = [f"GPU {gpu.index}: {gpu.problem}" for gpu in gpus if gpu.problem is not None]
    words = f"{len(room.free)} of {count(len(gpus), 'GPU')} free, {needed} needed"
    return words + (f" ({'; '.join(broken)})" if broken else "")


def _memory(room: Room, needed_bytes: int) -> str:
    free_bytes = max(room.memory_free_bytes, 0)
    placed_bytes = room.memory_total_bytes - room.memory_free_bytes
    less = f" of the {size(room.memory_total_bytes)} that replicas may have" if placed_bytes else ""
    return f"{size(free_bytes)} of memory free{less}, {size(needed_bytes, up=True)} needed"


def _ports(room: Room) -> str:
    if room.inventory is None:
        return "has no ports"
    ports = room.inventory.ports
    blocks = len(port_blocks(ports))
    if not blocks:
        return f"its ports {ports} are fewer than the {PORT_BLOCK} that a shard needs"
    return f"no free block of {PORT_BLOCK} ports: all {blocks} in {ports} are taken"
