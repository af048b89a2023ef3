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
    PutEngine,
    PutNode,
    PutReplica,
    RemoveDrain,
    RemoveReplica,
)
from llmgw.cluster.brake import braked, recent_until_s
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.derived import desired, desired_by_node, routes
from llmgw.cluster.engines import in_effect
from llmgw.cluster.lifecycle import (
    AWAY,
    EMPTIED,
    ENDED,
    FORGIVEN_AFTER_S,
    all_gone,
    failed_elsewhere,
    is_heard,
    judged,
    lost_at_s,
    moved,
    put_in,
    stays_ready,
    suspect_at_s,
    told,
    unforgiven,
)
from llmgw.cluster.model import Cluster, Instant, Node, NodeState, Replica, ReplicaState
from llmgw.cluster.moves import retry_times_s
from llmgw.cluster.observe import fold_all
from llmgw.cluster.placement import Before, Placed, Planner
from llmgw.cluster.quiet import let_go
from llmgw.cluster.replacing import replace_outgoing
from llmgw.cluster.returning import decide_on_lost, forgotten_at
from llmgw.cluster.scaling import scale
from llmgw.cluster.starting import ReadyOn, specs_before, specs_in_place
from llmgw.cluster.step import Step

_ROUNDS = 100
"""More than any step was seen to take; what is left then is left to the next one."""

_PLACELESS = (ReplicaState.UNPLACED, ReplicaState.FAILED)

__all__ = ["apply", "desired", "desired_by_node", "next_wake_s", "reconcile", "routes"]


def reconcile(cluster: Cluster, now: Instant) -> tuple[Action, ...]:
    """The next step of the cluster: nodes judged, reports folded in, replicas made or stopped, and placed."""
    step = Step(cluster, now)
    _judge(step)
    fold_all(step)
    decide_on_lost(step)
    _replicas(step)
    return step.actions()


def _replicas(step: Step) -> None:
    """Replicas replaced, made, stopped and placed: again while that lets a replacement go on at once, while a drain
    that can move something changes what goes where, or while what was said of a node in a refusal is no longer so."""
    for _ in range(_ROUNDS):
        replicas, nodes, drains = dict(step.replicas), dict(step.nodes), _drains_stand(step)
        replaces = replace_outgoing(step)
        scale(step)
        let_go(step)
        _place(step)
        _settle_drained(step)
        others_stand = step.nodes == nodes and _drains_stand(step) == drains
        if others_stand and (not replaces or step.replicas == replicas):
            return


def _drains_stand(step: Step) -> dict[str, tuple[object, ...]]:
    """How far each drain is, and what it can move: what is decided by, without the words."""
    return {key: (drain.state, *(move.state for move in drain.moves)) for key, drain in step.drains.items()}


def apply(cluster: Cluster, actions: Sequence[Action]) -> Cluster:
    """The cluster after the actions."""
    nodes, replicas, made = dict(cluster.nodes), dict(cluster.replicas), dict(cluster.replicas_made)
    drains, brake = dict(cluster.drains), cluster.brake
    engines = dict(cluster.engines)
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
            case PutEngine(history):
                engines[history.name] = history
            case PutBrake(brake):
                pass
            case Note():
                pass
    changed = replace(cluster, nodes=nodes, replicas=replicas, replicas_made=made, drains=drains, brake=brake)
    if engines == cluster.engines:
        return changed
    return replace(changed, engines=engines, catalog=in_effect(cluster.catalog, engines))


def next_wake_s(cluster: Cluster, now: Instant) -> float | None:
    """Monotonic time at which ``reconcile`` could next find something to do through time alone; None: never."""
    times = [time_s for node in cluster.nodes.values() for time_s in _node_times(cluster, node, now)]
    draining = False
    for replica in cluster.replicas.values():
        if replica.state is not ReplicaState.READY or replica.failures or replica.failed_on:
            draining = draining or replica.state is ReplicaState.DRAINING
            times += _replica_times(replica, now)
    if draining:
        times.append(cluster.tables_settled_at_s)
        times += [gateway.heard_at_s + cluster.lease_s for gateway in cluster.gateways.values()]
    times += [time_s + now.monotonic_s - now.wall_s for time_s in retry_times_s(cluster, now)]
    return min((time_s for time_s in times if time_s > now.monotonic_s), default=None)


def _replica_times(replica: Replica, now: Instant) -> list[float]:
    ahead_s = now.monotonic_s - now.wall_s
    times = []
    if replica.retry_at is not None and replica.retry_at > now.wall_s:
        times.append(replica.retry_at + ahead_s)
    if unforgiven(replica):
        times.append(replica.since + FORGIVEN_AFTER_S + ahead_s)
    if replica.state is ReplicaState.DRAINING:
        times.append(replica.drained_by_s)
    if replica.lost:
        times += [replica.whole_by_s, forgotten_at(replica) + ahead_s]
    return times


def _node_times(cluster: Cluster, node: Node, now: Instant) -> tuple[float, ...]:
    if node.state is NodeState.LOST and cluster.brake is not None:
        return recent_until_s(cluster, node, now)
    if node.state in AWAY:
        return ()
    if node.session is None or node.state is NodeState.SUSPECT:
        return (lost_at_s(cluster, node),)
    return suspect_at_s(cluster, node), lost_at_s(cluster, node)


