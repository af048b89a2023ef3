"""Taking the lead where the lease is not what is tested."""

from __future__ import annotations

from llmgw.control.clock import Clock, system_clock
from llmgw.control.leadership import Leadership
from llmgw.store.base import Store


async def leading(store: Store, holder: str = "test", clock: Clock = system_clock) -> Leadership:
    """Takes the lead whoever has it."""
    leadership = Leadership(store, holder, alone=True, clock=clock)
    await leadership.wait()
    return leadership
