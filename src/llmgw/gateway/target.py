"""A replica as the gateway sees it: how to reach it, what is in flight there, and whether it can be reached at all."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmgw.cluster.model import Endpoint

if TYPE_CHECKING:
    from llmgw.gateway.leaving import Departures
    from llmgw.gateway.routing import Line
    from llmgw.gateway.upstream import EngineConnection

SUSPECT = 1 << 30
"""Added to the load of a target that is not preferred, so that it comes after all that are."""
UNLIMITED = 1 << 30
COOLING_FIRST_S = 1.0
COOLING_MOST_S = 10.0


class Target:
    """One endpoint of the table, for as long as the table names it: replica, generation and address together.

    ``in_flight`` counts from the choice of this target to the answer's last byte.
    """

    __slots__ = (
        "cooling_until",
        "departures",
        "endpoint",
        "failures",
        "gone",
        "head",
        "heard",
        "host",
        "idle",
        "in_flight",
        "in_peace",
        "limit",
        "line",
        "penalty",
        "port",
    )

    def __init__(self, endpoint: Endpoint, line: Line) -> None:
        self.line = line
        self.in_flight = 0
        self.idle: list[EngineConnection] = []
        self.failures = 0
        self.cooling_until = 0.0
        """Monotonic time before which it is not chosen, because it could not be reached."""
        self.heard = False
        """An answer of it has gone on since its last failure: it is up, whatever became of that one request."""
        self.gone = False
        """The table names it no longer: nothing new is sent."""
        self.in_peace = False
        """It is gone because it is wanted no longer: what is in flight there finishes."""
        self.departures: Departures | None = None
        """Who counts, once it is gone."""
        self.update(endpoint)

    def update(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.limit = UNLIMITED if endpoint.max_concurrency is None else endpoint.max_concurrency
        self.penalty = 0 if endpoint.preferred else SUSPECT
        url = urlsplit(endpoint.url)
        self.host = url.hostname or ""
        self.port = url.port or 80
        self.head = b" HTTP/1.1\r\nhost: %b\r\n" % url.netloc.encode("ascii", "replace")
        """What stands between the request's target and its own headers, the replica's key included."""
        if endpoint.api_key:
            self.head += b"authorization: Bearer %b\r\n" % endpoint.api_key.encode()

    def take(self, now: float) -> None:
        """Counts a request in. Every take is followed by exactly one ``release``."""
        self.in_flight += 1
        if self.failures:
            # The one request that tries whether it is back; others wait for what comes of it.
            self.cooling_until = now + COOLING_FIRST_S

    def release(self) -> None:
        self.in_flight -= 1
        if self.departures is not None:
            self.departures.released(self)
        if self.line.waiting:
            self.line.wake()

    def ended(self, *, broken: bool) -> None:
        """An answer has been passed on, or its first part only (``broken``). Its ``release`` follows."""
        if self.departures is not None:
            self.departures.ended(self, broken=broken)

    def unreachable(self, now: float) -> None:
        """A connection failed, or the engine gave no answer in time, or refused the replica's key.

        It is left alone for a while, longer each time.
        """
        self.failures += 1
        self.heard = False
        self.cooling_until = now + min(COOLING_FIRST_S * 2.0 ** min(self.failures - 1, 10), COOLING_MOST_S)

    def connecting(self, now: float, within_s: float) -> None:
        """A connection is under way, and fails after that time. Where the last one did, no other is tried beside it."""
        if self.failures:
            self.cooling_until = now + within_s + COOLING_FIRST_S

    def connected(self, now: float) -> None:
        """It takes connections. Whether it answers is not known yet, and may take long to know."""
        if self.failures:
            self.cooling_until = now + COOLING_FIRST_S

    def answered(self) -> None:
        """The replica's own engine answered, whatever the status."""
        if self.failures:
            self.failures = 0
            self.cooling_until = 0.0
            if self.line.waiting:
                self.line.wake()

    def idle_connection(self, now: float, idle_s: float) -> EngineConnection | None:
        """The connection that was used last, where the engine has surely not closed it for being idle."""
        while self.idle:
            connection = self.idle.pop()
            if now - connection.idle_since <= idle_s:
                return connection
            connection.close()
        return None

    def close_idle(self, before: float) -> None:
        """Closes connections that are idle since before that time."""
        if self.idle and (self.gone or self.idle[0].idle_since < before):
            keep = [] if self.gone else [each for each in self.idle if each.idle_since >= before]
            for connection in [each for each in self.idle if each not in keep]:
                connection.close()
            self.idle = keep

    def retire(self) -> None:
        self.gone = True
        self.close_idle(0.0)
