"""How the gateway stands with its control plane: which table it serves from, and whether that is still renewed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Standing:
    """Times are wall-clock Unix times, for people and metrics; 0 where there was none."""

    version: int = 0
    epoch: int = 0
    applied_at: float = 0.0
    """When the table last came, or was last confirmed, from a control plane."""
    lease_s: float = 30.0
    from_file: bool = False
    """The table is the one that was on disk at the start: no control plane has confirmed it since."""
    connected: bool = False
    connected_since: float = 0.0
    words: str = "no control plane has been reached yet"
    """Why it is not connected."""

    @property
    def has_table(self) -> bool:
        return self.applied_at > 0.0

    def stale_since(self, now: float) -> float | None:
        """Since when the table's lease has been over; None while it is renewed."""
        if not self.has_table or self.connected:
            return None
        end = self.applied_at + self.lease_s
        return end if now >= end or self.from_file else None

    def scalars(self, now: float) -> Iterable[tuple[str, str, float]]:
        """Name, help, value."""
        age = now - self.applied_at if self.has_table else -1.0
        yield "llmgw_gateway_table_version", "Version of the routing table served from; 0: none.", self.version
        yield "llmgw_gateway_table_age_seconds", "Since a control plane last sent or confirmed it; -1: never.", age
        yield (
            "llmgw_gateway_table_stale",
            "1 where the table's lease is over.",
            float(self.stale_since(now) is not None),
        )
        yield "llmgw_gateway_connected", "1 while a control plane is connected.", float(self.connected)
