"""What nodes report, folded into the states of replicas: progress, readiness, failure, and loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmgw.cluster.lifecycle import (
    EMPTIED,
    ENDED,
    FORGIVEN_AFTER_S,
    RUNNING,
    STARTED,
    all_gone,
    away,
    backoff_s,
    counted_down,
    finish_stopping,
    is_live,
    moved,
    observed,
    stop,
    unforgiven,
)
from llmgw.cluster.model import EngineState, Exit, Node, NodeState, ObservedShard, Replica, ReplicaState, ShardState
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
_RUNS = STARTED | {ShardState.STOPPING}
_LAST_LINES = 5
_ERROR = re.compile(r"\bE\b|error|fail|fatal|exception|can't|cannot", re.IGNORECASE)


def fold_all(step: Step) -> None:
    """Bring every replica up to what its nodes say."""
    nodes = step.nodes
    for replica in list(step.replicas.values()):
        if not _stays_ready(replica, nodes):
            fold(step, replica)


def _stays_ready(replica: Replica, nodes: Mapping[str, Node]) -> bool:
    """The quick answer for most replicas at most times: ready, and all is as it was. Written for speed."""
    if replica.state is not ReplicaState.READY or replica.failures or replica.failed_on:
        return False
    for rank, placement in enumerate(replica.placements):
        node = nodes.get(placement.node)
        if node is None or node.session is None or node.state is NodeState.LOST or node.state is NodeState.REVOKED:
            return False
        shard_id = replica.shard_id(rank)
        for shard in node.shards:
            if shard.id == shard_id:
                break
        else:
            return False
        if shard.state is not ShardState.READY or shard.generation != replica.generation:
            return False
        if (rank == 0 and shard.endpoint != replica.endpoint) or moved_away(replica, node, rank):
            return False
    return True


def fold(step: Step, replica: Replica) -> None:
    """Bring one replica up to what its nodes say."""
    if replica.state is ReplicaState.STOPPING:
        finish_stopping(step, replica)
        return
    if replica.state in RUNNING:
        _fold_running(step, replica)
        if replica.id not in step.replicas:
            return
        replica = step.replicas[replica.id]
    # Of a lost one the return is looked for once all others are known.
    if replica.state is ReplicaState.FAILED and not replica.lost:
        _release(step, replica)
    _clamp_retry(step, step.replicas[replica.id])


def _fold_running(step: Step, replica: Replica) -> None:
    nodes = [step.nodes.get(placement.node) for placement in replica.placements]
    for placement, node in zip(replica.placements, nodes, strict=True):
        if node is None or away(node):
            _lose(step, replica, placement.node, node)
            return
    reporting = [node if node is not None and node.session is not None else None for node in nodes]
    shards = [None if node is None else observed(node, replica, rank) for rank, node in enumerate(reporting)]
    for rank, node in enumerate(reporting):
        if node is not None and (why := _has_failed(replica, node, rank, shards)):
            _fail(step, replica, rank, shards[rank], why)
            return
    if replica.state is ReplicaState.DRAINING:
        step.put(counted_down(step, replica))
        return
    heard = [node for node in reporting if node is not None]
    if len(heard) == len(nodes):  # Nothing is known for the replica either until all its nodes have reported.
        _advance(step, replica, heard, shards)
    elif replica.state is ReplicaState.READY:
        # But for one thing: a rank that is not ready is enough for all.
        for rank, (node, shard) in enumerate(zip(reporting, shards, strict=True)):
            if node is not None and shard is not None and shard.state is not ShardState.READY:
                words = f"rank {rank}: {shard.why or shard.state.value} on {node.id}"
                step.put(_become(step, replica, ReplicaState.STARTING, words))
                return


def _has_failed(replica: Replica, node: Node, rank: int, shards: list[ObservedShard | None]) -> str:
    """How that rank ended, as its node has it; empty: it has not."""
    shard = shards[rank]
    if shard is not None:
        if shard.state in ENDED:
            return how_it_ended(replica.shard_id(rank), node.id, shard)
        # One that leaves has met long ago, and goes on with what it has.
        if moved_away(replica, node, rank) and replica.state is not ReplicaState.DRAINING:
            return _moved_words(replica, node, rank)
        if replica.state in (ReplicaState.PLACING, ReplicaState.PREPARING) and not _started(replica, shards):
            return _engine_gone(replica, node)
        return ""
    if replica.state in (ReplicaState.PLACING, ReplicaState.PREPARING) and not _started(replica, shards):
        # An agent that was restarted while it fetched weights begins anew: it remembers what it started, not what it
        # was about to.
        return _moved_words(replica, node, rank) if moved_away(replica, node, rank) else _engine_gone(replica, node)
    return how_it_ended(replica.shard_id(rank), node.id, None)


def moved_away(replica: Replica, node: Node, rank: int) -> bool:
    """True where the ranks can't find each other any more: the node has another address than when it was placed."""
    if len(replica.placements) == 1 or node.inventory is None:
        return False
    placed = replica.placements[rank].address
    return bool(placed) and node.inventory.mgmt_addr != placed


