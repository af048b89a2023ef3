"""What the admin API answers to a what-if: the same planner, run on a copy that is changed as asked."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.cluster.refusal import Refusal
from llmgw.cluster.what_if import WhatIf


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfMove:
    """A replica that would run elsewhere."""

    replica: str
    model: str
    from_nodes: tuple[str, ...]
    to_nodes: tuple[str, ...]
    """By rank. Nodes that do not exist have names of their own: new-1, new-2 ..."""
    fabric: str | None
    weights_there: bool
    """False: the weights would have to be loaded first."""
    why: str
    downtime: bool
    """True where there is no room for its replacement beside it: it has to stop first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfUnplaced:
    """Replicas of a model that would find no place."""

    model: str
    replicas: int
    already: int
    """How many of them have none as things are either."""
    summary: str
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPlaced:
    """A replica that has no place as things are and would find one."""

    replica: str
    model: str
    to_nodes: tuple[str, ...]
    fabric: str | None
    weights_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfStopped:
    """A replica that would not be wanted any more."""

    replica: str
    model: str
    nodes: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfView:
    changes: tuple[str, ...]
    """What was supposed, in words."""
    moves: tuple[WhatIfMove, ...]
    unplaced: tuple[WhatIfUnplaced, ...]
    new: tuple[WhatIfPlaced, ...]
    stops: tuple[WhatIfStopped, ...]


def what_if_view(outcome: WhatIf) -> WhatIfView:
    return WhatIfView(
        changes=outcome.supposed,
        moves=tuple(
            WhatIfMove(
                replica=move.replica,
                model=move.model,
                from_nodes=move.from_nodes,
                to_nodes=move.to_nodes,
                fabric=move.fabric,
                weights_there=move.weights_there,
                why=move.why,
                downtime=move.downtime,
            )
            for move in outcome.moves
        ),
        unplaced=tuple(
            WhatIfUnplaced(
                model=short.model,
                replicas=short.replicas,
                already=short.already,
                summary=short.refusal.summary,
                refusal=short.refusal,
            )
            for short in outcome.unplaced
        ),
        new=tuple(
            WhatIfPlaced(
                replica=fits.replica,
                model=fits.model,
                to_nodes=fits.to_nodes,
                fabric=fits.fabric,
                weights_there=fits.weights_there,
            )
            for fits in outcome.new
        ),
        stops=tuple(
            WhatIfStopped(replica=stop.replica, model=stop.model, nodes=stop.nodes, why=stop.why)
            for stop in outcome.stops
        ),
    )
