"""Replicas lost with their nodes: what becomes of them when the nodes return, or do not.

Another one was made in place of each at once. A node that returns keeps what it still runs of a lost one until this
is decided: taken up again where it is needed, let go where others serve in its place already.
"""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.lifecycle import ENDED, all_live, away, drain, moved, observed, stop
from llmgw.cluster.model import Node, NodeState, ObservedShard, Replica, ReplicaState, ShardState
from llmgw.cluster.observe import moved_away, progress
from llmgw.cluster.scaling import by_model, counted, wanted
from llmgw.cluster.step import Step

WHOLE_WITHIN_S = 60.0
"""How long the first node that returns waits for the others: agents dial again at least every half minute."""
REMEMBERED_S = 86_400.0
"""How long a lost replica is remembered that others have taken the place of."""


def decide_on_lost(step: Step) -> None:
    """Decide, one after another, on each lost replica on which something can be decided: again while that decides on
    others, for which one that is taken up may stand in."""
    lost = [key for key, replica in step.replicas.items() if replica.lost]
    models = by_model(step) if lost else {}
    while lost:
        for key in lost:
            replica = step.replicas[key]
            _decide(step, replica, [other.id for other in models[replica.model]])
        still = [key for key in lost if key in step.replicas and step.replicas[key].lost]
        if len(still) == len(lost):
            return
        lost = still


def forgotten_at(replica: Replica) -> float:
    """Wall-clock time at which a lost replica is no longer remembered, if it has been replaced."""
    return replica.since + REMEMBERED_S


def _decide(step: Step, replica: Replica, same_model: list[str]) -> None:
    nodes = [step.nodes.get(placement.node) for placement in replica.placements]
    why = _why_never(step, replica, nodes)
    if why:
        stop(step, replica, why)
        return
    back = [node for node in nodes if node is not None and not away(node) and node.session is not None]
    if not back:
        if step.now.wall_s >= forgotten_at(replica) and _is_replaced(step, replica, same_model):
            stop(step, replica, f"others serve in its place, and its nodes have not come back for a day: {replica.why}")
    elif len(back) < len(nodes):
        _wait_for_the_rest(step, replica, back, same_model)
    elif _is_replaced(step, replica, same_model, surely=_serves(replica, back)):
        _let_go(step, replica, back)
    else:
        _take_up(step, replica, back)


def _why_never(step: Step, replica: Replica, nodes: list[Node | None]) -> str:
    """Why it can't be taken up again whatever happens; empty: it may."""
    if wanted(step.cluster, replica.model) == 0:
        return f"lost with its node, and no replica of {replica.model} is wanted any more"
    for rank, (placement, node) in enumerate(zip(replica.placements, nodes, strict=True)):
        if node is None:
            return f"node {placement.node} has been removed"
        if node.state is NodeState.REVOKED:
            return f"node {node.id} revoked" + (f": {node.why}" if node.why else "")
        if away(node) or node.session is None:
            continue
        if not _runs(observed(node, replica, rank)) or moved_away(replica, node, rank):
            return f"{node.id} is back without generation {replica.generation}"
    return ""


def _runs(shard: ObservedShard | None) -> bool:
    return shard is not None and shard.state not in ENDED and shard.state is not ShardState.STOPPING


def _serves(replica: Replica, nodes: list[Node]) -> bool:
    shards = [observed(node, replica, rank) for rank, node in enumerate(nodes)]
    return all(shard is not None and shard.state is ShardState.READY for shard in shards)


def _is_replaced(step: Step, replica: Replica, same_model: list[str], *, surely: bool = False) -> bool:
    """True where as many as are wanted are ready without it, those aside that only take over from a standing one.

    ``surely``: their nodes are there to say so. One that was ready when its node was last heard is no reason to stop
    one that is known to serve.
    """
    others = counted(step.replicas[key] for key in same_model if key in step.replicas)
    ready = [other for other in others if other.state is ReplicaState.READY]
    number = sum(all_live(step.nodes, other) for other in ready) if surely else len(ready)
    return number >= wanted(step.cluster, replica.model)


def _wait_for_the_rest(step: Step, replica: Replica, back: list[Node], same_model: list[str]) -> None:
    now_s, names = step.now.monotonic_s, ", ".join(node.id for node in back)
    missing = ", ".join(sorted({placement.node for placement in replica.placements} - {node.id for node in back}))
    if _is_replaced(step, replica, same_model):
        stop(step, replica, f"replaced while its nodes were away; {names} is back, {missing} is not")
    elif not now_s < replica.whole_by_s <= now_s + WHOLE_WITHIN_S:
        if replica.whole_by_s and replica.whole_by_s <= now_s:
            stop(step, replica, f"{names} is back, and {missing} did not follow within {WHOLE_WITHIN_S:g} s")
        else:
            step.put(replace(replica, whole_by_s=now_s + WHOLE_WITHIN_S))


def _let_go(step: Step, replica: Replica, nodes: list[Node]) -> None:
    """Peacefully, in case some gateway that was cut off too still sends requests there."""
    why = "replaced while its node was away" if len(nodes) == 1 else "replaced while its nodes were away"
    if _serves(replica, nodes):
        drain(step, replica, why)
    else:
        stop(step, replica, why)


def _take_up(step: Step, replica: Replica, nodes: list[Node]) -> None:
    shards = [observed(node, replica, rank) for rank, node in enumerate(nodes)]
    state, words = progress(replica, nodes, shards)
    back = f"{', '.join(node.id for node in nodes)} is back and still runs generation {replica.generation}"
    endpoint = shards[0].endpoint if shards[0] is not None and state is ReplicaState.READY else None
    again = moved(replica, state, f"{words} ({back})", step.now)
    step.put(replace(again, why=words, lost=False, whole_by_s=0.0, endpoint=endpoint))
    step.note("replica.adopted", replica.id, f"{replica.id} of {replica.model} is taken up again: {back}")
