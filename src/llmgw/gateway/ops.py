"""The operators' port: ``/metrics``, ``/healthz``, ``/readyz``. Never on the clients' port."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from llmgw.gateway.gateway import Gateway, StartError, cant_listen
from llmgw.gateway.metrics import GatewayCollector
from llmgw.version import VERSION


def registry_of(gateway: Gateway) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway.meter, gateway))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def readiness(gateway: Gateway, now: float) -> tuple[bool, dict[str, object]]:
    """Whether it takes requests, and the facts. A stale table is no reason not to: what it names may well be up."""
    standing = gateway.standing
    stale = standing.stale_since(now)
    ready = standing.has_table and not gateway.stopping
    if gateway.stopping:
        words = "stopping: what is in flight finishes, nothing new is taken"
    elif not standing.has_table:
        words = f"no routing table yet: {standing.words}"
    elif stale is not None:
        kept = "kept on disk" if standing.from_file else "last received"
        words = f"serving from the table {kept}, not renewed since {_time(stale)}: {standing.words}"
    elif not standing.connected:
        words = f"serving; the control plane is away: {standing.words}"
    else:
        words = "serving"
    return ready, {
        "ready": ready,
        "words": words,
        "table_version": standing.version,
        "table_from_file": standing.from_file,
        "table_confirmed_at": _time(standing.applied_at) if standing.has_table else None,
        "stale_since": None if stale is None else _time(stale),
        "connected": standing.connected,
        "in_flight": len(gateway.active),
        "version": VERSION,
    }


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class OpsServer:
    """Serves the operators' port. ``start`` raises StartError."""

    def __init__(self, gateway: Gateway, host: str, port: int) -> None:
        self._gateway = gateway
        self._registry = registry_of(gateway)
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        for path, handler in routes.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(cant_listen("listen.metrics", self._host, self._port, error)) from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        ready, facts = readiness(self._gateway, time.time())
        return web.Response(
            status=200 if ready else 503, body=msgspec.json.encode(facts), content_type="application/json"
        )
