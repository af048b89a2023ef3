"""What nodes report, folded into the states of replicas: progress, readiness, failure, loss, and return."""

from __future__ import annotations

import re
from dataclasses import replace

from llmgw.cluster.lifecycle import (
    ENDED,
    FORGIVEN_AFTER_S,
    RUNNING,
    all_gone,
    away,
    backoff_s,
    moved,
    observed,
    told,
)
from llmgw.cluster.model import Exit, Node, ObservedShard, Replica, ReplicaState, ShardState
from llmgw.cluster.step import Step

_PROGRESS = {
    ShardState.WANTED: ReplicaState.PLACING,
    ShardState.PREPARING: ReplicaState.PREPARING,
    ShardState.STARTING: ReplicaState.STARTING,
    ShardState.LOADING: ReplicaState.STARTING,
    ShardState.STOPPING: ReplicaState.STARTING,
    ShardState.READY: ReplicaState.READY,
}
_ORDER = (ReplicaState.PLACING, ReplicaState.PREPARING, ReplicaState.STARTING, ReplicaState.READY)
_LAST_LINES = 5
_ERROR = re.compile(r"\bE\b|error|fail|fatal|exception|can't|cannot", re.IGNORECASE)


def fold(step: Step, replica: Replica) -> None:
    """Bring one replica up to what its nodes say."""
    if replica.state is ReplicaState.STOPPING:
        finish_stopping(step, replica)
        return
    if replica.state in RUNNING:
        _fold_running(step, replica)
    elif replica.lost:
        _look_for_return(step, replica)
    replica = step.replicas[replica.id]
    if replica.state is ReplicaState.FAILED and not replica.lost:
        _release(step, replica)
    _clamp_retry(step, step.replicas[replica.id])


def finish_stopping(step: Step, replica: Replica) -> None:
    """Forget a stopping replica once nothing of it can be running any more."""
    if all_gone(step.nodes, replica):
        del step.replicas[replica.id]
        step.note("replica.removed", replica.id, f"{replica.id} of {replica.model} has stopped: {replica.why}")


def _fold_running(step: Step, replica: Replica) -> None:
    nodes = [step.nodes.get(placement.node) for placement in replica.placements]
    for placement, node in zip(replica.placements, nodes, strict=True):
        if node is None or away(node):
            _lose(step, replica, placement.node, node)
            return
    reporting = [node for node in nodes if node is not None and node.session is not None]
    if len(reporting) < len(nodes):
        return  # Nothing is known against the replica until all its nodes have reported.
    shards = [observed(node, replica, rank) for rank, node in enumerate(reporting)]
    for rank, (node, shard) in enumerate(zip(reporting, shards, strict=True)):
        if _has_failed(replica, shard):
            _fail(step, replica, node, rank, shard)
            return
    _advance(step, replica, reporting, shards)


def _has_failed(replica: Replica, shard: ObservedShard | None) -> bool:
    if shard is not None:
        return shard.state in ENDED
    if replica.state is ReplicaState.PREPARING:
        # An agent that was restarted while it fetched weights begins anew: it remembers what it started, not what it
        # was about to. Of several shards another may have been started, though.
        return len(replica.placements) > 1
    return replica.state is not ReplicaState.PLACING


def _advance(step: Step, replica: Replica, nodes: list[Node], shards: list[ObservedShard | None]) -> None:
    state, why = progress(nodes, shards)
    endpoint = shards[0].endpoint if shards[0] is not None and state is ReplicaState.READY else None
    if state is not replica.state:
        changed = moved(replica, state, why, step.now)
        if state is ReplicaState.READY:
            step.note("replica.ready", replica.id, f"{replica.id} of {replica.model} is {why}")
        elif replica.state is ReplicaState.READY:
            step.note("replica.unready", replica.id, f"{replica.id} of {replica.model} is no longer ready: {why}")
    else:
        changed = replace(replica, why=why)
    changed = replace(changed, endpoint=endpoint)
    if state is ReplicaState.READY and changed.failures and step.now.wall_s >= changed.since + FORGIVEN_AFTER_S:
        changed = replace(changed, failures=0, taken_port=0)
    step.put(changed)


def progress(nodes: list[Node], shards: list[ObservedShard | None]) -> tuple[ReplicaState, str]:
    """State of a replica none of whose shards has failed: that of the shard which is furthest behind, in its words."""
    states = [ReplicaState.PLACING if shard is None else _PROGRESS[shard.state] for shard in shards]
    rank = min(range(len(states)), key=lambda rank: _ORDER.index(states[rank]))
    node, shard = nodes[rank], shards[rank]
    if shard is None:
        return ReplicaState.PLACING, f"on {node.id}: waits for its agent to take it up"
    if states[rank] is not ReplicaState.READY:
        return states[rank], f"{shard.why or shard.state.value} on {node.id}"
    first = shards[0]
    if first is None or first.endpoint is None:
        return ReplicaState.STARTING, f"its shard on {nodes[0].id} says that it is ready, but not at which address"
    return ReplicaState.READY, f"ready on {', '.join(node.id for node in nodes)}"


