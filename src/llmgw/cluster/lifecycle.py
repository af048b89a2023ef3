"""States of nodes, replicas and shards: which changes are allowed, and what each change leaves in the story."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmgw.cluster.model import (
    Cluster,
    Instant,
    Node,
    NodeState,
    ObservedShard,
    Replica,
    ReplicaState,
    ShardState,
    StoryLine,
)

STORY_LINES = 200
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
FORGIVEN_AFTER_S = 600.0
"""Ready for this long, a replica's failures in a row are forgotten."""

_R = ReplicaState
REPLICA_CHANGES: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _R.UNPLACED: frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.STOPPING}),
    _R.PLACING: frozenset({_R.PREPARING, _R.STARTING, _R.READY, _R.STOPPING, _R.FAILED}),
    _R.PREPARING: frozenset({_R.PLACING, _R.STARTING, _R.READY, _R.STOPPING, _R.FAILED}),
    _R.STARTING: frozenset({_R.PLACING, _R.PREPARING, _R.READY, _R.STOPPING, _R.FAILED}),
    _R.READY: frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.DRAINING, _R.STOPPING, _R.FAILED}),
    _R.DRAINING: frozenset({_R.READY, _R.STOPPING, _R.FAILED}),
    _R.STOPPING: frozenset(),
    _R.FAILED: frozenset({_R.UNPLACED, _R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.STOPPING}),
}
"""From UNPLACED or FAILED straight to a running state: its lost node came back with the generation still running."""

