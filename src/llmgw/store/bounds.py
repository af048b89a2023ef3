"""What is kept, and how much of it: the same in every implementation."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.model import Replica

STORY_KEPT = 200
"""Lines of a replica's story; the oldest go first."""

EVENTS_KEPT = 100_000
"""Newest events that are never pruned."""

PRUNE_EVERY = 1_000
"""Events written between two prunings: a store holds at most EVENTS_KEPT + PRUNE_EVERY."""


def with_bounded_story(replica: Replica) -> Replica:
    """The replica with the last STORY_KEPT lines of its story."""
    if len(replica.story) <= STORY_KEPT:
        return replica
    return replace(replica, story=replica.story[-STORY_KEPT:])
