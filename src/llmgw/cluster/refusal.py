"""Why something can't be placed: for every node, for every profile, and for the whole, in words that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
    FABRIC = "fabric"
    WEIGHTS = "weights"
    LEFTOVER = "leftover"
    GPUS = "gpus"
    MEMORY = "memory"
    PORTS = "ports"
    ALONE = "alone"
    """It could take a rank, but too few others that it can be joined with could."""


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
    Rule.FABRIC: "on no usable fabric",
    Rule.WEIGHTS: "without the weights",
    Rule.LEFTOVER: "still stopping an old shard",
    Rule.GPUS: "short of GPUs",
    Rule.MEMORY: "short of memory",
    Rule.PORTS: "without a free block of ports",
    Rule.ALONE: "that could take a rank, but too few together",
}


class Verdict(NamedTuple):
    """Which rule a node fails, and by how much, before it is put in words."""

    node: str
    rule: Rule
    short: int = 0


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
class FabricRefusal:
    """Why a replica over several nodes finds no place on one fabric; or which nodes are on none (NO_FABRIC)."""

    fabric: str
    summary: str
    nodes: tuple[NodeRefusal, ...] = ()
    """Every node that states the fabric, in the order of their ids."""
    able: int = 0
    """Nodes that could take a rank now."""
    needed: int = 0


NO_FABRIC = "(none)"


@dataclass(frozen=True, slots=True)
class ProfileRefusal:
    profile: str
    summary: str
    nodes: tuple[NodeRefusal, ...] = ()
    """Every node, in the order of their ids; empty where the profile can't be placed on any whatever they have."""
    fabrics: tuple[FabricRefusal, ...] = ()
    """Of a profile over several nodes: every fabric, by name, and the nodes that are on none. ``nodes`` is empty."""


@dataclass(frozen=True, slots=True)
class Refusal:
    model: str
    summary: str
    profiles: tuple[ProfileRefusal, ...]


def of_model(model: str, profiles: Sequence[ProfileRefusal]) -> Refusal:
    summaries = [(refused.profile, refused.summary) for refused in profiles]
    return Refusal(model, summary_of_model(summaries), tuple(profiles))


def summary_of_model(profiles: Sequence[tuple[str, str]]) -> str:
    """One line from the names of a model's profiles and what is said of each."""
    if len(profiles) == 1:
        return profiles[0][1]
    return "; ".join(f"profile {name}: {words}" for name, words in profiles) or "the model has no profile"


def summary_of_nodes(verdicts: Sequence[Verdict], in_words: Callable[[Verdict], str]) -> str:
    """One line whose counts add up, with the node that came nearest and what it is short of."""
    if not verdicts:
        return "no node is registered"
    best = nearest(verdicts)
    if len(verdicts) == 1:
        return f"{best.node}: {in_words(best)}"
    groups = Counter(verdict.rule for verdict in verdicts)
    counts = ", ".join(f"{groups[rule]} {_GROUP[rule]}" for rule in sorted(groups, key=_ORDER.__getitem__))
    return f"{count(len(verdicts), 'node')}: {counts}; nearest {best.node}: {in_words(best)}"


def nearest(verdicts: Sequence[Verdict]) -> Verdict:
    """The node that passed most rules, and of those the one that is short of least."""
    return min(verdicts, key=closeness)


def rank(rule: Rule) -> int:
    """The place of a rule in the order in which they are measured."""
    return _ORDER[rule]


def closeness(verdict: Verdict) -> tuple[int, int, str]:
    """Smaller is nearer to a fit."""
    return -_ORDER[verdict.rule], verdict.short, verdict.node
