"""Drains as they are carried out: which replica is next, how far its move is, and what became of it in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from llmgw.cluster.beside import Round, nodes_of, original
from llmgw.cluster.drain import UNDER_WAY, blocked, lost_words, may_stop_first, planned, to_move, waiting_words
from llmgw.cluster.lifecycle import ENDED, RUNNING, has_served, is_heard, observed, start_draining
from llmgw.cluster.model import (
    Cluster,
    Drain,
    DrainState,
    Instant,
    Move,
    MoveState,
    Node,
    NodeState,
    Replica,
    ReplicaState,
)
from llmgw.cluster.placement import Before
from llmgw.cluster.quiet import still_sending
from llmgw.cluster.starting import specs_drained
from llmgw.cluster.step import Step
from llmgw.cluster.wording import clock, count

TRY_AGAIN_S = 60.0
"""How long after a replacement has failed for good another one is tried."""
_PHASES = tuple(state.value for state in UNDER_WAY)


def carry_on(turn: Round) -> None:
    """Take every drain as far as it gets in this step."""
    step = turn.step
    for key in sorted(step.drains):
        node = step.nodes.get(key)
        if node is None or node.state is NodeState.REVOKED:
            del step.drains[key]
            how = "removed" if node is None else "revoked"
            step.note("drain.ended", key, f"{key} is not drained any more: it has been {how}")
        else:
            before = step.drains[key]
            _take_back(step, before, node)
            after = _settled(step, node, _begun(turn, _followed(turn, before)))
            if after != before:
                step.drains[key] = after
                _tell(step, before, after)


def retry_times_s(cluster: Cluster, now: Instant) -> Iterator[float]:
    """Wall-clock times ahead at which another replacement is tried."""
    for drain in cluster.drains.values():
        for move in drain.moves:
            if _waits_to_retry(move, now):
                yield move.since + TRY_AGAIN_S


def _waits_to_retry(move: Move, now: Instant) -> bool:
    """After a replacement failed for good. Not for longer where the wall clock was set back meanwhile."""
    failed = move.state is MoveState.BLOCKED and move.replacement is not None
    return failed and move.since <= now.wall_s < move.since + TRY_AGAIN_S


def _take_back(step: Step, drain: Drain, node: Node) -> None:
    """What was placed on the node and not taken up by it, or forgotten before it was started, is not begun there any
    more: it is made elsewhere."""
    places = {move.replica for move in drain.moves if move.state is MoveState.PENDING and move.targets}
    for replica in to_move(step.replicas.values(), node.id):
        if replica.state not in RUNNING or node.session is None or has_served(replica):
            continue
        ranks = (rank for rank, placement in enumerate(replica.placements) if placement.node == node.id)
        if any(observed(node, replica, rank) is None for rank in ranks):
            start_draining(step, replica, f"{node.id} is to be drained, and has not begun with it")
        elif _is_held(replica, drain) and (replica.id in places or original(step, replica) is not None):
            start_draining(step, replica, f"{node.id} is to be drained, and its ranks were not started yet")


def _is_held(replica: Replica, drain: Drain) -> bool:
    """True of several ranks that are not started for as long as the drain waits. They are made elsewhere where there is
    a place; what was to take over from another is dropped else, so that whatever waits for that goes on."""
    together = len(replica.placements) > 1
    not_started = replica.state in (ReplicaState.PLACING, ReplicaState.PREPARING)
    return together and not_started and drain.state is DrainState.WAITING


# -- following what goes on


def _followed(turn: Round, drain: Drain) -> Drain:
    """The drain with its moves as the replicas stand, and a move for each replica that has none yet."""
    known = {move.replica: move for move in drain.moves}
    for replica in to_move(turn.step.replicas.values(), drain.node):
        known.setdefault(replica.id, Move(replica=replica.id, model=replica.model, since=turn.step.now.wall_s))
    moves = tuple(_follow(turn, drain, move) for move in known.values())
    state = drain.state
    if state is DrainState.DONE and any(move.state is not MoveState.MOVED for move in moves):
        state = DrainState.MOVING
    if state is DrainState.WAITING:
        return planned(turn.step.snapshot(), replace(drain, moves=moves), turn.step.now)
    return replace(drain, moves=moves, state=state)


def _follow(turn: Round, drain: Drain, move: Move) -> Move:
    step, now = turn.step, turn.step.now
    old = step.replicas.get(move.replica)
    if old is None or drain.node not in nodes_of(old):
        return _ended(step, move, old)
    if old.lost:
        return _become(replace(move, targets=(), lost=True), MoveState.BLOCKED, lost_words(drain.node), now)
    if old.state is ReplicaState.DRAINING:
        shifting = "; ".join(still_sending(step.cluster, old, now))
        if shifting:
            return _counted(step, _become(move, MoveState.SHIFTING, shifting, now))
        return _counted(step, _become(move, MoveState.FINISHING, "finishes its requests in flight", now))
    if old.state in (ReplicaState.STOPPING, ReplicaState.FAILED):
        return _counted(step, _become(move, MoveState.STOPPING, old.why, now))
    if move.lost:
        move = _become(replace(move, lost=False, replacement=None), MoveState.PENDING, "is back with its node", now)
    new = turn.replacement(old)
    # Where the drain waits, one that has a rank on the very node is no way off it; where it moves, that one is dropped.
    if new is not None and not (drain.state is DrainState.WAITING and drain.node in nodes_of(new)):
        words = f"{new.id} takes over from it: {new.why}"
        starting = replace(move, replacement=new.id, targets=nodes_of(new) or move.targets, failed_on=new.failed_on)
        return _become(starting, MoveState.STARTING, words, now)
    if old.id in turn.given_up:
        failed, words = turn.given_up[old.id]
        words += f"; another is tried at {clock(now.wall_s + TRY_AGAIN_S)}"
        return _become(replace(move, replacement=failed.id, failed_on=failed.failed_on), MoveState.BLOCKED, words, now)
    if move.state in (MoveState.PENDING, MoveState.BLOCKED):
        return move
    return _become(replace(move, replacement=None), MoveState.PENDING, "its replacement is gone", now)


def _ended(step: Step, move: Move, old: Replica | None) -> Move:
    if move.state is MoveState.MOVED:
        return move
    new = step.replicas.get(move.replacement) if move.replacement is not None else None
    if old is not None:
        words = f"left by itself: {old.state.value}" + "".join(f" on {node}" for node in nodes_of(old)[:1])
    elif new is not None:
        words = f"{new.id} on {', '.join(nodes_of(new))} took over" if new.placements else f"{new.id} took over"
    else:
        words = "has stopped"
    return _become(_counted(step, move), MoveState.MOVED, words, step.now)


def _become(move: Move, state: MoveState, why: str, now: Instant) -> Move:
    if state is move.state:
        return replace(move, why=why)
    seconds = dict(move.seconds)
    if move.state in UNDER_WAY:
        phase = move.state.value
        seconds[phase] = seconds.get(phase, 0.0) + max(now.wall_s - move.since, 0.0)
    return replace(move, state=state, why=why, since=now.wall_s, seconds=seconds)


def _counted(step: Step, move: Move) -> Move:
    """With the requests that ended since the original left the table. Gateways that start anew count from 0."""
    seen = [gateway.traffic.get(move.replica) for gateway in step.cluster.gateways.values()]
    finished = sum(traffic.finished for traffic in seen if traffic is not None)
    broken = sum(traffic.broken for traffic in seen if traffic is not None)
    return replace(move, finished=max(finished, move.finished), broken=max(broken, move.broken))


# -- taking up the next


def _begun(turn: Round, drain: Drain) -> Drain:
    """Begin the first move that can, where none is under way."""
    if drain.state is not DrainState.MOVING or any(move.state in UNDER_WAY for move in drain.moves):
        return drain
    moves = list(drain.moves)
    for index, move in enumerate(moves):
        old = turn.step.replicas.get(move.replica)
        if old is None or old.lost or move.state is MoveState.MOVED or drain.node not in nodes_of(old):
            continue
        if _waits_to_retry(move, turn.step.now):
            continue
        moves[index] = _begin(turn, drain, old, move)
        if moves[index].state in UNDER_WAY:
            break
    return replace(drain, moves=tuple(moves))


def _begin(turn: Round, drain: Drain, old: Replica, move: Move) -> Move:
    step, now = turn.step, turn.step.now
    reason = f"{drain.node} is being drained"
    specs = specs_drained(step.cluster, old)
    if not specs or not has_served(old):
        start_draining(step, old, reason)
        return _become(move, MoveState.STOPPING, reason, now)
    before = Before(() if move.downtime or move.failed_on else move.targets, failed_on=move.failed_on)
    made = next(filter(None, (turn.make(spec, old, reason, before) for spec in specs)), None)
    if made is not None:
        return _become(replace(move, replacement=made.id, downtime=False), MoveState.STARTING, made.why, now)
    short = turn.short_of(specs[0])
    if may_stop_first(drain, old):
        start_draining(step, old, f"{reason}, and it may stop before there is another place: {short}")
        return _become(replace(move, downtime=True, replacement=None), MoveState.SHIFTING, short, now)
    return _become(replace(move, replacement=None), MoveState.BLOCKED, _no_room(drain, old, short), now)


def _no_room(drain: Drain, old: Replica, short: str) -> str:
    return (
        f"there is no other place for it now: {short}; it is tried again whenever something changes, or "
        f"`llmgw ctl drain {drain.node} --allow-downtime {old.model}` lets it stop first"
    )


# -- the whole


def _settled(step: Step, node: Node, drain: Drain) -> Drain:
    stuck = blocked(drain)
    if drain.state is DrainState.WAITING:
        return replace(drain, why=waiting_words(drain))
    moved = sum(move.state is MoveState.MOVED for move in drain.moves)
    # What runs on a node that is not heard is not known, unless it was drained before: such a one may be switched off.
    is_known = is_heard(step.cluster, node, step.now) and node.state is not NodeState.LOST
    empty = _is_empty(step, node) if is_known else drain.state is DrainState.DONE
    if empty and moved == len(drain.moves):
        return replace(drain, state=DrainState.DONE, why=report(drain))
    of_all = f"{moved} of {count(len(drain.moves), 'replica')} moved"
    words = of_all if drain.moves else f"nothing is placed on {node.id}"
    words += "".join(
        f"; {move.replica} is {move.state.value}: {move.why}" for move in drain.moves if move.state in UNDER_WAY
    )
    words += "".join(f"; {move.replica} is blocked: {move.why}" for move in stuck)
    if node.state is NodeState.LOST:
        words += (
            f"; {node.id} is lost since {clock(node.since)}: it is drained once it is back, or "
            f"`llmgw ctl node remove {node.id}` forgets it"
        )
    elif moved == len(drain.moves) and not is_known:
        words += f"; {node.id} does not answer: whether it still runs anything is not known"
    elif moved == len(drain.moves) and (runs := _runs(node)):
        words += f"; {node.id} still runs {', '.join(runs)}"
    return replace(drain, state=DrainState.MOVING, why=words)


def _is_empty(step: Step, node: Node) -> bool:
    placed = any(node.id in nodes_of(replica) for replica in step.replicas.values())
    return not placed and not _runs(node)


def _runs(node: Node) -> list[str]:
    return [shard.id for shard in node.shards if shard.state not in ENDED]


def report(drain: Drain) -> str:
    """What became of the drain: replicas moved, those stopped without a replacement, and those lost before; requests
    finished and broken; seconds in each phase."""
    finished = sum(move.finished for move in drain.moves)
    broken = sum(move.broken for move in drain.moves)
    without = [move for move in drain.moves if move.replacement is None]
    lost = sum(move.lost for move in without)
    gone = len(without) - lost
    words = f"{count(len(drain.moves) - len(without), 'replica')} moved, "
    words += f"{gone} stopped without a replacement, " if gone else ""
    words += f"{lost} lost with a node, " if lost else ""
    words += f"{count(finished, 'request')} finished, {broken} broken"
    seconds: Counter[str] = Counter()
    for move in drain.moves:
        seconds.update({phase: taken for phase, taken in move.seconds.items() if phase in _PHASES})
    spent = ", ".join(f"{phase} {seconds[phase]:.1f} s" for phase in _PHASES if phase in seconds)
    return f"{words}; {spent}" if spent else words


def _tell(step: Step, before: Drain, after: Drain) -> None:
    node = after.node
    if after.state is not before.state:
        if after.state is DrainState.DONE:
            step.note("drain.done", node, f"{node} is drained: {after.why}")
        elif before.state is DrainState.WAITING:
            step.note("drain.moving", node, f"everything on {node} can move now: {after.why}")
    was = {move.replica: move.state for move in before.moves}
    for move in blocked(after) if after.state is DrainState.MOVING else ():
        if was.get(move.replica) is not MoveState.BLOCKED:
            step.note("drain.blocked", node, f"{move.replica} of {move.model} can't leave {node}: {move.why}")
