"""The rules that a node must pass to take a shard, one by one, and what each says where it is not passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmgw.cluster.capacity import Room, memory_for_replicas, port_blocks, usable_gpus
from llmgw.cluster.catalog import EngineName, ModelSpec, Profile
from llmgw.cluster.model import PORT_BLOCK, EngineOnNode, EngineState, Node, NodeState
from llmgw.cluster.refusal import NodeRefusal, Rule
from llmgw.cluster.wording import clock, count, size

RUNNABLE_ENGINES: tuple[EngineName, ...] = ("llamacpp", "sim")
"""Engines that this build can run."""
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


def impossible(spec: ModelSpec, profile: Profile, held_sources: frozenset[str]) -> str | None:
    """Why no node at all could run the profile, whatever it had; None where one might."""
    if profile.nodes != 1:
        return f"multi-node replicas are not placed yet (the profile asks for {profile.nodes} nodes)"
    if profile.engine not in RUNNABLE_ENGINES:
        return f"engine {profile.engine} is not run by this build yet; it runs {' and '.join(RUNNABLE_ENGINES)}"
    if profile.gpus_per_node < 0 or (profile.memory_bytes or 0) < 0:
        return "asks for less than nothing: gpus_per_node and memory must be 0 or more"
    source = source_needed(spec, profile)
    if must_hold_weights(spec, profile) and source not in held_sources:
        return f"{source} is held by no node, and can't be fetched by this build yet; it takes {FETCHABLE_WORDS}"
    return None


def basic_rules(rooms: Iterable[Room], profile: Profile) -> dict[str, Rule | None]:
    """By node, the first failed of the rules that placing something does not change."""
    return {room.node.id: _basic_rule(room.node, profile) for room in rooms}


def _basic_rule(node: Node, profile: Profile) -> Rule | None:
    rule = _STATES.get(node.state)
    if rule is not None:
        return rule
    if node.session is None:
        return Rule.OFFLINE
    if node.inventory is None:
        return Rule.UNKNOWN
    if not node.probed or node.state is NodeState.JOINING:
        return Rule.UNPROBED
    labels = node.inventory.labels
    if any(labels.get(key) != value for key, value in profile.node_selector.items()):
        return Rule.LABELS
    engine = node.engine(profile.engine)
    return None if engine is not None and engine.usable else Rule.ENGINE


def failed_rule(room: Room, spec: ModelSpec, profile: Profile) -> Rule | None:
    """The first failed of the other rules; None where the node can take a shard of the profile now."""
    if must_hold_weights(spec, profile) and spec.source not in room.weights:
        return Rule.WEIGHTS
    if room.leftovers:
        return Rule.LEFTOVER
    if len(room.free) < profile.gpus_per_node:
        return Rule.GPUS
    if room.memory_free_bytes < (profile.memory_bytes or 0):
        return Rule.MEMORY
    return Rule.PORTS if room.block() is None else None


def capable(node: Node, spec: ModelSpec, profile: Profile) -> bool:
    """True where the node could take the profile if it were empty and connected: by what it is, not by what it does."""
    inventory = node.inventory
    if inventory is None or not node.probed or impossible(spec, profile, frozenset(node.weights)) is not None:
        return False
    engine = node.engine(profile.engine)
    return (
        engine is not None
        and engine.usable
        and all(inventory.labels.get(key) == value for key, value in profile.node_selector.items())
        and len(usable_gpus(node)) >= profile.gpus_per_node
        and memory_for_replicas(node) >= (profile.memory_bytes or 0)
        and len(port_blocks(inventory.ports)) > 0
    )


def refusal(room: Room, spec: ModelSpec, profile: Profile, rule: Rule) -> NodeRefusal:
    """The failed rule in words."""
    node = room.node
    short = 0
    match rule:
        case Rule.REVOKED | Rule.LOST | Rule.SUSPECT | Rule.DRAINING:
            words = f"{node.state.value} since {clock(node.since)}" + (f": {node.why}" if node.why else "")
        case Rule.OFFLINE:
            words = "not connected: its agent has not come back yet"
        case Rule.UNKNOWN:
            words = "has not said yet what machine it is"
        case Rule.UNPROBED:
            words = "has not said yet which engines it has"
        case Rule.LABELS:
            words = _labels(node.inventory.labels if node.inventory else {}, profile.node_selector)
        case Rule.ENGINE:
            words = _engine(node, profile.engine)
        case Rule.WEIGHTS:
            words = f"does not hold {spec.source}, which this build can't fetch yet"
        case Rule.LEFTOVER:
            words = (
                f"still runs {', '.join(room.leftovers)}, which has no place there any more: waits until it has ended"
            )
        case Rule.GPUS:
            words, short = _gpus(room, profile.gpus_per_node), profile.gpus_per_node - len(room.free)
        case Rule.MEMORY:
            short = (profile.memory_bytes or 0) - room.memory_free_bytes
            words = _memory(room, profile.memory_bytes or 0)
        case Rule.PORTS:
            words = _ports(room)
    return NodeRefusal(node.id, words, rule, short)


def _labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> str:
    faults = []
    for key, value in sorted(selector.items()):
        if key not in labels:
            faults.append(f"has no label {key} ({value} is needed)")
        elif labels[key] != value:
            faults.append(f"label {key} is {labels[key]}, not {value}")
    return ", ".join(faults)


def _engine(node: Node, name: str) -> str:
    engine = node.engine(name)
    if engine is None:
        others = ", ".join(sorted(engine.name for engine in node.engines if engine.usable))
        return f"has no {name}" + (f" (it has {others})" if others else "")
    return _unusable(engine)


def _unusable(engine: EngineOnNode) -> str:
    words = engine.words or engine.state.value
    if engine.state is EngineState.FAILED:
        return f"{engine.name} can't be used: {words}"
    if engine.state is EngineState.WAITING:
        return f"{engine.name} is not installed yet: {words}"
    return f"installing: {words}" if engine.words else f"installing: {engine.name} {engine.version} ({words})"


def _gpus(room: Room, needed: int) -> str:
    inventory = room.node.inventory
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
    if room.node.inventory is None:
        return "has no ports"
    ports = room.node.inventory.ports
    blocks = len(port_blocks(ports))
    if not blocks:
        return f"its ports {ports} are fewer than the {PORT_BLOCK} that a shard needs"
    return f"no free block of {PORT_BLOCK} ports: all {blocks} in {ports} are taken"
