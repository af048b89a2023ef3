"""Who leads: the rules of the lease, the same in every implementation. Times are of the store's clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmgw.store.base import Lead


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The one row that says who leads. ``renewed_at`` is wall-clock time; a lease that was resigned has no length."""

    epoch: int = 0
    holder: str = ""
    renewed_at: float = 0.0
    lease_s: float = 0.0

    def is_live(self, now: float) -> bool:
        return now < self.renewed_at + self.lease_s

    def taken(self, holder: str, now: float, lease_s: float, *, lowest_epoch: int) -> Lease:
        epoch = max(self.epoch + 1, lowest_epoch)
        return Lease(epoch=epoch, holder=holder, renewed_at=now, lease_s=lease_s)

    def seen_at(self, now: float) -> Lease:
        """As far as a lease can still reach where the clock was set back since it was renewed."""
        return self if self.renewed_at <= now else replace(self, renewed_at=now)


def may_take(lease: Lease, holder: str, now: float, *, alone: bool) -> bool:
    return alone or lease.holder in ("", holder) or not lease.is_live(now)


def lead_after(before: Lease, taken: Lease) -> Lead:
    return Lead(epoch=taken.epoch, previous=before.holder, taken_over=before.holder not in ("", taken.holder))
