"""The words for a leader that was deposed."""

from __future__ import annotations

from llmgw.store.base import Fenced


def fenced(epoch: int, leader_epoch: int, holder: str) -> Fenced:
    """For a write with ``epoch`` while ``holder`` leads with ``leader_epoch`` (0: nobody ever led)."""
    leader = f"{holder!r} leads with epoch {leader_epoch}" if leader_epoch > 0 else "nobody leads yet"
    return Fenced(
        f"a write of leader epoch {epoch} was refused, and nothing was written: {leader}. "
        "This control plane no longer leads; it must take the lead anew before it writes"
    )