def _lose(step: Step, replica: Replica, node_id: str, node: Node | None) -> None:
    if node is None:
        why = f"node {node_id} has been removed"
    else:
        why = f"node {node_id} {node.state.value}" + (f": {node.why}" if node.why else "")
    lost = replace(moved(replica, ReplicaState.FAILED, why, step.now), endpoint=None, lost=True, retry_at=None)
    step.put(lost)
    step.note("replica.failed", replica.id, f"{replica.id} of {replica.model} failed: {why}")


def _fail(step: Step, replica: Replica, node: Node, rank: int, shard: ObservedShard | None) -> None:
    why = how_it_ended(replica.shard_id(rank), node.id, shard)
    ended = shard.exit if shard is not None else None
    failures = replica.failures + 1
    failed = replace(
        moved(replica, ReplicaState.FAILED, why, step.now),
        endpoint=None,
        restarts=replica.restarts + 1,
        failures=failures,
        retry_at=step.now.wall_s + backoff_s(failures),
        last_exit=ended or Exit(),
        taken_port=replica.placements[rank].port if shard is not None and shard.port_taken else 0,
    )
    step.put(failed)
    wait = f"; its next generation is started in {backoff_s(failures):g} s at the earliest"
    step.note("replica.failed", replica.id, f"{replica.id} of {replica.model} failed: {why}{wait}")


def telling_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last few lines of an output, and before them the first that speaks of an error: the cause is said first,
    and what follows from it last."""
    last = lines[-_LAST_LINES:]
    cause = next((line for line in lines[:-_LAST_LINES] if _ERROR.search(line)), None)
    return last if cause is None else (cause, *last[1:])


def how_it_ended(shard_id: str, node_id: str, shard: ObservedShard | None) -> str:
    """``shard m-abcde/0 on n1 exited with status 1: last lines``."""
    if shard is None:
        return f"shard {shard_id} is no longer running on {node_id}, and nobody saw it end"
    words = f"shard {shard_id} on {node_id} "
    if shard.exit is not None:
        words += str(shard.exit)
    else:
        words += "failed" if shard.state is ShardState.FAILED else "stopped without having been asked to"
    if shard.why and shard.why not in words:
        words += f": {shard.why}"
    lines = telling_lines(shard.exit.last_lines) if shard.exit is not None else ()
    return words + (f"; last lines: {' | '.join(line.strip() for line in lines)}" if lines else "")


def _look_for_return(step: Step, replica: Replica) -> None:
    """Take a lost generation up again if its nodes are back and still run it; else settle that it has ended."""
    nodes: list[Node] = []
    for placement in replica.placements:
        node = step.nodes.get(placement.node)
        if node is None or away(node) or node.session is None:
            return
        nodes.append(node)
    shards = [observed(node, replica, rank) for rank, node in enumerate(nodes)]
    if all(
        shard is not None and shard.state not in ENDED and shard.state is not ShardState.STOPPING for shard in shards
    ):
        state, words = progress(nodes, shards)
        back = f"{', '.join(node.id for node in nodes)} is back and still runs generation {replica.generation}"
        endpoint = shards[0].endpoint if shards[0] is not None and state is ReplicaState.READY else None
        back_again = moved(replica, state, f"{words} ({back})", step.now)
        step.put(replace(back_again, why=words, lost=False, endpoint=endpoint))
        step.note("replica.adopted", replica.id, f"{replica.id} of {replica.model} is taken up again: {back}")
    elif all_gone(step.nodes, replica):
        why = f"{', '.join(node.id for node in nodes)} is back without generation {replica.generation}"
        settled = told(replica, why, step.now)
        ended = replace(settled, lost=False, placements=(), previous=replica.placements)
        step.put(replace(ended, restarts=replica.restarts + 1))


def _release(step: Step, replica: Replica) -> None:
    """Give up what a failed generation held once it has ended. For good: in the next moment the stream may break."""
    if replica.placements and all_gone(step.nodes, replica):
        step.put(replace(replica, placements=(), previous=replica.placements))


def _clamp_retry(step: Step, replica: Replica) -> None:
    """Where the wall clock was set back, a retry must not wait for the time to come round again."""
    if replica.retry_at is None:
        return
    latest = step.now.wall_s + backoff_s(replica.failures)
    if replica.retry_at > latest:
        step.put(replace(replica, retry_at=latest))
