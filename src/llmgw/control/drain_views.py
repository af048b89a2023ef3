"""What the admin API answers about drains and the brake. Times are RFC 3339 UTC, durations seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmgw.cluster.model import Brake, Cluster, Drain, Move, MoveState
from llmgw.control.times import rfc3339


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """One replica of a drain."""

    replica: str
    model: str
    state: str
    """pending, starting, shifting, finishing, stopping, moved, blocked."""
    why: str
    """What is waited for, or what is short."""
    targets: tuple[str, ...]
    """Nodes that the plan chose, by rank; empty where none could be found."""
    weights_there: bool
    """False: the target loads the weights first."""
    downtime: bool
    """It is stopped before there is another place for it: an operator allowed that."""
    replacement: str | None
    since: str | None
    """When ``state`` began; None in a plan that is not carried out."""
    seconds: dict[str, float]
    """What each phase took so far, by the name of its state."""
    in_flight: int
    """Requests that gateways have open at the original, once it has left their tables."""
    finished: int
    """Requests that ended whole since the original left the table."""
    broken: int
    """Requests that ended in an error after their first byte had been sent on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView:
    """A plan (``planned``), or a drain that is being carried out."""

    node: str
    node_state: str
    planned: bool
    """True: only a plan; nothing was changed by asking for it."""
    state: str
    """waiting (something can't be moved yet; all serve on), moving, done."""
    why: str
    refusal: str | None
    """Why it is not carried out as it stands, and what the choices are; None: it can be."""
    since: str
    in_flight_s: float
    """How long requests in flight may take at each original."""
    allow_downtime: tuple[str, ...]
    force: bool
    wait: bool
    moves: tuple[MoveView, ...]
    counts: dict[str, int]
    """Moves by state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeView:
    """So many nodes are silent at once that none of them is judged lost."""

    since: str
    silent: tuple[str, ...]
    words: str
    released: bool
    """An operator said that they are gone indeed."""


def drain_view(cluster: Cluster, drain: Drain, *, planned: bool = False, refusal: str | None = None) -> DrainView:
    node = cluster.nodes.get(drain.node)
    return DrainView(
        node=drain.node,
        node_state=str(node.state) if node else "unknown",
        planned=planned,
        state=drain.state,
        why=drain.why,
        refusal=refusal,
        since=rfc3339(drain.since),
        in_flight_s=cluster.in_flight_s if drain.in_flight_s is None else drain.in_flight_s,
        allow_downtime=drain.allow_downtime,
        force=drain.force,
        wait=drain.wait,
        moves=tuple(_move_view(cluster, move) for move in drain.moves),
        counts={str(state): number for state, number in Counter(move.state for move in drain.moves).items()},
    )


def drain_views(cluster: Cluster) -> tuple[DrainView, ...]:
    return tuple(drain_view(cluster, drain) for _, drain in sorted(cluster.drains.items()))


def brake_view(brake: Brake | None) -> BrakeView | None:
    if brake is None:
        return None
    return BrakeView(since=rfc3339(brake.since), silent=brake.silent, words=brake.words, released=brake.released)


def _move_view(cluster: Cluster, move: Move) -> MoveView:
    left = move.state in (MoveState.FINISHING, MoveState.STOPPING)
    return MoveView(
        replica=move.replica,
        model=move.model,
        state=move.state,
        why=move.why,
        targets=move.targets,
        weights_there=move.weights_there,
        downtime=move.downtime,
        replacement=move.replacement,
        since=rfc3339(move.since) if move.since else None,
        seconds=dict(move.seconds),
        in_flight=_in_flight(cluster, move.replica) if left else 0,
        finished=move.finished,
        broken=move.broken,
    )


def _in_flight(cluster: Cluster, replica: str) -> int:
    return sum(
        gateway.traffic[replica].in_flight for gateway in cluster.gateways.values() if replica in gateway.traffic
    )
