"""The plan of a drain: where each replica on the node goes, or why it can't. What is shown is what is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llmgw.cluster.beside import nodes_of, original, replacement
from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.lifecycle import LEAVING, has_served, judged, stands
from llmgw.cluster.model import Cluster, Drain, DrainState, Instant, Move, MoveState, NodeState, Replica, ReplicaState
from llmgw.cluster.placement import Before, Placed, Planner
from llmgw.cluster.starting import specs_drained
from llmgw.cluster.wording import count

UNDER_WAY = (MoveState.STARTING, MoveState.SHIFTING, MoveState.FINISHING, MoveState.STOPPING)
"""States of a move that has begun and has not ended. A drain has one such move at a time."""


def plan(
    cluster: Cluster,
    node: str,
    *,
    now: Instant,
    in_flight_s: float | None = None,
    allow_downtime: Sequence[str] = (),
    force: bool = False,
    wait: bool = False,
) -> Drain:
    """What draining the node would do, replica by replica, the largest first, each on what those before it left.

    The drain may be carried out as it stands where ``refusal`` of it is None. Of a node that is being drained already
    it is the same drain with these options: what is under way goes on. Changes nothing by itself.
    """
    before = cluster.drains.get(node)
    drain = Drain(
        node=node,
        since=before.since if before is not None else now.wall_s,
        state=DrainState.WAITING if before is None or before.state is DrainState.WAITING else DrainState.MOVING,
        in_flight_s=in_flight_s,
        allow_downtime=_models(cluster, allow_downtime),
        force=force,
        wait=wait,
        moves=before.moves if before is not None else (),
    )
    return planned(_as_draining(cluster, node, now), drain, now)


def planned(cluster: Cluster, drain: Drain, now: Instant) -> Drain:
    """The drain with its moves planned anew, on a cluster in which its node takes nothing any more."""
    known = {move.replica: move for move in drain.moves}
    planner = Planner(cluster)
    moves = [move for move in drain.moves if move.state is MoveState.MOVED]
    here = to_move(cluster.replicas.values(), drain.node)
    under_way = {key for key, move in known.items() if move.state in UNDER_WAY}
    for replica in here:
        if replica.id in under_way:
            planner.release(replica)
    if drain.wait and drain.state is DrainState.WAITING:
        _hold_for_unplaced(cluster, planner)
    for replica in here:
        before = known.get(replica.id)
        if before is not None and replica.id in under_way:
            moves.append(before)
        elif replica.lost:
            move = before or Move(replica=replica.id, model=replica.model, since=now.wall_s)
            lost = replace(move, state=MoveState.BLOCKED, why=lost_words(drain.node), targets=(), lost=True)
            moves.append(_as_it_was(before, lost))
        else:
            move = Move(replica=replica.id, model=replica.model, since=now.wall_s)
            move = move if before is None else replace(move, failed_on=before.failed_on)
            moves.append(_as_it_was(before, _move(cluster, planner, drain, replica, move)))
    changed = replace(drain, moves=tuple(moves))
    stuck = blocked(changed)
    waits = stuck or _stopping(changed) if drain.wait else _short(stuck)
    if drain.state is DrainState.MOVING or not waits:
        left = sum(move.state is not MoveState.MOVED for move in changed.moves)
        why = f"{count(left, 'replica')} to move" if left else f"nothing is placed on {drain.node}"
        return replace(changed, state=DrainState.MOVING, why=f"{why}; {_reasons(stuck)}" if stuck else why)
    return replace(changed, state=DrainState.WAITING, why=waiting_words(changed))


def refusal(drain: Drain) -> str | None:
    """Why the planned drain is not begun, and which choices there are; None: it may be put into effect."""
    stuck = _short(blocked(drain))
    if drain.state is DrainState.MOVING or drain.wait or not stuck:
        return None
    models = " ".join(f"--allow-downtime {model}" for model in sorted({move.model for move in stuck}))
    return (
        f"{drain.node} can't be drained now, and nothing was changed: {_reasons(stuck)}\n"
        f"Choices:\n"
        f"  make room for it: free what is short (llmgw ctl scale), or add a node that has it, and try again\n"
        f"  --wait: it begins by itself as soon as everything can move, and all serve on until then\n"
        f"  {models}: such replicas may stop before there is another place for them\n"
        f"  --force: so may those of every model"
    )


def blocked(drain: Drain) -> list[Move]:
    """The moves that can't go on for now."""
    return [move for move in drain.moves if move.state is MoveState.BLOCKED]


def _short(stuck: Iterable[Move]) -> list[Move]:
    """Those that have no other place. What was lost serves nobody, so that a drain may begin without it."""
    return [move for move in stuck if not move.lost]


def lost_words(node: str) -> str:
    """Why a replica that was lost is not moved: whether it runs is not known before its nodes are back."""
    return f"was lost with its node, and {node} may bring it back"


def _hold_for_unplaced(cluster: Cluster, planner: Planner) -> None:
    """Hold the places that wait to be taken: whoever has none goes before what has one, and only leaves a node."""
    for _, replica in sorted(cluster.replicas.items()):
        if stands(replica) and not replica.placements and replica.replaces is None:
            planner.find_first(specs_drained(cluster, replica))