def _engine_gone(replica: Replica, node: Node) -> str:
    """Why its engine can't be started there any more, though it could when it was placed; empty: it can, or may soon.
    The agent would wait for it, and the replica may have another place meanwhile."""
    profile = replica.profile
    if profile is None or not node.probed:
        return ""
    engine = node.engine(profile.engine, profile.engine_version)
    which = f"{profile.engine} {profile.engine_version}".strip()
    if engine is None:
        return f"{which} is not on {node.id} any more"
    if engine.state is EngineState.FAILED:
        return f"{which} can't be used on {node.id} any more: {engine.words or engine.state.value}"
    return ""


def _moved_words(replica: Replica, node: Node, rank: int) -> str:
    assert node.inventory is not None
    placed, now = replica.placements[rank].address, node.inventory.mgmt_addr
    return (
        f"the management address of {node.id} changed from {placed} to {now}: the ranks of generation "
        f"{replica.generation} can't meet there any more"
    )


def _started(replica: Replica, shards: Sequence[ObservedShard | None]) -> bool:
    """True where the ranks of this generation were told to start; by what runs, where nothing else tells."""
    if replica.state in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING):
        return True
    return any(shard is not None and shard.state in STARTED for shard in shards)


def _advance(step: Step, replica: Replica, nodes: list[Node], shards: list[ObservedShard | None]) -> None:
    state, why = progress(replica, nodes, shards)
    endpoint = shards[0].endpoint if shards[0] is not None and state is ReplicaState.READY else None
    changed = replace(_become(step, replica, state, why), endpoint=endpoint)
    if unforgiven(changed) and step.now.wall_s >= changed.since + FORGIVEN_AFTER_S:
        changed = replace(changed, failures=0, failed_on={}, taken_port=0)
    step.put(changed)


def _become(step: Step, replica: Replica, state: ReplicaState, why: str) -> Replica:
    """It in that state, without an endpoint; that it got ready, or is no more, is noted."""
    if state is replica.state:
        return replace(replica, why=why, endpoint=None)
    if state is ReplicaState.READY:
        step.note("replica.ready", replica.id, f"{replica.id} of {replica.model} is {why}")
    elif replica.state is ReplicaState.READY:
        step.note("replica.unready", replica.id, f"{replica.id} of {replica.model} is no longer ready: {why}")
    return replace(moved(replica, state, why, step.now), endpoint=None)


