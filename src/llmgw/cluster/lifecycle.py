"""States of nodes, replicas and shards: which changes are allowed, and what each change leaves in the story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from llmgw.cluster.step import Step
from llmgw.cluster.wording import count

STORY_LINES = 200
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
FORGIVEN_AFTER_S = 600.0
"""Ready for this long, a replica's failures in a row are forgotten."""

FAILURES_GIVEN_UP = 3
"""Failures in a row after which a replica is tried on other nodes, where there are any, and on another version of its
engine, where there is one; and after which a replacement is taken for one that never becomes ready."""

_R = ReplicaState
REPLICA_CHANGES: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    _R.UNPLACED: frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.DRAINING, _R.STOPPING}),
    _R.PLACING: frozenset({_R.PREPARING, _R.STARTING, _R.READY, _R.DRAINING, _R.STOPPING, _R.FAILED}),
    _R.PREPARING: frozenset({_R.PLACING, _R.STARTING, _R.READY, _R.DRAINING, _R.STOPPING, _R.FAILED}),
    _R.STARTING: frozenset({_R.PLACING, _R.PREPARING, _R.READY, _R.DRAINING, _R.STOPPING, _R.FAILED}),
    _R.READY: frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.DRAINING, _R.STOPPING, _R.FAILED}),
    _R.DRAINING: frozenset({_R.STOPPING}),
    _R.STOPPING: frozenset(),
    _R.FAILED: frozenset({_R.UNPLACED, _R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.DRAINING, _R.STOPPING}),
}
"""From a state before READY to DRAINING: it was ready a moment ago, and requests may be in flight there yet.
From FAILED straight to a running state: its lost nodes came back with the generation still running; to DRAINING:
they did, and others serve in its place already. From UNPLACED as well: stores of older releases have lost ones so."""

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
    _N.JOINING: frozenset({_N.READY, _N.SUSPECT, _N.LOST, _N.DRAINING, _N.REVOKED}),
    _N.READY: frozenset({_N.JOINING, _N.SUSPECT, _N.LOST, _N.DRAINING, _N.REVOKED}),
    _N.SUSPECT: frozenset({_N.JOINING, _N.READY, _N.LOST, _N.DRAINING, _N.REVOKED}),
    _N.LOST: frozenset({_N.JOINING, _N.READY, _N.DRAINING, _N.REVOKED}),
    _N.DRAINING: frozenset({_N.JOINING, _N.READY, _N.SUSPECT, _N.DRAINED, _N.LOST, _N.REVOKED}),
    _N.DRAINED: frozenset({_N.JOINING, _N.READY, _N.SUSPECT, _N.DRAINING, _N.LOST, _N.REVOKED}),
    _N.REVOKED: frozenset(),
}

RUNNING = frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.READY, _R.DRAINING})
"""States in which a replica's generation is meant to run."""
BEFORE_READY = frozenset({_R.PLACING, _R.PREPARING, _R.STARTING})
LEAVING = frozenset({_R.DRAINING, _R.STOPPING})
ENDED = frozenset({_S.STOPPED, _S.FAILED})
STARTED = frozenset({_S.STARTING, _S.LOADING, _S.READY})
AWAY = frozenset({_N.LOST, _N.REVOKED})
"""Nodes on which nothing is counted as running any more."""
EMPTIED = frozenset({_N.DRAINING, _N.DRAINED})
"""Nodes on which nothing new starts, because they are to be emptied."""


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
    """The node in the state that its silence, its session, drains, and what it has reported put it in now."""
    state, why = _verdict(cluster, node, now)
    silent = state in EMPTIED and is_silent(cluster, node, now)
    if silent is not node.silent:
        node = replace(node, silent=silent)
    return node if state is node.state else put_in(node, state, why, now)


def stays_ready(cluster: Cluster, node: Node, now: Instant) -> bool:
    """The quick answer for most nodes at most times: ``judged`` would leave it ready. Written for speed."""
    return (
        node.state is NodeState.READY
        and node.session is not None
        and node.probed
        and now.monotonic_s < node.heard_at_s + cluster.suspect_after_s
        and node.id not in cluster.drains
    )