_S = ShardState
SHARD_CHANGES: Mapping[ShardState, frozenset[ShardState]] = {
    _S.WANTED: frozenset({_S.PREPARING, _S.STARTING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.PREPARING: frozenset({_S.WANTED, _S.STARTING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.STARTING: frozenset({_S.LOADING, _S.READY, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.LOADING: frozenset({_S.STARTING, _S.READY, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.READY: frozenset({_S.STARTING, _S.LOADING, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.FAILED}),
    _S.STOPPED: frozenset(),
    _S.FAILED: frozenset({_S.STOPPING, _S.STOPPED}),
}
"""Within one generation: what ended never runs again."""

_N = NodeState
NODE_CHANGES: Mapping[NodeState, frozenset[NodeState]] = {
    _N.JOINING: frozenset({_N.READY, _N.SUSPECT, _N.LOST, _N.REVOKED}),
    _N.READY: frozenset({_N.JOINING, _N.SUSPECT, _N.LOST, _N.DRAINING, _N.REVOKED}),
    _N.SUSPECT: frozenset({_N.JOINING, _N.READY, _N.LOST, _N.DRAINING, _N.REVOKED}),
    _N.LOST: frozenset({_N.JOINING, _N.READY, _N.REVOKED}),
    _N.DRAINING: frozenset({_N.READY, _N.DRAINED, _N.LOST, _N.REVOKED}),
    _N.DRAINED: frozenset({_N.READY, _N.LOST, _N.REVOKED}),
    _N.REVOKED: frozenset(),
}

RUNNING = frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.DRAINING})
"""States in which a replica's generation is meant to run."""
ENDED = frozenset({_S.STOPPED, _S.FAILED})
AWAY = frozenset({_N.LOST, _N.REVOKED})
"""Nodes on which nothing is counted as running any more."""


def moved(replica: Replica, state: ReplicaState, why: str, now: Instant) -> Replica:
    """The replica in another state, with the line that the change adds to its story."""
    assert state in REPLICA_CHANGES[replica.state], f"{replica.id} can't go from {replica.state} to {state}"
    line = StoryLine(now.wall_s, replica.generation, state.value, why)
    return replace(replica, state=state, since=now.wall_s, why=why, story=(*replica.story[-(STORY_LINES - 1) :], line))


def told(replica: Replica, why: str, now: Instant) -> Replica:
    """The replica in the same state, with a line in its story about something that happened."""
    line = StoryLine(now.wall_s, replica.generation, replica.state.value, why)
    return replace(replica, why=why, story=(*replica.story[-(STORY_LINES - 1) :], line))


def backoff_s(failures: int) -> float:
    """Seconds to wait after the ``failures``-th failure in a row: 1, 2, 4 ... 60."""
    doublings = min(max(failures - 1, 0), 16)
    return min(BACKOFF_FIRST_S * 2.0**doublings, BACKOFF_MAX_S)


def suspect_at_s(cluster: Cluster, node: Node) -> float:
    """Monotonic time from which the node's silence makes it suspect."""
    return node.heard_at_s + cluster.suspect_after_s


def lost_at_s(cluster: Cluster, node: Node) -> float:
    """Monotonic time from which the node's silence makes it lost; never inside a grace period."""
    return max(node.heard_at_s + cluster.lost_after_s, cluster.grace_until_s)


def judged(cluster: Cluster, node: Node, now: Instant) -> Node:
    """The node in the state that its silence, its session and what it has reported put it in now."""
    state, why = _verdict(cluster, node, now)
    if state is node.state:
        return node
    assert state in NODE_CHANGES[node.state], f"{node.id} can't go from {node.state} to {state}"
    return replace(node, state=state, since=now.wall_s, why=why)


def _verdict(cluster: Cluster, node: Node, now: Instant) -> tuple[NodeState, str]:
    if node.state is NodeState.REVOKED:
        return node.state, node.why
    if node.session is not None and now.monotonic_s < suspect_at_s(cluster, node):
        return _of_a_live_node(node)
    if node.state is NodeState.LOST:
        return node.state, node.why
    if now.monotonic_s >= lost_at_s(cluster, node):
        return NodeState.LOST, _silence(node, now)
    if node.state in (NodeState.DRAINING, NodeState.DRAINED):
        return node.state, node.why
    if node.heard_at_s <= 0.0:
        # This control plane has just started: it knows nothing against the node yet.
        return node.state, node.why
    return NodeState.SUSPECT, "its stream is closed" if node.session is None else _silence(node, now)


def _of_a_live_node(node: Node) -> tuple[NodeState, str]:
    if node.state in (NodeState.DRAINING, NodeState.DRAINED):
        return node.state, node.why
    if node.state is NodeState.LOST and not node.caught_up:
        # Heard again on the stream it had. What was asked of it before it was given up may be starting unreported.
        return node.state, node.why
    if node.probed:
        return NodeState.READY, "connected, and has said which engines it has"
    return NodeState.JOINING, "has not said yet which engines it has"


def _silence(node: Node, now: Instant) -> str:
    if node.heard_at_s <= 0.0:
        return "not heard from since this control plane started"
    return f"silent for {max(now.monotonic_s - node.heard_at_s, 0.0):.0f} s"


def away(node: Node | None) -> bool:
    """True where what the node ran no longer counts: it is lost, revoked, or not known at all."""
    return node is None or node.state in AWAY


def observed(node: Node, replica: Replica, rank: int) -> ObservedShard | None:
    """The shard of the replica's current generation as the node reports it; None where it reports none."""
    shard = node.shard(replica.shard_id(rank))
    return shard if shard is not None and shard.generation == replica.generation else None


def gone(nodes: Mapping[str, Node], replica: Replica, rank: int) -> bool:
    """True once nothing of that rank can be running any more, whatever its generation."""
    node = nodes.get(replica.placements[rank].node)
    if node is None or away(node):
        return True
    if node.session is None:
        return False
    shard = node.shard(replica.shard_id(rank))
    if shard is None:
        return node.caught_up
    return shard.state is ShardState.STOPPED


def all_gone(nodes: Mapping[str, Node], replica: Replica) -> bool:
    """True once the replica's last generation has ended as a whole."""
    return all(gone(nodes, replica, rank) for rank in range(len(replica.placements)))
