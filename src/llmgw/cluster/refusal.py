"""Why something can't be placed: for every node, for every profile, and for the whole, in words that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llmgw.cluster.wording import count


class Rule(StrEnum):
    """What a node is measured against, in the order in which it is: a refusal names the first that it fails."""

    REVOKED = "revoked"
    LOST = "lost"
    SUSPECT = "suspect"
    DRAINING = "draining"
    OFFLINE = "offline"
    UNKNOWN = "unknown"
    UNPROBED = "unprobed"
    LABELS = "labels"
    ENGINE = "engine"
    WEIGHTS = "weights"
    LEFTOVER = "leftover"
    GPUS = "gpus"
    MEMORY = "memory"
    PORTS = "ports"


_ORDER = {rule: place for place, rule in enumerate(Rule)}
_GROUP = {
    Rule.REVOKED: "revoked",
    Rule.LOST: "lost",
    Rule.SUSPECT: "suspect",
    Rule.DRAINING: "draining",
    Rule.OFFLINE: "not connected",
    Rule.UNKNOWN: "not yet described",
    Rule.UNPROBED: "not yet probed for engines",
    Rule.LABELS: "with other labels",
    Rule.ENGINE: "without a usable engine",
    Rule.WEIGHTS: "without the weights",
    Rule.LEFTOVER: "still stopping an old shard",
    Rule.GPUS: "short of GPUs",
    Rule.MEMORY: "short of memory",
    Rule.PORTS: "without a free block of ports",
}


@dataclass(frozen=True, slots=True)
class NodeRefusal:
    """Why one node can't take a shard of the profile."""

    node: str
    words: str
    rule: Rule
    short: int = 0
    """By how much, in the unit of the rule: GPUs, or bytes of memory."""

    def __str__(self) -> str:
        return f"{self.node}: {self.words}"


@dataclass(frozen=True, slots=True)
class ProfileRefusal:
    profile: str
    summary: str
    nodes: tuple[NodeRefusal, ...] = ()
    """Every node, in the order of their ids; empty where the profile can't be placed on any whatever they have."""


@dataclass(frozen=True, slots=True)
class Refusal:
    model: str
    summary: str
    profiles: tuple[ProfileRefusal, ...]


def of_model(model: str, profiles: Sequence[ProfileRefusal]) -> Refusal:
    if len(profiles) == 1:
        return Refusal(model, profiles[0].summary, tuple(profiles))
    summary = "; ".join(f"profile {refused.profile}: {refused.summary}" for refused in profiles)
    return Refusal(model, summary or "the model has no profile", tuple(profiles))


def of_nodes(profile: str, nodes: Sequence[NodeRefusal]) -> ProfileRefusal:
    return ProfileRefusal(profile, _summary(nodes), tuple(nodes))


def _summary(nodes: Sequence[NodeRefusal]) -> str:
    """One line whose counts add up, with the node that came nearest and what it is short of."""
    if not nodes:
        return "no node is registered"
    if len(nodes) == 1:
        return str(nodes[0])
    groups = Counter(refused.rule for refused in nodes)
    counts = ", ".join(f"{groups[rule]} {_GROUP[rule]}" for rule in sorted(groups, key=_ORDER.__getitem__))
    return f"{count(len(nodes), 'node')}: {counts}; nearest {nearest(nodes)}"


def nearest(nodes: Sequence[NodeRefusal]) -> NodeRefusal:
    """The node that passed most rules, and of those the one that is short of least."""
    return min(nodes, key=lambda refused: (-_ORDER[refused.rule], refused.short, refused.node))