def put_in(node: Node, state: NodeState, why: str, now: Instant) -> Node:
    """The node in another state."""
    assert state in NODE_CHANGES[node.state], f"{node.id} can't go from {node.state} to {state}"
    return replace(node, state=state, since=now.wall_s, why=why)


def is_heard(cluster: Cluster, node: Node, now: Instant) -> bool:
    """True where the node is connected, and has spoken lately."""
    return node.session is not None and now.monotonic_s < suspect_at_s(cluster, node)


def is_silent(cluster: Cluster, node: Node, now: Instant) -> bool:
    """True where the node's silence speaks against it. Of one that this control plane has not heard since it started,
    only once the grace period is over."""
    if is_heard(cluster, node, now):
        return False
    return node.state is NodeState.LOST or node.heard_at_s > 0.0 or now.monotonic_s >= lost_at_s(cluster, node)


def is_overdue(cluster: Cluster, node: Node, now: Instant) -> bool:
    """True where the node has been silent for so long that it is to be judged lost."""
    return not is_heard(cluster, node, now) and now.monotonic_s >= lost_at_s(cluster, node)


def _verdict(cluster: Cluster, node: Node, now: Instant) -> tuple[NodeState, str]:
    if node.state is NodeState.REVOKED:
        return node.state, node.why
    if is_heard(cluster, node, now):
        return _of_a_live_node(cluster, node)
    if node.state is NodeState.LOST:
        return node.state, node.why
    braked = cluster.brake is not None and not cluster.brake.released
    if is_overdue(cluster, node, now) and not braked:
        return NodeState.LOST, _silence(node, now)
    if node.id in cluster.drains:
        return _emptied(node)
    if node.heard_at_s <= 0.0 and not is_overdue(cluster, node, now):
        # This control plane has just started: it knows nothing against the node yet.
        return (NodeState.SUSPECT, _silence(node, now)) if node.state in EMPTIED else (node.state, node.why)
    return NodeState.SUSPECT, "its stream is closed" if node.session is None else _silence(node, now)


def _of_a_live_node(cluster: Cluster, node: Node) -> tuple[NodeState, str]:
    if node.state is NodeState.LOST and not node.caught_up:
        # Heard again on the stream it had. What was asked of it before it was given up may be starting unreported.
        return node.state, node.why
    if node.id in cluster.drains:
        return _emptied(node)
    if node.probed:
        return NodeState.READY, "connected, and has said which engines it has"
    return NodeState.JOINING, "has not said yet which engines it has"


def _emptied(node: Node) -> tuple[NodeState, str]:
    """A node that is to be emptied: draining until nothing is placed on it or runs there."""
    if node.state in EMPTIED:
        return node.state, node.why
    return NodeState.DRAINING, "its replicas move away, and nothing new is placed on it"


def _silence(node: Node, now: Instant) -> str:
    if node.heard_at_s <= 0.0:
        return "not heard from since this control plane started"
    return f"silent for {max(now.monotonic_s - node.heard_at_s, 0.0):.0f} s"


def away(node: Node | None) -> bool:
    """True where what the node ran no longer counts: it is lost, revoked, or not known at all."""
    return node is None or node.state in AWAY


def is_suspect(node: Node) -> bool:
    """True where what runs on the node is used only when there is nothing better."""
    return node.silent or node.state is NodeState.SUSPECT


def is_live(node: Node | None) -> bool:
    """True where the node is connected, and nothing speaks against it."""
    return node is not None and node.session is not None and not away(node) and not is_suspect(node)


def all_live(nodes: Mapping[str, Node], replica: Replica) -> bool:
    """True where every node that the replica holds a place on is connected, with nothing against it."""
    return all(is_live(nodes.get(placement.node)) for placement in replica.placements)


def is_sure(nodes: Mapping[str, Node], replica: Replica) -> bool:
    """True where it is ready, and all its nodes are there to say so."""
    return replica.state is ReplicaState.READY and all_live(nodes, replica)


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


def stands(replica: Replica) -> bool:
    """True where the replica counts as one of its model's: it does not leave, and was not lost with its nodes."""
    return not replica.lost and replica.state not in LEAVING


