"""Which shards are placed where: by node, and by model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmgw.cluster.model import Placement, Replica

Held = tuple[str, int, int, Placement]
"""A shard that is placed on a node: id of its replica, rank, generation, and what it holds there."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Made from the replicas of a cluster, and not changed after."""

    replicas: Mapping[str, Replica]
    by_node: Mapping[str, tuple[Held, ...]]
    by_model: Mapping[str, Mapping[str, int]]
    """How many shards of a model each node holds, of those that hold any."""

    _last: ClassVar[Holdings | None] = None
    """Those of the last cluster that was looked at: the next one differs little, and only that is worked out anew.
    What is found does not hang on it."""

    @staticmethod
    def of(replicas: Mapping[str, Replica]) -> Holdings:
        last = Holdings._last
        found = (_from(last, replicas) if last is not None else None) or _anew(replicas)
        # Kept, and never read back: another thread, which supposes another cluster, keeps its own there.
        Holdings._last = found
        return found

    @staticmethod
    def forget(known: Holdings | None = None) -> None:
        """Begin anew, or from what is given: for measuring and for tests."""
        Holdings._last = known


def _anew(replicas: Mapping[str, Replica]) -> Holdings:
    by_node: dict[str, list[Held]] = {}
    by_model: dict[str, dict[str, int]] = {}
    for replica in replicas.values():
        counts = by_model.setdefault(replica.model, {}) if replica.placements else {}
        for rank, placement in enumerate(replica.placements):
            by_node.setdefault(placement.node, []).append((replica.id, rank, replica.generation, placement))
            counts[placement.node] = counts.get(placement.node, 0) + 1
    return Holdings(dict(replicas), {node_id: tuple(held) for node_id, held in by_node.items()}, by_model)


def _from(last: Holdings, replicas: Mapping[str, Replica]) -> Holdings | None:
    """What it says of other replicas, from what it says of the last; None where too much of that has changed."""
    known = last.replicas
    differing = [key for key, replica in replicas.items() if known.get(key) is not replica]
    differing += [key for key in known if key not in replicas]
    differing = [key for key in differing if not _alike(known.get(key), replicas.get(key))]
    if 8 * len(differing) > len(known):
        return None
    before = [known[key] for key in differing if key in known]
    after = [replicas[key] for key in differing if key in replicas]
    changed = set(differing)
    by_node = dict(last.by_node)
    for node_id in {placement.node for replica in (*before, *after) for placement in replica.placements}:
        kept = [held for held in by_node.get(node_id, ()) if held[0] not in changed]
        by_node[node_id] = (*kept, *_on(node_id, after))
    by_model: dict[str, Mapping[str, int]] = dict(last.by_model)
    for model in {replica.model for replica in (*before, *after)}:
        counts = dict(by_model.get(model, {}))
        for replicas_then, by in ((before, -1), (after, 1)):
            for replica in replicas_then:
                for placement in replica.placements if replica.model == model else ():
                    counts[placement.node] = counts.get(placement.node, 0) + by
        by_model[model] = {node_id: count for node_id, count in counts.items() if count}
    return Holdings(dict(replicas), by_node, by_model)


def _alike(before: Replica | None, after: Replica | None) -> bool:
    """True where both hold the same in the same generation, or nothing."""
    if before is None or after is None:
        either = before or after
        return either is None or not either.placements
    if before.placements is not after.placements and before.placements != after.placements:
        return False
    return not after.placements or (before.generation == after.generation and before.model == after.model)


def _on(node_id: str, replicas: Iterable[Replica]) -> list[Held]:
    return [
        (replica.id, rank, replica.generation, placement)
        for replica in replicas
        for rank, placement in enumerate(replica.placements)
        if placement.node == node_id
    ]
