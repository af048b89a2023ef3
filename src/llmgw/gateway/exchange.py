"""One request's life from its choice of a replica to its answer's last byte.

As long as no byte has reached the client, a request may go to another replica. It is counted in flight from the choice
of a target until it is let go, on every way that it can end.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import structlog

from llmgw.gateway.body import Asked
from llmgw.gateway.errors import (
    RETRY_AFTER_BUSY_S,
    ApiError,
    bad_gateway,
    gateway_timeout,
    normalised,
    unavailable,
)
from llmgw.gateway.headers import without
from llmgw.gateway.metrics import CLIENT_GONE, Meter
from llmgw.gateway.relay import CUT, LENGTH, WHOLE, Answer, Collector, Ending, Framing, PlainRelay, Relay, StreamRelay
from llmgw.gateway.request import Request, engine_head
from llmgw.gateway.routing import Line, no_replica
from llmgw.gateway.settings import GatewaySettings
from llmgw.gateway.target import Target
from llmgw.gateway.upstream import Connector, EngineConnection

BROKEN_MOST = 2
"""Replicas that may break, or fall silent, over one request. A prompt that kills engines must not be handed round."""
COLLECTED_BYTES = 64 * 1024
"""Of an error answer that is looked at before it is passed on; a larger one is passed on as it is."""
BACKOFF_MOST_S = 8.0

_SAID_OF_STREAMS = {b"cache-control"}
"""Headers of an engine that the gateway says itself for streams."""

_log = structlog.get_logger("llmgw.gateway")


class Client(Protocol):
    """The client's connection, as the exchange uses it."""

    paused: bool
    """Its buffer is full: it takes its answer more slowly than the engine gives it."""

    def write(self, data: bytes) -> None: ...

    def refuse(self, request: Request, error: ApiError) -> None:
        """Answers with an error object, and goes on to the next request."""

    def done(self) -> None:
        """The answer's last byte has been written."""

    def cut(self) -> None:
        """Ends the connection so that the answer can't be taken for whole."""

    def stalled(self, now: float, limit_s: float) -> bool:
        """Whether the client has taken nothing for that long."""


class Service(Protocol):
    settings: GatewaySettings
    connector: Connector
    meter: Meter
    active: set[Exchange]
    stopping: bool