def has_served(replica: Replica) -> bool:
    """True where its generation is ready, or was and may have requests in flight."""
    if replica.state is ReplicaState.READY:
        return True
    ready = ReplicaState.READY.value
    return replica.state in RUNNING and any(
        line.generation == replica.generation and line.state == ready for line in reversed(replica.story)
    )


def blamed(replica: Replica) -> tuple[str, ...]:
    """Nodes that had a part in every failure of the replica, of those that count against nodes: while there are any, it
    may be a node's fault rather than its own."""
    nodes = [placement.node for placement in replica.placements or replica.previous]
    failed_on = replica.failed_on
    return tuple(node for node in nodes if failed_on.get(node, 0) * len(nodes) >= max(sum(failed_on.values()), 1))


def unforgiven(replica: Replica) -> bool:
    """True where it is ready, and failures are remembered that are forgotten once it has been so for long: its own, and
    those of others that were to take over from the same replica before it."""
    return replica.state is ReplicaState.READY and bool(replica.failures or replica.failed_on)


def failed_elsewhere(replica: Replica, nodes: Iterable[str]) -> str:
    """Why it is tried on these nodes rather than where it was, in words; empty: nothing speaks against that."""
    here = frozenset(nodes)
    elsewhere = {
        node: times for node, times in replica.failed_on.items() if times >= FAILURES_GIVEN_UP and node not in here
    }
    return f"tried there since it failed {failures_on(elsewhere)}" if elsewhere else ""


def failures_on(failed_on: Mapping[str, int]) -> str:
    """``3 times on n1, 1 time on n2``."""
    return ", ".join(f"{count(times, 'time')} on {node}" for node, times in sorted(failed_on.items()))


def start_draining(step: Step, replica: Replica, why: str) -> None:
    """Have the replica leave: one that has served lets its requests in flight finish, any other stops at once."""
    if not has_served(replica):
        stop(step, replica, why)
        return
    drain(step, replica, why)


def drain(step: Step, replica: Replica, why: str) -> None:
    """Have the replica leave the routes, and stop once no gateway sends it anything any more."""
    draining = moved(replica, ReplicaState.DRAINING, why, step.now)
    step.put(counted_down(step, replace(draining, lost=False, retry_at=None, drained_by_s=0.0)))
    words = f"{replica.id} of {replica.model} leaves the routes and finishes its requests: {why}"
    step.note("replica.draining", replica.id, words)


def counted_down(step: Step, replica: Replica) -> Replica:
    """The draining replica with the time by which its requests in flight are given up, as the limit is now: a longer
    one counts from when it began to drain, a shorter one from now. Begun anew by a control plane that has just started.
    """
    now_s, limit_s = step.now.monotonic_s, in_flight_limit_s(step, replica)
    if not replica.drained_by_s:
        return replace(replica, drained_from_s=now_s, drained_by_s=now_s + limit_s)
    by_s = max(min(replica.drained_by_s, now_s + limit_s), replica.drained_from_s + limit_s)
    return replica if by_s == replica.drained_by_s else replace(replica, drained_by_s=by_s)


def in_flight_limit_s(step: Step, replica: Replica) -> float:
    """Seconds that requests in flight may take: as a drain of one of its nodes says, else as the cluster does."""
    asked = (step.drains.get(placement.node) for placement in replica.placements)
    stated = [drain.in_flight_s for drain in asked if drain is not None and drain.in_flight_s is not None]
    return min(stated, default=step.cluster.in_flight_s)


def stop(step: Step, replica: Replica, why: str) -> None:
    """Have the replica stop as it is, whatever it is doing. It is forgotten once nothing of it can be running."""
    stopping = replace(
        moved(replica, ReplicaState.STOPPING, why, step.now),
        endpoint=None,
        retry_at=None,
        lost=False,
        drained_from_s=0.0,
        drained_by_s=0.0,
    )
    step.put(stopping)
    step.note("replica.stopping", replica.id, f"{replica.id} of {replica.model} stops: {why}")
    finish_stopping(step, stopping)


def finish_stopping(step: Step, replica: Replica) -> None:
    """Forget a stopping replica once nothing of it can be running any more."""
    if all_gone(step.nodes, replica):
        del step.replicas[replica.id]
        step.note("replica.removed", replica.id, f"{replica.id} of {replica.model} has stopped: {replica.why}")
