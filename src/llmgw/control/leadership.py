"""Who of several control planes leads: one at a time, by a lease in the store that is renewed while it lasts.

The lease decides who acts; the epoch that comes with it makes sure. Whoever slept through the end of its lease can
write nothing any more, and no peer that has seen a newer epoch listens to it.
"""

from __future__ import annotations

import asyncio

import structlog

from llmgw.control.clock import Clock, system_clock
from llmgw.store.base import Fenced, Lead, Store, StoreError

log = structlog.get_logger()

LEASE_S = 10.0
"""How long a leader that ended without a word keeps the next one waiting."""


class Deposed(Exception):
    """This control plane does not lead any more: it may write nothing, and tell nobody what to do."""


class Leadership:
    """The lead of one control plane. ``holder`` names it, and is the same after a restart.

    ``alone``: nothing else can have the store open, so that a lease that was not renewed in time is lost to nobody.
    """

    def __init__(
        self, store: Store, holder: str, *, lease_s: float = LEASE_S, alone: bool = False, clock: Clock = system_clock
    ) -> None:
        self.holder = holder
        self.lease_s = lease_s
        self._store = store
        self._alone = alone
        self._clock = clock
        self._lead: Lead | None = None
        self._held_since_s = 0.0

    @property
    def lead(self) -> Lead:
        if self._lead is None:
            raise Deposed(f"{self.holder} does not lead")
        return self._lead

    @property
    def epoch(self) -> int:
        return self.lead.epoch

    async def take(self) -> Lead | None:
        """Take the lead; None while another one's lease lasts."""
        now_s = self._clock().monotonic_s
        self._lead = await self._store.lead(self.holder, lease_s=self.lease_s, alone=self._alone)
        self._held_since_s = now_s
        return self._lead

    async def wait(self) -> Lead:
        """Take the lead as soon as nobody else has it."""
        while (lead := await self.take()) is None:
            log.info("another control plane leads; waiting for the end of its lease", lease_s=self.lease_s)
            await asyncio.sleep(self.lease_s / 3)
        return lead

    async def hold(self) -> None:
        """Renew the lease where a third of it is over.

        Raises Deposed where it is lost, or may be by now; StoreError where it can't be renewed but still lasts.
        """
        now_s = self._clock().monotonic_s
        if now_s < self._held_since_s + self.lease_s / 3:
            return
        try:
            await self._store.renew(self.epoch, self.lease_s)
        except Fenced as error:
            raise self._deposed(f"another control plane has taken the lead: {error}") from error
        except StoreError as error:
            # As of now: the attempt itself may have outlasted the lease.
            unrenewed_s = self._clock().monotonic_s - self._held_since_s
            if unrenewed_s >= self.lease_s and not self._alone:
                words = f"the lease could not be renewed for {unrenewed_s:.1f} s: {error}"
                raise self._deposed(words) from error
            raise
        # As of before it was asked for: the store's lease can't have begun earlier.
        self._held_since_s = now_s

    async def resign(self) -> None:
        """Let another one lead at once. Does nothing where this one does not lead."""
        if (lead := self._lead) is not None:
            self._lead = None
            await self._store.resign(lead.epoch)

    def _deposed(self, why: str) -> Deposed:
        self._lead = None
        return Deposed(f"{why}; this one stops and changes nothing")
