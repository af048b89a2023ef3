"""The gateway: its parts put together, its listener, and how it stops."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import structlog

from llmgw.cluster.model import Traffic
from llmgw.gateway import api
from llmgw.gateway.auth import authenticate
from llmgw.gateway.body import read_asked
from llmgw.gateway.errors import ApiError
from llmgw.gateway.exchange import Exchange
from llmgw.gateway.front import ClientConnection
from llmgw.gateway.leaving import Departures
from llmgw.gateway.metrics import OTHER, Gauges, Meter
from llmgw.gateway.request import Request
from llmgw.gateway.routing import Router
from llmgw.gateway.settings import GatewaySettings
from llmgw.gateway.standing import Standing
from llmgw.gateway.table import Table, allowed
from llmgw.gateway.upstream import Connector
from llmgw.link.messages import Routes
from llmgw.process.ports import port_holder

BACKLOG = 4096
TLS_HANDSHAKE_S = 10.0
CONNECTIONS_CHECKED_EVERY_S = 1.0

_log = structlog.get_logger("llmgw.gateway")


class StartError(Exception):
    """The gateway can't start; the message says why and what to do."""


class Gateway(Gauges):
    """Serves clients from a routing table that ``apply`` gives it.

    Everything happens on one event loop. ``start`` raises StartError; ``stop`` returns when nothing is in flight any
    more, or the limit is over.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.timeouts = settings.timeouts
        self.body_limit_bytes = settings.body_limit_bytes
        self.stopping = False
        self.meter = Meter()
        self.router = Router(settings.queue)
        self.connector = Connector(settings.timeouts.connect_s)
        self.connections: set[ClientConnection] = set()
        self.active: set[Exchange] = set()
        self.departures = Departures()
        self.standing = Standing()
        self.table = Table.of(Routes(epoch=0, session=0, version=0))
        self.has_table = False
        self.port = 0
        """Where it listens, once started: settings may say 0."""
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._connections_due = 0.0
        self._idle = asyncio.Event()
        self._end_now = asyncio.Event()

    def take_limits(self, settings: GatewaySettings) -> None:
        """Takes up a changed file's queue, hold_for and timeouts; requests in flight count by them from now on."""
        self.settings = replace(
            self.settings, queue=settings.queue, hold_for_s=settings.hold_for_s, timeouts=settings.timeouts
        )
        self.timeouts = settings.timeouts
        self.router.take_queue(settings.queue)

    # The table

    def apply(self, frame: Routes) -> None:
        """Takes a routing table up. When it returns, nothing is sent by an older one any more.

        Requests at replicas that it names no longer finish there where the replica leaves in peace; where it is gone,
        those that it has not answered yet go elsewhere.
        """
        table = Table.of(frame)
        self.meter.know(route.model for route in frame.routes)
        self.table = table
        self.has_table = True
        self.departures.take(self.router.update(frame.routes, table.routes), frame.routes)
        if self.departures.targets:
            self._look_for_others()

    def _look_for_others(self) -> None:
        now = time.monotonic()
        left = {target.endpoint.replica for target in self.departures.targets if not target.in_peace}
        moved = sum(exchange.replica_left(now) for exchange in list(self.active))
        if moved:
            _log.warning(
                "requests that replicas left without an answer go elsewhere", requests=moved, gone=sorted(left)
            )

    def traffic(self) -> dict[str, Traffic]:
        """By replica id: where requests are in flight, and what became of those at replicas that left the table."""
        return self.departures.traffic(target for line in self.router.lines.values() for target in line.targets)

    # What connections ask of it

    def admit(self, request: Request) -> None:
        known = self.table.seen.get(request.token)
        if known is not None:
            found = api.BY_PATH.get(request.path)
            if found is not None and found.method == request.method:
                request.api, request.key = found, known
                return
        try:
            if request.method == b"OPTIONS":
                return  # a preflight comes without a key
            request.api = api.find(request.method, request.path)
            if not self.has_table:
                raise _no_table(self.standing.words)
            request.key = authenticate(request.token, self.table)
        except ApiError as error:
            request.error = error

    def begin(self, connection: ClientConnection, request: Request) -> None:
        try:
            if self.stopping:
                raise ApiError(
                    503,
                    "this gateway is stopping: send the request again",
                    type="server_error",
                    code="stopping",
                    retry_after_s=1,
                )
            if request.api is not None and request.api.proxied:
                self._proxy(connection, request)
            else:
                self._answer(connection, request)
        except ApiError as error:
            self.count_refusal(error)
            connection.refuse(request, error)

    def _proxy(self, connection: ClientConnection, request: Request) -> None:
        key = request.key
        assert key is not None, "a request without a key was admitted"
        asked = read_asked(request.body)
        line = self.router.by_name.get(asked.model)
        if line is None:
            raise api.no_such_model(asked.model, self.table, key)
        if key.models and not allowed(key, line.route):
            raise api.not_allowed(asked.model, key)
        exchange = Exchange(self, connection, request, line, asked)
        connection.exchange = exchange
        exchange.start()

    def _answer(self, connection: ClientConnection, request: Request) -> None:
        status, lines, body = 200, b"content-type: application/json\r\n", b""
        if request.method == b"OPTIONS":
            request.cors = True
            status, lines = 204, api.preflight_lines(request)
        elif request.key is not None and request.api is api.MODELS:
            body = api.models_body(self.table, request.key)
        elif request.key is not None:
            body = api.model_body(self.table, request.key, request.path)
        self.meter.count(OTHER, status)
        connection.answer(request, status, lines, body)

    def count_refusal(self, error: ApiError) -> None:
        self.meter.count(OTHER, error.status)

    def count_bad_request(self) -> None:
        self.meter.bad_requests += 1

    # Gauges

    def models(self) -> Iterable[tuple[str, int, int, int]]:
        for line in self.router.lines.values():
            yield line.label, line.in_flight, len(line.waiting), len(line.targets)

    def scalars(self) -> Iterable[tuple[str, str, float]]:
        now = time.time()
        yield "llmgw_gateway_connections", "Connections of clients.", len(self.connections)
        yield "llmgw_gateway_requests_in_flight", "Requests accepted and not ended.", len(self.active)
        yield (
            "llmgw_gateway_leaving_in_flight",
            "Requests in flight at replicas that left the table.",
            self.departures.in_flight,
        )
        yield from self.standing.scalars(now)

    # Running

    async def start(self) -> None:
        _raise_file_limit()
        settings = self.settings
        context = _front_tls(settings.front_cert, settings.front_key)
        listener = _listen(settings.listen_host, settings.listen_port)
        self.port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self),
            sock=listener,
            ssl=context,
            backlog=BACKLOG,
            ssl_handshake_timeout=TLS_HANDSHAKE_S if context else None,
        )
        self._tick()

    def _tick(self) -> None:
        # First, so that whatever goes wrong below does not stop the clock.
        self._ticker = asyncio.get_running_loop().call_later(self.timeouts.tick_s, self._tick)
        now = time.monotonic()
        self.router.tick(now, self.timeouts.engine_idle_s)
        for exchange in list(self.active):
            exchange.check(now)
        if now >= self._connections_due:
            self._connections_due = now + min(CONNECTIONS_CHECKED_EVERY_S, self.timeouts.tick_s * 10)
            for connection in list(self.connections):
                connection.check(now)
        if self.stopping and not self.active and not self.connections:
            self._idle.set()

    def stop_now(self) -> None:
        """Ends what is in flight at once, during ``stop``."""
        self._end_now.set()

    async def stop(self) -> None:
        """Takes nothing new; lets what is in flight finish within ``drain_s``, then ends it with an error."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for exchange in list(self.active):
            exchange.stop_waiting()
        for connection in list(self.connections):
            connection.stop()
        await self._drained(self.settings.drain_s)
        for exchange in list(self.active):
            exchange.end_now()
        for connection in list(self.connections):
            connection.stop()
        self._end_now.clear()
        await self._drained(self.timeouts.linger_s)
        await self._shut()

    async def _drained(self, limit_s: float) -> None:
        """Returns when nothing is left, the limit is over, or ``stop_now`` was called."""
        if not self.active and not self.connections:
            return
        self._idle.clear()
        waits = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self._end_now.wait())]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _shut(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for connection in list(self.connections):
            connection.cut()
        for line in self.router.lines.values():
            line.retire()
        await self.connector.aclose()
        if self._server is not None:
            await self._server.wait_closed()


def _no_table(why: str) -> ApiError:
    """Without a table no key is known: a valid one must not be called invalid."""
    return ApiError(
        503,
        f"this gateway has no routing table yet: {why}",
        type="server_error",
        code="no_routing_table",
        retry_after_s=5,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        if host == "::":
            return socket.create_server(
                (host, port), family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6()
            )
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(cant_listen("listen.gateway", host, port, error)) from error


def cant_listen(key: str, host: str, port: int, error: OSError) -> str:
    """Why ``key`` of the file can't be listened on, who holds it, and what to do."""
    if error.errno != errno.EADDRINUSE:
        return f"can't listen on {host} port {port} ({key}): {error.strerror or error}"
    holder = port_holder(port) or "another process"
    return f"can't listen on {host} port {port} ({key}): it is taken by {holder}: end that, or change {key}"


def _front_tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"gateway.tls: {cert} and {key} can't be used: {error}") from error
    return context


def _raise_file_limit() -> None:
    """Two sockets per request: the soft limit of 1,024 files is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("the limit of open files stays as it is", limit=soft, why=str(error))