class Exchange:
    __slots__ = (
        "_asked",
        "_broken",
        "_busy_since",
        "_client",
        "_collector",
        "_connecting",
        "_connection",
        "_deadline",
        "_down_since",
        "_first_at",
        "_held",
        "_let_in",
        "_line",
        "_quiet_since",
        "_relay",
        "_request",
        "_sent_at",
        "_service",
        "_spare",
        "_stale_tried",
        "_started",
        "_status",
        "_streams",
        "_target",
        "_tries",
        "_waiting_since",
        "_why",
        "not_before",
        "stirred",
    )

    def __init__(self, service: Service, client: Client, request: Request, line: Line, asked: Asked) -> None:
        self._service = service
        self._client = client
        self._request = request
        self._line = line
        self._asked = asked
        api = request.api
        self._streams = bool(asked.stream) and api is not None and api.streams
        """The client wants server-sent events."""
        self._started = now = time.monotonic()
        self._deadline = now + service.settings.timeouts.total_s
        self._target: Target | None = None
        self._connection: EngineConnection | None = None
        self._connecting = False
        self._relay: Relay | None = None
        """Set once bytes of an engine's answer go to the client: from here on there is no other try."""
        self._held = False
        """The head of a stream has come, and is held until its first byte: until then another replica may be tried."""
        self._collector: Collector | None = None
        self._spare: Answer | None = None
        self._sent_at = self._quiet_since = self._first_at = 0.0
        self._waiting_since = self._busy_since = self._down_since = 0.0
        self._let_in = False
        """It was at a replica that failed it: it waits for another though the queue is full."""
        self._broken = 0
        self._tries = 0
        self._stale_tried = False
        self._status = 0
        self._why = ""
        self.not_before: dict[Target, float] | None = None
        self.stirred = False

    # Choosing a replica

    def start(self) -> None:
        self._service.active.add(self)
        if self._line.waiting:
            self._wait(self._started)
        else:
            self._go(self._started)

    def _go(self, now: float) -> None:
        target = self._line.choose(self, now)
        if target is None:
            self._wait(now)
        else:
            target.take(now)
            self.dispatch(target, now)

    def _wait(self, now: float) -> None:
        line = self._line
        if line.removed:
            self.removed()
            return
        if self._service.stopping or (line.full and not self._let_in):
            self._no_answer(now, stopped_waiting=False)
            return
        if not self._waiting_since:
            self._waiting_since = now
        line.waiting[self] = None

    def dispatch(self, target: Target, now: float) -> None:
        self._target = target
        self._tries += 1
        self._busy_since = 0.0
        if self._tries > 1:
            self._service.meter.retries[self._line.label] += 1
        if target.idle:
            connection = target.idle_connection(now, self._service.settings.timeouts.engine_idle_s)
            if connection is not None:
                self._send(connection, now)
                return
        self._connect(target)

    def _connect(self, target: Target) -> None:
        self._connecting = True
        self._service.connector.connect(target, self)

    def connected(self, connection: EngineConnection) -> None:
        if self._connecting and self._target is connection.target:
            self._connecting = False
            self._send(connection, time.monotonic())
        else:
            connection.park()

    def unreachable(self, target: Target, why: str) -> None:
        now = time.monotonic()
        target.unreachable(now)
        self._engine_error("unreachable", target, why)
        if not self._connecting or self._target is not target:
            return
        self._connecting = False
        self._why = f"replica {target.endpoint.replica}: {why}"
        self._let_go()
        self._let_in = True
        self._go(now)

    def _send(self, connection: EngineConnection, now: float) -> None:
        self._connection = connection
        self._sent_at = self._quiet_since = now
        head = engine_head(self._request, connection.target.head, identity=self._streams)
        connection.send(self, head, self._request.body)

    # Waiting

    def expire(self, now: float, busy: bool) -> bool:
        settings = self._service.settings
        if busy:
            self._down_since = 0.0
            self._busy_since = self._busy_since or now
            over = now - self._busy_since >= settings.timeouts.queue_s
        else:
            self._busy_since = 0.0
            self._down_since = self._down_since or now
            over = now - self._down_since >= settings.hold_for_s
        if over:
            self._no_answer(now, stopped_waiting=True)
        return over

    def removed(self) -> None:
        name = self._asked.model
        self._refuse(ApiError(404, f"model {name!r} is served no longer", code="model_not_found", param="model"))

    def stop_waiting(self) -> None:
        """The gateway is stopping: whoever still waits is sent elsewhere."""
        if self in self._line.waiting:
            self._no_answer(time.monotonic(), stopped_waiting=False)

    def _no_answer(self, now: float, *, stopped_waiting: bool) -> None:
        """No replica takes it, and it has waited long enough or may not wait."""
        if self._spare is not None:
            self._pass_on(self._spare)
            return
        if self._service.stopping:
            error = unavailable("this gateway is stopping: send the request again", "stopping", RETRY_AFTER_BUSY_S)
        else:
            waited_s = now - self._waiting_since if stopped_waiting else None
            error = no_replica(self._line, self._asked.model, waited_s, self._why)
        self._refuse(error)

    # The engine's answer

    def on_head(self, connection: EngineConnection) -> None:
        if connection.target.failures and connection.status != 401:
            connection.target.answered()
        status = connection.status
        if status >= 400:
            if status == 401:
                self._key_refused(connection.target)
                return
            if status >= 500:
                self._service.meter.engine_errors[self._line.label, "status"] += 1
            self._collector = Collector(COLLECTED_BYTES)
            connection.sink = self._collect
        elif self._streams and status == 200 and not connection.content_encoding:
            self._stream(connection)
        else:
            self._plain(connection)

    def _stream(self, connection: EngineConnection) -> None:
        kind = connection.content_type.lower()
        if kind.startswith(b"application/json"):
            # Clients would read it as a stream without a single event: an empty success.
            self._abandon_engine()
            why = "answered a request for a stream with a JSON document"
            self._engine_error("broken", connection.target, why)
            self._refuse(bad_gateway(f"the engine {why}", "not_a_stream"))
            return
        if kind and not kind.startswith(b"text/event-stream"):
            self._plain(connection)
            return
        self._held = True
        connection.sink = self._first_piece

    def _first_piece(self, piece: bytes) -> None:
        self._first_at = time.monotonic()
        connection = self._connection
        if connection is not None:
            relay = self._stream_relay(connection)
            connection.sink = relay.feed
            relay.feed(piece)

    def _stream_relay(self, connection: EngineConnection) -> StreamRelay:
        lines = without(connection.header_lines, _SAID_OF_STREAMS)
        lines += (b"content-type: ", connection.content_type or b"text/event-stream; charset=utf-8")
        lines.append(b"\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n")
        framing = self._request.stream_framing
        self._held = False
        self._status = 200
        relay = StreamRelay(self._client, self._request.head(200, lines, framing), framing)
        self._relay = relay
        return relay

    def _plain(self, connection: EngineConnection) -> None:
        if connection.complete and connection.content_length is not None:
            # Most plain answers come whole in one read, and leave in one write.
            head, _ = self._plain_head(connection)
            self._client.write(head + connection.take_body())
            return
        relay = self._plain_relay(connection)
        connection.sink = relay.feed
        if not connection.has_more:
            relay.flush()

    def _plain_relay(self, connection: EngineConnection) -> PlainRelay:
        relay = PlainRelay(self._client, *self._plain_head(connection))
        self._relay = relay
        return relay

    def _plain_head(self, connection: EngineConnection) -> tuple[bytes, Framing]:
        lines = connection.header_lines
        lines += (b"content-type: ", connection.content_type or b"application/json", b"\r\n")
        self._status = status = connection.status
        if connection.content_length is not None or status in (204, 304):
            framing = LENGTH
            if connection.content_length is not None:
                lines += (b"content-length: ", connection.content_length, b"\r\n")
        else:
            framing = self._request.stream_framing
        if status in (429, 503):
            lines.append(b"retry-after: %b\r\n" % (connection.retry_after or b"%d" % RETRY_AFTER_BUSY_S))
        return self._request.head(status, lines, framing), framing

    def _collect(self, piece: bytes) -> None:
        collector, connection = self._collector, self._connection
        if collector is None or connection is None:
            return
        collector.feed(piece)
        if collector.over:
            self._collector = None
            relay = self._plain_relay(connection)
            connection.sink = relay.feed
            relay.feed(collector.body)

    def on_end(self, connection: EngineConnection) -> None:
        self._connection = None
        if self._collector is not None:
            self._collected(connection, self._collector.body)
        elif self._relay is not None:
            self._ended(self._relay.end())
        elif self._held:
            self._ended(self._stream_relay(connection).end())
        else:
            self._ended(WHOLE)

    def _collected(self, connection: EngineConnection, body: bytes) -> None:
        self._collector = None
        target, status = connection.target, connection.status
        if not connection.content_encoding:
            body = normalised(body) or body
        lines = connection.header_lines
        lines += (b"content-type: ", connection.content_type or b"application/json", b"\r\n")
        answer = Answer(status, lines, body, connection.retry_after)
        if status in (429, 503):
            self._turned_away(target, answer)
        else:
            self._pass_on(answer)

    def _turned_away(self, target: Target, answer: Answer) -> None:
        """The replica can't take it now. Neutral for the replica; another may."""
        now = time.monotonic()
        self._spare = answer
        self._let_go()
        if answer.status == 503:
            self._avoid(target, now + min(2.0 ** (self._tries - 1), BACKOFF_MOST_S))
            self._why = f"replica {target.endpoint.replica} answered 503"
            self._go(now)
            return
        self._avoid(target, math.inf)
        other = self._line.choose(self, now)
        if other is None:
            self._pass_on(answer)
        else:
            other.take(now)
            self.dispatch(other, now)

    def _key_refused(self, target: Target) -> None:
        """The replica's own engine has its key: this is another one, that got the port since the table was made."""
        now = time.monotonic()
        why = "refused the key that this gateway has for it"
        self._abandon_engine()
        self._engine_error("key_refused", target, why)
        self._why = f"replica {target.endpoint.replica} {why}"
        target.unreachable(now)
        avoided = self._avoid(target, math.inf)
        self._look_again()
        targets = self._line.targets
        if not targets or any(avoided.get(other, 0.0) < math.inf for other in targets):
            self._go(now)
        elif self._spare is not None:
            self._pass_on(self._spare)
        else:
            self._refuse(bad_gateway(self._why, "engine_key_refused"))

    def _avoid(self, target: Target, until: float) -> dict[Target, float]:
        """This request does not go to ``target`` before then. Returns all that it avoids."""
        if self.not_before is None:
            self.not_before = {}
        self.not_before[target] = until
        return self.not_before

    def _pass_on(self, answer: Answer) -> None:
        lines = answer.lines
        if answer.status in (429, 503):
            lines.append(b"retry-after: %b\r\n" % (answer.retry_after or b"%d" % RETRY_AFTER_BUSY_S))
        elif answer.retry_after is not None:
            lines.append(b"retry-after: %b\r\n" % answer.retry_after)
        lines.append(b"content-length: %d\r\n" % len(answer.body))
        self._status = answer.status
        self._client.write(self._request.head(answer.status, lines, LENGTH) + answer.body)
        self._ended(WHOLE)

    # Ends that were not meant

    def on_broken(self, connection: EngineConnection, why: str) -> None:
        self._connection = None
        self._collector = None
        target = connection.target
        if self._relay is not None:
            self._engine_error("truncated", target, why)
            self._ended(self._relay.broken(f"replica {target.endpoint.replica} failed: {why}", "engine_failed"))
            return
        now = time.monotonic()
        if connection.served and not self._stale_tried and not self._held:
            # An engine may close a connection for being idle just when it is used again: that is nobody's failure.
            self._stale_tried = True
            target.close_idle(math.inf)
            self._service.meter.retries[self._line.label] += 1
            self._connect(target)
            self.replica_left(now)
            return
        self._held = False
        self._engine_error("broken", target, why)
        self._failed(target, now, why, timed_out=False)

    def _failed(self, target: Target, now: float, why: str, *, timed_out: bool) -> None:
        """The replica had the request, and gave no answer."""
        target.unreachable(now)
        self._broken += 1
        self._look_again()
        self._why = f"replica {target.endpoint.replica}: {why}"
        if self._broken < BROKEN_MOST:
            other = self._line.choose(self, now)
            if other is not None:
                other.take(now)
                self.dispatch(other, now)
                return
            if not timed_out:
                self._wait(now)
                return
        if timed_out:
            self._refuse(gateway_timeout(f"no answer in time: {self._why}"))
        else:
            self._refuse(
                bad_gateway(
                    f"{self._broken} replicas failed while they had this request; last {self._why}", "engine_failed"
                )
            )

    def replica_left(self, now: float) -> bool:
        """Whether its replica is in the table no longer and this request, unanswered, has left it for another."""
        target = self._target
        if target is None or not target.gone or self._relay is not None or self._service.stopping:
            return False
        if self._connecting:
            # It has not been sent. Where nothing else serves the model, one that leaves in peace may still take it.
            if target.in_peace and not self._line.targets:
                return False
            self._connecting = False
            self._look_again()
            self._go(now)
            return True
        if target.in_peace:
            return False
        self._abandon_engine()
        self._service.meter.engine_errors[self._line.label, "gone"] += 1
        self._failed(target, now, "it failed or its node was lost while it had this request", timed_out=False)
        return True

    def _look_again(self) -> None:
        """Leaves its replica for another, or for the queue: it has been let in already, and waits anew."""
        self._let_go()
        self._let_in = True
        self._waiting_since = self._down_since = 0.0

    def check(self, now: float) -> None:
        """Looks at the limits; called every tick."""
        if self.stirred:
            self.stirred = False
            self._quiet_since = now
            if self._relay is not None and self._target is not None:
                self._target.heard = True
        timeouts = self._service.settings.timeouts
        if now >= self._deadline:
            self._time_out(now, f"its limit of {timeouts.total_s:g} s is over", last=True)
        elif self._client.paused:
            self._quiet_since = now
            if self._client.stalled(now, timeouts.client_stall_s):
                self._client.cut()
        elif self._connection is not None:
            self._check_engine(now)

    def _check_engine(self, now: float) -> None:
        timeouts = self._service.settings.timeouts
        if self._relay is None or not self._relay.begun:
            if self._streams and now - self._sent_at >= timeouts.first_token_s:
                self._time_out(now, f"the engine sent no first byte within {timeouts.first_token_s:g} s")
        elif now - self._quiet_since >= timeouts.between_tokens_s:
            self._time_out(now, f"the engine has sent nothing for {timeouts.between_tokens_s:g} s")

    def _time_out(self, now: float, why: str, *, last: bool = False) -> None:
        """``last``: there is no time for another replica."""
        target = self._target
        self._abandon_engine()
        if target is not None and not last:
            self._engine_error("timeout", target, why)
        if self._relay is not None:
            self._ended(self._relay.broken(why, "timeout"))
        elif target is None or last:
            self._refuse(gateway_timeout(f"no answer in time: {why}" + (f" ({self._why})" if self._why else "")))
        else:
            self._failed(target, now, why, timed_out=True)

    def _ended(self, ending: Ending) -> None:
        if ending is not WHOLE:
            self._service.meter.models[self._line.label].truncated += 1
        if self._target is not None:
            self._target.ended(broken=ending is not WHOLE)
        self._close()
        if ending is CUT:
            self._client.cut()
        else:
            self._client.done()

    def client_gone(self) -> None:
        """The client left: the engine must stop working for it."""
        self._abandon_engine()
        self._status = CLIENT_GONE
        self._close()

    def end_now(self) -> None:
        """The gateway stops and waits no longer."""
        self._abandon_engine()
        if self._relay is not None:
            self._ended(self._relay.broken("the gateway is stopping", "stopping"))
        else:
            self._refuse(
                unavailable("this gateway is stopping: send the request again", "stopping", RETRY_AFTER_BUSY_S)
            )

    # The client's pace

    def client_paused(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def client_resumed(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # Letting go

    def _refuse(self, error: ApiError) -> None:
        self._status = error.status
        self._close()
        self._client.refuse(self._request, error)

    def _abandon_engine(self) -> None:
        self._connecting = self._held = False
        self._collector = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    def _let_go(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.release()

    def _close(self) -> None:
        """Leaves every list that it is in. Once."""
        active, line = self._service.active, self._line
        if self not in active:
            return
        active.discard(self)
        if line.waiting:
            line.waiting.pop(self, None)
        stats = self._service.meter.count(line.label, self._status)
        stats.duration.observe(time.monotonic() - self._started)
        if self._first_at:
            stats.first_byte.observe(self._first_at - self._started)
        self._let_go()

    def _engine_error(self, kind: str, target: Target, why: str) -> None:
        self._service.meter.engine_errors[self._line.label, kind] += 1
        _log.warning(
            "engine error",
            kind=kind,
            model=self._line.label,
            replica=target.endpoint.replica,
            url=target.endpoint.url,
            why=why,
            request_id=self._request.request_id.decode(),
        )