def _judge(step: Step) -> None:
    step.brake = braked(step.cluster, step.now)
    _say_brake(step)
    cluster = step.cluster if step.brake is step.cluster.brake else replace(step.cluster, brake=step.brake)
    unsure = [node for node in step.nodes.values() if not stays_ready(cluster, node, step.now)]
    for node in sorted(unsure, key=lambda node: node.id):
        after = judged(cluster, node, step.now)
        if after.state is not node.state:
            _put_node(step, after)
        elif after is not node:
            step.nodes[node.id] = after
            kind, words = (
                ("suspect", "does not answer any more") if after.silent else (node.state.value, "answers again")
            )
            step.note(f"node.{kind}", node.id, f"node {node.id}, which is {node.state.value}, {words}")


def _put_node(step: Step, node: Node) -> None:
    step.nodes[node.id] = node
    step.note(f"node.{node.state.value}", node.id, f"node {node.id} is {node.state.value}: {node.why}")


def _say_brake(step: Step) -> None:
    before, after = step.cluster.brake, step.brake
    if after is not None and before is None:
        step.note("node.brake", "", after.words)
    elif after is None and before is not None:
        step.note("node.brake", "", "the brake is off: enough nodes are heard again, or were lost long enough ago")


def _settle_drained(step: Step) -> None:
    """Drained is a node that is to be emptied once nothing is placed on it, and it reports nothing that runs."""
    emptied = [node for node in step.nodes.values() if node.state in EMPTIED]
    if not emptied:
        return
    held = {placement.node for replica in step.replicas.values() for placement in replica.placements}
    for node in sorted(emptied, key=lambda node: node.id):
        if node.id not in held and not is_heard(step.cluster, node, step.now):
            continue  # What it runs is not known.
        runs = node.id in held or any(shard.state not in ENDED for shard in node.shards)
        state = NodeState.DRAINING if runs else NodeState.DRAINED
        if state is not node.state:
            why = "something runs on it again" if runs else "nothing is placed on it, and nothing runs there"
            _put_node(step, put_in(node, state, why, step.now))


def _place(step: Step) -> None:
    placeless = [replica for replica in step.replicas.values() if replica.state in _PLACELESS]
    due = [replica for replica in placeless if _may_be_placed(step, replica)]
    if not due:
        return
    planner, ready_on = Planner(step.snapshot()), ReadyOn(step.replicas.values())
    refused: dict[str, tuple[ModelSpec, list[Replica]]] = {}
    for replica in sorted(due, key=lambda replica: (replica.model, replica.number, replica.id)):
        specs = specs_in_place(step, replica, ready_on)
        assert specs, f"{replica.id} should be stopping: {replica.model} is not in the catalog"
        found = planner.find_first(specs, Before.of(replica))
        if found is not None:
            before = found[0] is not specs[0] and found[0] in specs_before(step.cluster, replica)
            _take_place(step, replica, *found, no_room=planner.summary(specs[0]) if before else "")
        else:
            refused.setdefault(replica.model, (specs[0], []))[1].append(replica)
    # In words only now, so that they count what was placed in this very step.
    for spec, replicas in refused.values():
        words = planner.summary(spec)
        for replica in replicas:
            _refuse(step, replica, words)


def _may_be_placed(step: Step, replica: Replica) -> bool:
    """Not while its backoff runs, and not before its last generation has ended as a whole."""
    if replica.lost:
        return False
    if replica.retry_at is not None and replica.retry_at > step.now.wall_s:
        return False
    return all_gone(step.nodes, replica)


def _take_place(step: Step, replica: Replica, spec: ModelSpec, placed: Placed, *, no_room: str) -> None:
    """``no_room``: why it is started as the catalog was before, rather than as it is now; empty: it is not."""
    names = tuple(placement.node for placement in placed.placements)
    same_place = names == tuple(placement.node for placement in replica.previous)
    nodes, notes = ", ".join(names), [words] if (words := failed_elsewhere(replica, names)) else []
    if no_room:
        notes.append(f"as the catalog was before, since what it says now fits nowhere: {no_room}")
    next_generation = replace(
        replica,
        generation=step.highest_generation(replica) + 1,
        profile=placed.profile,
        spec=spec,
        placements=placed.placements,
        fabric=placed.fabric,
        dist_init=placed.dist_init,
        previous=(),
        retry_at=None,
        taken_port=replica.taken_port if same_place else 0,
    )
    why = f"on {nodes}: waits for its agent to take it up"
    # The notes are for its story alone: its own words are those of its agents from here on.
    step.put(replace(moved(next_generation, ReplicaState.PLACING, "; ".join([why, *notes]), step.now), why=why))
    over = f" over fabric {placed.fabric}" if placed.fabric is not None else ""
    words = f"{replica.id} of {replica.model} is placed on {nodes}{over}, generation {next_generation.generation}"
    step.note("replica.placed", replica.id, "; ".join([f"{words}, profile {placed.profile.name}", *notes]))


def _refuse(step: Step, replica: Replica, words: str) -> None:
    unplaced = replace(replica, why=words, retry_at=None)
    if replica.state is not ReplicaState.UNPLACED:
        unplaced = moved(unplaced, ReplicaState.UNPLACED, words, step.now)
    if replica.state is not ReplicaState.UNPLACED or not replica.story:
        step.note("replica.unplaced", replica.id, f"{replica.id} of {replica.model} can't be placed: {words}")
    if not unplaced.story:
        unplaced = told(unplaced, words, step.now)
    step.put(unplaced)
