"""Which replica takes a request, and who waits for one.

One ``Line`` per model: its targets and the requests that wait for one of them, in order. A request waits where every
target is full, or where there is none that can be reached; the table's next version, a request that ends and the
passing of time wake it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from llmgw.cluster.model import Endpoint, Route
from llmgw.gateway.errors import RETRY_AFTER_BUSY_S, RETRY_AFTER_DOWN_S, ApiError, unavailable
from llmgw.gateway.target import SUSPECT, Target


class Waiter(Protocol):
    """A request that may have to wait."""

    not_before: dict[Target, float] | None
    """Targets that turned this request away, with the time before which they are not asked again."""

    def dispatch(self, target: Target, now: float) -> None:
        """Go: ``target`` is counted in for you."""

    def expire(self, now: float, busy: bool) -> bool:
        """Whether the wait has lasted long enough (then you have answered). ``busy``: some target is up, but full."""

    def removed(self) -> None:
        """The table names the model no longer."""


class Line:
    """A model's targets and its queue. ``label`` is its name in metrics."""

    __slots__ = ("label", "limit", "removed", "route", "targets", "turn", "waiting")

    def __init__(self, route: Route, limit: int) -> None:
        self.route = route
        self.label = route.model
        self.limit = limit
        self.targets: list[Target] = []
        self.turn = 0
        self.removed = False
        """The table names the model no longer."""
        self.waiting: dict[Waiter, None] = {}

    @property
    def full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self.waiting) >= self.limit

    @property
    def in_flight(self) -> int:
        return sum(target.in_flight for target in self.targets)

    def choose(self, waiter: Waiter, now: float) -> Target | None:
        """Least outstanding among the targets that can take this request, ties in turn; suspects come last."""
        targets = self.targets
        count = len(targets)
        if not count:
            return None
        self.turn = turn = (self.turn + 1) % count
        not_before = waiter.not_before
        best: Target | None = None
        lowest = SUSPECT << 1
        for at in range(turn - count, turn):
            target = targets[at]
            load = target.in_flight
            if load >= target.limit or target.cooling_until > now:
                continue
            load += target.penalty
            if load >= lowest:
                continue
            if not_before is not None and not_before.get(target, 0.0) > now:
                continue
            best, lowest = target, load
        return best

    @property
    def busy(self) -> bool:
        """Some target is up, but as full as it may be. One that failed is not up until it has answered again, or an
        answer has gone on that it had begun."""
        return any(not target.failures or target.heard for target in self.targets)

    def wake(self) -> None:
        """Sends off whoever can go, first come first served."""
        now = time.monotonic()
        for waiter in list(self.waiting):
            if waiter not in self.waiting:
                continue  # it left while another was being sent off
            target = self.choose(waiter, now)
            if target is not None:
                del self.waiting[waiter]
                target.take(now)
                waiter.dispatch(target, now)
            elif not waiter.not_before:
                return  # nothing is free for anybody

    def tick(self, now: float) -> None:
        if not self.waiting:
            return
        self.wake()
        busy = self.busy
        for waiter in list(self.waiting):
            if waiter.expire(now, busy):
                self.waiting.pop(waiter, None)

    def update(self, route: Route) -> list[Target]:
        """Takes the model's route up. Returns the targets that it names no longer."""
        known = {_identity(target.endpoint): target for target in self.targets}
        targets = []
        for endpoint in route.endpoints:
            target = known.pop(_identity(endpoint), None)
            if target is None:
                target = Target(endpoint, self)
            elif target.endpoint != endpoint:
                target.update(endpoint)
            targets.append(target)
        self.route = route
        self.targets = targets
        for target in known.values():
            target.retire()
        return list(known.values())

    def retire(self) -> list[Target]:
        """The model is served no longer. Returns the targets that it had."""
        self.removed = True
        retired, self.targets = self.targets, []
        for target in retired:
            target.retire()
        for waiter in list(self.waiting):
            self.waiting.pop(waiter, None)
            waiter.removed()
        return retired


def _identity(endpoint: Endpoint) -> tuple[str, int, str]:
    return endpoint.replica, endpoint.generation, endpoint.url


def no_replica(line: Line, name: str, waited_s: float | None, last_failure: str) -> ApiError:
    """What a request for ``name`` is told that no replica takes. ``waited_s``: None where it was not let wait."""
    waited = "" if waited_s is None else f" within {waited_s:.0f} s"
    busy = line.busy
    if busy and waited_s is None:
        return ApiError(
            429,
            f"model {name!r}: all {len(line.targets)} replicas are at work and {len(line.waiting)} requests wait "
            f"already (the limit is {line.limit}): send it again later",
            type="rate_limit_exceeded",
            code="queue_full",
            retry_after_s=RETRY_AFTER_BUSY_S,
        )
    if busy:
        words = f"model {name!r}: none of its {len(line.targets)} replicas became free{waited}"
        return unavailable(words, "queue_timeout", RETRY_AFTER_BUSY_S)
    why = last_failure or line.route.why_none or "none is ready"
    full = f" ({line.limit} requests wait for one already)" if waited_s is None else ""
    words = f"model {name!r} has no replica that can answer{waited}{full}: {why}"
    return unavailable(words, "no_ready_replica", RETRY_AFTER_DOWN_S)


class Router:
    """Lines by name. ``by_name`` holds models' names and aliases."""

    def __init__(self, queue: int) -> None:
        self.queue = queue
        self.lines: dict[str, Line] = {}
        self.by_name: dict[str, Line] = {}

    def take_queue(self, queue: int) -> None:
        """From now on this many requests may wait at each model; those that wait already are not sent away."""
        self.queue = queue
        for line in self.lines.values():
            line.limit = queue

    def update(self, routes: Iterable[Route], names: dict[str, Route]) -> list[Target]:
        """Takes a table up: targets that stay keep their counts and connections, and whoever waits is woken.

        Returns the targets that this table names no longer.
        """
        wanted = {route.model: route for route in routes}
        retired: list[Target] = []
        for model in [model for model in self.lines if model not in wanted]:
            retired += self.lines.pop(model).retire()
        for model, route in wanted.items():
            line = self.lines.get(model)
            if line is None:
                line = self.lines[model] = Line(route, self.queue)
            retired += line.update(route)
        self.by_name = {name: self.lines[route.model] for name, route in names.items()}
        for line in list(self.lines.values()):
            if line.waiting:
                line.wake()
        return retired

    def tick(self, now: float, engine_idle_s: float) -> None:
        for line in list(self.lines.values()):
            line.tick(now)
            for target in line.targets:
                target.close_idle(now - engine_idle_s)