def _stopping(drain: Drain) -> list[Move]:
    """Those that end: only then is it known what place is taken by what is made instead of them."""
    return [move for move in drain.moves if move.state is MoveState.STOPPING]


def waiting_words(drain: Drain) -> str:
    stuck = blocked(drain)
    if stuck:
        return f"waits until everything can move: {_reasons(stuck)}"
    ending = "; ".join(f"{move.replica} of {move.model} stops: {move.why}" for move in _stopping(drain))
    return f"waits until it is known whether everything can move: {ending}"


def to_move(replicas: Iterable[Replica], node: str) -> list[Replica]:
    """Replicas that hold a place on the node, if with one of several ranks alone; in the order in which they move: the
    largest first, while what is free is least broken up."""
    here = [replica for replica in replicas if any(each.node == node for each in replica.placements)]
    return sorted(here, key=lambda replica: (*_smallness(replica), replica.id))


def _smallness(replica: Replica) -> tuple[int, int, int]:
    profile = replica.profile
    return (-profile.nodes, -profile.gpus_per_node, -(profile.memory_bytes or 0)) if profile is not None else (0, 0, 0)


def may_stop_first(drain: Drain, replica: Replica) -> bool:
    """True where the operator lets it stop before there is another place for it."""
    return drain.force or replica.model in drain.allow_downtime


def _reasons(stuck: Iterable[Move]) -> str:
    return "; ".join(
        f"{move.replica} of {move.model} {'' if move.lost else 'has no other place: '}{move.why}" for move in stuck
    )


def _move(cluster: Cluster, planner: Planner, drain: Drain, replica: Replica, move: Move) -> Move:
    specs = specs_drained(cluster, replica)
    beside = replacement(cluster, replica)
    if replica.state in LEAVING or not specs:
        planner.release(replica)
        return replace(move, why=f"leaves anyway: {replica.why}")
    spec = specs[0]
    if beside is not None and beside.placements and drain.node not in nodes_of(beside):
        planner.release(replica)
        return replace(
            move,
            targets=nodes_of(beside),
            weights_there=beside.profile is None
            or planner.holds_weights(spec, Placed(beside.profile, beside.placements)),
            replacement=beside.id,
            why=f"{beside.id} takes over from it",
        )
    if not has_served(replica):
        return _move_unready(cluster, planner, drain, replica, specs, move)
    failed = Before(failed_on=move.failed_on)
    found = planner.find_first(specs, failed)
    if found is not None:
        planner.release(replica)
        return _to(planner, move, *found)
    summary = planner.summary(spec)
    if not may_stop_first(drain, replica):
        return replace(move, state=MoveState.BLOCKED, why=summary)
    planner.release(replica)
    stopped_first = replace(move, downtime=True, why=f"stops before there is another place for it: {summary}")
    found = planner.find_first(specs, failed)
    return stopped_first if found is None else _to(planner, stopped_first, *found)


def _move_unready(
    cluster: Cluster, planner: Planner, drain: Drain, replica: Replica, specs: Sequence[ModelSpec], move: Move
) -> Move:
    """It serves nothing yet, so that it need not stay until there is another."""
    planner.release(replica)
    found = planner.find_first(specs)
    if found is not None:
        words = "has failed" if replica.state is ReplicaState.FAILED else "is not ready"
        return _to(planner, replace(move, why=f"{words}: it is started anew there"), *found)
    summary = planner.summary(specs[0])
    if original(cluster, replica) is not None or may_stop_first(drain, replica):
        return replace(move, why=f"is made anew once there is room for it: {summary}")
    return replace(move, state=MoveState.BLOCKED, why=summary)


def _as_it_was(before: Move | None, move: Move) -> Move:
    """Planned anew and still in the same state: it is so since then."""
    return move if before is None or before.state is not move.state else replace(move, since=before.since)


def _to(planner: Planner, move: Move, spec: ModelSpec, placed: Placed) -> Move:
    targets = tuple(placement.node for placement in placed.placements)
    return replace(move, targets=targets, weights_there=planner.holds_weights(spec, placed))


def _models(cluster: Cluster, names: Sequence[str]) -> tuple[str, ...]:
    """The models' own names, also where aliases were given."""
    own = {alias: spec.name for spec in cluster.catalog.models for alias in spec.aliases}
    own |= {spec.name: spec.name for spec in cluster.catalog.models}
    return tuple(sorted({own.get(name, name) for name in names}))


def _as_draining(cluster: Cluster, name: str, now: Instant) -> Cluster:
    """The cluster with its nodes judged by their silence up to now, and one of them closed to whatever is new."""
    nodes = {key: judged(cluster, node, now) for key, node in cluster.nodes.items()}
    node = nodes[name]
    if node.state not in (NodeState.LOST, NodeState.REVOKED):
        nodes[name] = replace(node, state=NodeState.DRAINING, why="it is being drained")
    return replace(cluster, nodes=nodes)
