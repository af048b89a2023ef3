"""What reconcile decides. An action carries the whole new value, so that it can be written and replayed as it is."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.cluster.model import Brake, Drain, EngineHistory, Node, Replica


@dataclass(frozen=True, slots=True)
class PutNode:
    """The node's state changed."""

    node: Node


@dataclass(frozen=True, slots=True)
class PutReplica:
    """A replica is new, or changed."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class RemoveReplica:
    """No node runs the replica any more, and none should: it is forgotten."""

    id: str


@dataclass(frozen=True, slots=True)
class CountReplica:
    """``made`` replicas of the model have been made so far; ids are never reused."""

    model: str
    made: int


@dataclass(frozen=True, slots=True)
class Note:
    """An event for people. ``kind`` is dotted and stable, ``subject`` the id of what it is about."""

    kind: str
    subject: str
    words: str


@dataclass(frozen=True, slots=True)
class PutDrain:
    """A drain is new, or went on."""

    drain: Drain


@dataclass(frozen=True, slots=True)
class RemoveDrain:
    """The node is no longer to be emptied."""

    node: str


@dataclass(frozen=True, slots=True)
class PutBrake:
    """The brake was put on (or changed), or came off (None). Not stored: what puts it on is seen again."""

    brake: Brake | None


@dataclass(frozen=True, slots=True)
class PutEngine:
    """Another build of an engine is in effect, or one that was in effect is remembered no more."""

    history: EngineHistory


Action = PutNode | PutReplica | RemoveReplica | CountReplica | PutDrain | RemoveDrain | PutBrake | PutEngine | Note
