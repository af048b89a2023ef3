"""What the admin API answers to a what-if: the same planner, run on a copy that is changed as asked."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.cluster.refusal import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfMove:
    """A replica that would run elsewhere."""

    replica: str
    model: str
    from_nodes: tuple[str, ...]
    to_nodes: tuple[str, ...]
    """By rank. Nodes that do not exist are called new-1, new-2 ..."""
    weights_there: bool
    """False: the weights would have to be loaded first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfUnplaced:
    """Replicas of a model that would find no place."""

    model: str
    replicas: int
    summary: str
    refusal: Refusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPlaced:
    """A replica that has no place now and would find one."""

    replica: str
    model: str
    to_nodes: tuple[str, ...]
    weights_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfView:
    changes: tuple[str, ...]
    """What was supposed, in words."""
    moves: tuple[WhatIfMove, ...]
    unplaced: tuple[WhatIfUnplaced, ...]
    new: tuple[WhatIfPlaced, ...]
