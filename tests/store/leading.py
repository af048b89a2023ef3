"""Taking the lead where the lease is not what is tested."""

from __future__ import annotations

from llmgw.store.base import Store

LEASE_S = 30.0


async def lead(store: Store, holder: str = "a") -> int:
    """Takes the lead whoever has it; returns the epoch."""
    taken = await store.lead(holder, lease_s=LEASE_S, alone=True)
    assert taken is not None
    return taken.epoch
