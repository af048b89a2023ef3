"""Folds what peers say into nodes. Pure: (node, frame, now) -> (node, what people want to know)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmgw.cluster.actions import Note
from llmgw.cluster.model import Instant, Node, NodeState
from llmgw.cluster.news import engine_news, inventory_news
from llmgw.cluster.wording import size
from llmgw.link.messages import Heartbeat, Hello, Observed


@dataclass(frozen=True, slots=True)
class Folded:
    node: Node
    notes: tuple[Note, ...] = ()
    lasting: bool = False
    """Something changed that the store must know; heartbeats never do."""


def joined(old: Node | None, hello: Hello, session: int, address: str, now: Instant) -> Folded:
    """A node at its first message of a session."""
    base = old or Node(id=hello.id, state=NodeState.JOINING, since=now.wall_s, why="registered")
    node = replace(
        base,
        session=session,
        address=address,
        agent_version=hello.version,
        heard_at_s=now.monotonic_s,
        inventory=hello.inventory or base.inventory,
        vitals=hello.vitals or base.vitals,
        probed=hello.probed,
        engines=hello.engines if hello.probed else base.engines,
        shards=hello.shards,
        weights=hello.weights,
        caught_up=True,
    )
    notes = [] if old else [Note("node.registered", node.id, f"registered from {address}, llmgw {hello.version}")]
    if old is not None and old.session is None:
        notes.append(Note("node.connected", node.id, f"connected from {address}"))
    return Folded(node, (*notes, *_news(old, node)), lasting=True)


def observed(old: Node, frame: Observed, now: Instant, *, caught_up: bool = True) -> Folded:
    """``caught_up``: the frame speaks of what the node was last asked for, not of what it was asked before."""
    node = replace(
        old,
        heard_at_s=now.monotonic_s,
        inventory=old.inventory if frame.inventory is None else frame.inventory,
        probed=old.probed if frame.probed is None else frame.probed,
        engines=old.engines if frame.engines is None else frame.engines,
        shards=old.shards if frame.shards is None else frame.shards,
        weights=old.weights if frame.weights is None else frame.weights,
        caught_up=caught_up,
    )
    lasting = _lasting(node) != _lasting(old)
    return Folded(node, _news(old, node), lasting)


def heartbeat(old: Node, frame: Heartbeat, now: Instant) -> Folded:
    vitals = frame.vitals or old.vitals
    node = replace(old, heard_at_s=now.monotonic_s, vitals=vitals)
    if vitals is None or old.vitals is None or vitals.memory_bytes == old.vitals.memory_bytes:
        return Folded(node)
    words = f"node {node.id}: memory {size(old.vitals.memory_bytes)} -> {size(vitals.memory_bytes)}"
    # Written down, though vitals are not: the node may qualify for more by it.
    return Folded(node, (Note("node.changed", node.id, words),), lasting=True)


def gone(old: Node, session: int) -> Node:
    """The session ended; a session that was taken over since is left alone."""
    return replace(old, session=None) if old.session == session else old


def _lasting(node: Node) -> tuple[object, ...]:
    settled = tuple((engine.name, engine.version, engine.state, engine.named) for engine in node.engines)
    return node.inventory, node.probed, settled, node.weights


def _news(old: Node | None, new: Node) -> tuple[Note, ...]:
    notes: list[Note] = []
    if old is not None and new.inventory is not None:
        notes += [Note("node.changed", new.id, words) for words in inventory_news(new.id, old.inventory, new.inventory)]
    before = old.engines if old is not None else ()
    notes += [Note("node.engine", new.id, words) for words in engine_news(before, new.engines)]
    return tuple(notes)
