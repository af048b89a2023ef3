"""The other ranks of a replica, as the rank that serves uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class NoSuchRank(LookupError):
    """The message says which there are."""


class Ranks(Protocol):
    async def step(self) -> None:
        """One token's work on every other rank: returns when all have done theirs. Raises Gone where one never will."""

    async def strike(self, rank: int, fault: str | None) -> None:
        """Gives a fault (``KIND[:ARG]``, as it was checked here) to a rank above 0. Raises NoSuchRank, Gone."""

    def shown(self) -> Sequence[dict[str, Any]]:
        """Every other rank: ``rank``, ``address``, ``steps`` done."""


class Alone:
    """A replica on one node."""

    async def step(self) -> None:
        return

    async def strike(self, rank: int, fault: str | None) -> None:
        raise NoSuchRank(f"there is no rank {rank}: this replica runs on one node, as rank 0")

    def shown(self) -> Sequence[dict[str, Any]]:
        return ()