def progress(
    replica: Replica, nodes: Sequence[Node], shards: Sequence[ObservedShard | None]
) -> tuple[ReplicaState, str]:
    """State of a replica none of whose shards has failed: that of the rank which is furthest behind, in its words.

    Ranks of several nodes are started together: none of them before all have said that they are prepared, and from
    then on the replica is starting, whatever they still say. Nothing new starts on a node that is to be emptied.
    """
    states = [ReplicaState.PLACING if shard is None else _PROGRESS[shard.state] for shard in shards]
    if len(shards) > 1:
        if (together := _before_they_run(replica, nodes, shards)) is not None:
            return together
        if _started(replica, shards):
            states = [max(state, ReplicaState.STARTING, key=_ORDER.index) for state in states]
    rank = min(range(len(shards)), key=lambda rank: (_ORDER.index(states[rank]), _is_prepared(shards[rank])))
    shard = shards[rank]
    if shard is None:
        missing = ", ".join(node.id for node, shard in zip(nodes, shards, strict=True) if shard is None)
        return states[rank], f"on {missing}: waits for its agent to take it up"
    if states[rank] is not ReplicaState.READY:
        which = f"rank {rank}: " if len(shards) > 1 else ""
        words, says, output = (shard.why or shard.state.value).partition("; it says: ")
        return states[rank], f"{which}{words} on {nodes[rank].id}{says}{output}"
    if shards[0] is None or shards[0].endpoint is None:
        return ReplicaState.STARTING, f"its shard on {nodes[0].id} says that it is ready, but not at which address"
    return ReplicaState.READY, f"ready on {', '.join(node.id for node in nodes)}"


def _before_they_run(
    replica: Replica, nodes: Sequence[Node], shards: Sequence[ObservedShard | None]
) -> tuple[ReplicaState, str] | None:
    """Of ranks that are all prepared, or were told to start and none has yet; None: it is said rank by rank."""
    told, prepared = _started(replica, shards), all(map(_is_prepared, shards))
    emptied = ", ".join(node.id for node in nodes if node.state in EMPTIED)
    if prepared and emptied and not told:
        words = f"all {len(shards)} ranks are prepared; not started, as {emptied} is to be emptied"
        return ReplicaState.PREPARING, words
    if prepared or (told and not any(shard is not None and shard.state in _RUNS for shard in shards)):
        return ReplicaState.STARTING, f"all {len(shards)} ranks are prepared: starting together"
    return None


def _is_prepared(shard: ObservedShard | None) -> bool:
    return shard is not None and shard.state is ShardState.PREPARING and shard.prepared


def _lose(step: Step, replica: Replica, node_id: str, node: Node | None) -> None:
    if node is None:
        why = f"node {node_id} has been removed"
    else:
        why = f"node {node_id} {node.state.value}" + (f": {node.why}" if node.why else "")
    if replica.state is ReplicaState.DRAINING:
        stop(step, replica, f"{replica.why}; {why}")
        return
    lost = replace(moved(replica, ReplicaState.FAILED, why, step.now), endpoint=None, lost=True, retry_at=None)
    step.put(lost)
    step.note("replica.failed", replica.id, f"{replica.id} of {replica.model} failed: {why}")
    left = [at.node for at in replica.placements if at.node != node_id and is_live(step.nodes.get(at.node))]
    if left:
        stop(step, lost, f"{why}; what is left of it on {', '.join(left)} can't serve without")


def _fail(step: Step, replica: Replica, rank: int, shard: ObservedShard | None, why: str) -> None:
    if replica.state is ReplicaState.DRAINING:
        stop(step, replica, f"{replica.why}; {why}")
        return
    has_ended = shard is None or shard.state in ENDED
    ended = shard.exit if shard is not None else None
    taken_port = replica.placements[rank].port if shard is not None and shard.port_taken else 0
    # The next try is on other ports: only once all have been tried is it one more failure of the thing itself.
    goes_on = taken_port > replica.taken_port
    failures = max(replica.failures, 1) if goes_on else replica.failures + 1
    failed_on = dict(replica.failed_on)
    for placement in () if goes_on else replica.placements:
        failed_on[placement.node] = failed_on.get(placement.node, 0) + 1
    failed = replace(
        moved(replica, ReplicaState.FAILED, why, step.now),
        endpoint=None,
        restarts=replica.restarts + 1,
        failures=failures,
        failed_on=dict(sorted(failed_on.items())),
        retry_at=step.now.wall_s + backoff_s(failures),
        last_exit=(ended or Exit()) if has_ended else replica.last_exit,
        taken_port=taken_port or replica.taken_port,
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
