"""What should happen next: (cluster, now) -> actions. Applying them and asking again gives nothing more to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmgw.cluster.actions import (
    Action,
    CountReplica,
    Note,
    PutBrake,
    PutDrain,
    PutNode,
    PutReplica,
    RemoveDrain,
    RemoveReplica,
)
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.derived import desired, desired_by_node, routes
from llmgw.cluster.lifecycle import FORGIVEN_AFTER_S, all_gone, judged, lost_at_s, moved, suspect_at_s, told
from llmgw.cluster.model import Cluster, Instant, Node, NodeState, Replica, ReplicaState
from llmgw.cluster.observe import fold
from llmgw.cluster.placement import Before, Placed, Planner
from llmgw.cluster.replacing import replace_outgoing
from llmgw.cluster.scaling import scale
from llmgw.cluster.step import Step

__all__ = ["apply", "desired", "desired_by_node", "next_wake_s", "reconcile", "routes"]


def reconcile(cluster: Cluster, now: Instant) -> tuple[Action, ...]:
    """The next step of the cluster: nodes judged, reports folded in, replicas made or stopped, and placed."""
    step = Step(cluster, now)
    _judge(step)
    for replica in list(step.replicas.values()):
        fold(step, replica)
    replace_outgoing(step)
    scale(step)
    _place(step)
    return step.actions()


def apply(cluster: Cluster, actions: Sequence[Action]) -> Cluster:
    """The cluster after the actions."""
    nodes, replicas, made = dict(cluster.nodes), dict(cluster.replicas), dict(cluster.replicas_made)
    drains, brake = dict(cluster.drains), cluster.brake
    for action in actions:
        match action:
            case PutNode(node):
                nodes[node.id] = node
            case PutReplica(replica):
                replicas[replica.id] = replica
            case RemoveReplica(name):
                replicas.pop(name, None)
            case CountReplica(model, count):
                made[model] = count
            case PutDrain(drain):
                drains[drain.node] = drain
            case RemoveDrain(name):
                drains.pop(name, None)
            case PutBrake(brake):
                pass
            case Note():
                pass
    return replace(cluster, nodes=nodes, replicas=replicas, replicas_made=made, drains=drains, brake=brake)


def next_wake_s(cluster: Cluster, now: Instant) -> float | None:
    """Monotonic time at which ``reconcile`` could next find something to do through time alone; None: never."""
    times = [time_s for node in cluster.nodes.values() for time_s in _node_times(cluster, node)]
    ahead_s = now.monotonic_s - now.wall_s
    for replica in cluster.replicas.values():
        if replica.retry_at is not None and replica.retry_at > now.wall_s:
            times.append(replica.retry_at + ahead_s)
        if replica.state is ReplicaState.READY and replica.failures:
            times.append(replica.since + FORGIVEN_AFTER_S + ahead_s)
    return min((time_s for time_s in times if time_s > now.monotonic_s), default=None)


def _node_times(cluster: Cluster, node: Node) -> tuple[float, ...]:
    if node.state in (NodeState.LOST, NodeState.REVOKED):
        return ()
    if node.session is None or node.state is NodeState.SUSPECT:
        return (lost_at_s(cluster, node),)
    return suspect_at_s(cluster, node), lost_at_s(cluster, node)


def _judge(step: Step) -> None:
    for key in sorted(step.nodes):
        node = step.nodes[key]
        after = judged(step.cluster, node, step.now)
        if after is not node:
            step.nodes[key] = after
            step.note(f"node.{after.state.value}", key, f"node {key} is {after.state.value}: {after.why}")


def _place(step: Step) -> None:
    due = [replica for replica in step.replicas.values() if _may_be_placed(step, replica)]
    if not due:
        return
    planner = Planner(step.snapshot())
    refused: dict[str, tuple[ModelSpec, list[Replica]]] = {}
    for replica in sorted(due, key=lambda replica: (replica.model, replica.number, replica.id)):
        spec = step.cluster.catalog.model(replica.model)
        assert spec is not None, f"{replica.id} should be stopping: {replica.model} is not in the catalog"
        placed = planner.find(spec, _before(replica))
        if placed is not None:
            _take_place(step, replica, spec, placed)
        else:
            refused.setdefault(spec.name, (spec, []))[1].append(replica)
    # In words only now, so that they count what was placed in this very step.
    for spec, replicas in refused.values():
        words = planner.summary(spec)
        for replica in replicas:
            _refuse(step, replica, words)


def _may_be_placed(step: Step, replica: Replica) -> bool:
    """Not while its backoff runs, and not before its last generation has ended as a whole."""
    if replica.state not in (ReplicaState.UNPLACED, ReplicaState.FAILED):
        return False
    if replica.retry_at is not None and replica.retry_at > step.now.wall_s:
        return False
    return all_gone(step.nodes, replica)


def _before(replica: Replica) -> Before | None:
    if not replica.previous:
        return None
    return Before(tuple(placement.node for placement in replica.previous), replica.taken_port)


def _take_place(step: Step, replica: Replica, spec: ModelSpec, placed: Placed) -> None:
    nodes = ", ".join(placement.node for placement in placed.placements)
    next_generation = replace(
        replica,
        generation=step.highest_generation(replica) + 1,
        profile=placed.profile,
        spec=spec,
        placements=placed.placements,
        fabric=placed.fabric,
        dist_init=placed.dist_init,
        previous=(),
        restarts=replica.restarts + (1 if replica.lost else 0),
        retry_at=None,
        lost=False,
    )
    why = f"on {nodes}: waits for its agent to take it up"
    step.put(moved(next_generation, ReplicaState.PLACING, why, step.now))
    over = f" over fabric {placed.fabric}" if placed.fabric is not None else ""
    words = f"{replica.id} of {replica.model} is placed on {nodes}{over}, generation {next_generation.generation}"
    step.note("replica.placed", replica.id, f"{words}, profile {placed.profile.name}")


def _refuse(step: Step, replica: Replica, words: str) -> None:
    unplaced = replace(replica, why=words, retry_at=None)
    if replica.state is not ReplicaState.UNPLACED:
        unplaced = moved(unplaced, ReplicaState.UNPLACED, words, step.now)
    if replica.state is not ReplicaState.UNPLACED or not replica.story:
        step.note("replica.unplaced", replica.id, f"{replica.id} of {replica.model} can't be placed: {words}")
    if not unplaced.story:
        unplaced = told(unplaced, words, step.now)
    step.put(unplaced)
