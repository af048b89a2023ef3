"""Replicas that the table names no longer, and the requests that are still at them.

A drain waits for these counts: they are told to the control plane whenever they change, until it has heard of a 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from llmgw.cluster.model import Route, Traffic
from llmgw.gateway.target import Target

TOLD_FOR_S = 60.0
"""How long a replica is still told of once the control plane was told that nothing is in flight there."""


class Departure:
    """One replica that left the table. Requests are counted from then on."""

    __slots__ = ("broken", "finished", "told_at")

    def __init__(self) -> None:
        self.finished = 0
        self.broken = 0
        self.told_at: float | None = None
        """Monotonic time at which a 0 was first told."""


class Departures:
    """``changed`` is called at each change of a count; True: one has fallen to 0. Used on the gateway's loop."""

    def __init__(self) -> None:
        self.changed: Callable[[bool], None] = _nobody_asks
        self.targets: set[Target] = set()
        """Those with requests in flight, of former generations too."""
        self._left: dict[str, Departure] = {}

    def take(self, retired: Iterable[Target], routes: Iterable[Route]) -> None:
        """A table has been taken up that does without ``retired``; ``routes`` are its own."""
        named: set[str] = set()
        draining: set[str] = set()
        for route in routes:
            named.update(endpoint.replica for endpoint in route.endpoints)
            draining.update(route.draining)
        for replica in [replica for replica in self._left if replica in named]:
            del self._left[replica]
        for target in retired:
            target.departures = self
            if target.in_flight:
                self.targets.add(target)
            if target.endpoint.replica not in named:
                self._left[target.endpoint.replica] = Departure()
        for target in self.targets:
            # A model that is served no longer has no other replica to go to.
            target.in_peace = target.line.removed or target.endpoint.replica in draining

    def traffic(self, served: Iterable[Target] = ()) -> dict[str, Traffic]:
        """By replica id: those that left, and of ``served`` those with requests in flight."""
        in_flight = Counter[str]()
        for target in self.targets:
            in_flight[target.endpoint.replica] += target.in_flight
        told = {
            replica: Traffic(in_flight=in_flight[replica], finished=left.finished, broken=left.broken)
            for replica, left in self._left.items()
        }
        busy = Counter[str]()
        for target in served:
            if target.in_flight:
                replica = target.endpoint.replica
                busy[replica] += target.in_flight
                told[replica] = Traffic(in_flight=busy[replica] + in_flight[replica])
        return told

    def told(self) -> None:
        """What ``traffic`` says has been sent to the control plane."""
        now = time.monotonic()
        busy = {target.endpoint.replica for target in self.targets}
        for replica, left in list(self._left.items()):
            if replica in busy:
                continue
            if left.told_at is None:
                left.told_at = now
            elif now - left.told_at >= TOLD_FOR_S:
                del self._left[replica]

    @property
    def in_flight(self) -> int:
        return sum(target.in_flight for target in self.targets)

    # Told by the targets that left

    def ended(self, target: Target, *, broken: bool) -> None:
        """A request's answer has been passed on. ``broken``: not all of it. Its ``released`` follows."""
        left = self._left.get(target.endpoint.replica)
        if left is None:
            return
        if broken:
            left.broken += 1
        else:
            left.finished += 1

    def released(self, target: Target) -> None:
        """A request is at ``target`` no longer."""
        if not target.in_flight:
            self.targets.discard(target)
        replica = target.endpoint.replica
        if replica in self._left:
            self.changed(not any(other.endpoint.replica == replica for other in self.targets))


def _nobody_asks(to_zero: bool) -> None:
    pass
