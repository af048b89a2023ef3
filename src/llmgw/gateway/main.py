"""The gateway's process: from settings to its end."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import structlog
import uvloop

from llmgw.config import ConfigError, ServerConfig
from llmgw.gateway.feed import Feed
from llmgw.gateway.gateway import Gateway, StartError
from llmgw.gateway.ops import OpsServer
from llmgw.gateway.settings import GatewaySettings, Timeouts
from llmgw.link.client import LinkError
from llmgw.pki.certificate import facts_of, read_certificate
from llmgw.pki.names import PkiError
from llmgw.version import VERSION

_log = structlog.get_logger("llmgw.gateway")

GC_THRESHOLD = (20_000, 20, 50)
"""Requests make few cycles: collecting every 700 allocations would be a tax on each of them."""


def gateway_id(cert: Path) -> str:
    """The id in the certificate's ``llmgw://CLUSTER/gateway/ID``. Raises StartError."""
    try:
        facts = facts_of(read_certificate(cert, "the gateway's certificate"))
    except PkiError as error:
        raise StartError(str(error)) from error
    for uri in facts.uris:
        if uri.role == "gateway":
            return uri.id
    found = ", ".join(map(str, facts.uris)) or "none"
    raise StartError(
        f"{cert} is no gateway's certificate: expected a URI llmgw://CLUSTER/gateway/ID, found {found}; "
        "issue one with 'llmgw ctl cert issue-server'"
    )


def settings_of(config: ServerConfig, state_dir: Path) -> GatewaySettings:
    """Settings of the gateway beside a control plane. Raises StartError."""
    gateway = config.gateway
    limits = gateway.timeouts
    return GatewaySettings(
        id=gateway_id(config.tls.cert),
        state_dir=state_dir,
        listen_host=config.listen.gateway.host,
        listen_port=config.listen.gateway.port,
        metrics_host=config.listen.metrics.host,
        metrics_port=config.listen.metrics.port,
        servers=config.advertise or (_own_address(config),),
        ca=config.tls.ca,
        cert=config.tls.cert,
        key=config.tls.key,
        front_cert=gateway.tls.cert if gateway.tls else None,
        front_key=gateway.tls.key if gateway.tls else None,
        body_limit_bytes=gateway.body_limit_bytes,
        queue=gateway.queue,
        hold_for_s=gateway.hold_for_s,
        drain_s=config.drain.in_flight_s,
        workers=gateway.workers,
        timeouts=Timeouts(
            queue_s=limits.queue_s,
            first_token_s=limits.first_token_s,
            between_tokens_s=limits.between_tokens_s,
            total_s=limits.total_s,
        ),
    )


def _own_address(config: ServerConfig) -> str:
    """How the gateway on this machine reaches its control plane where nothing is advertised."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.listen.agents.host, config.listen.agents.host)
    return (
        f"https://[{host}]:{config.listen.agents.port}"
        if ":" in host
        else f"https://{host}:{config.listen.agents.port}"
    )


def run(settings: GatewaySettings, reread: Callable[[], GatewaySettings] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then lets what is in flight finish; a second one ends at once.

    At SIGHUP it takes up the limits of what ``reread`` returns; where that raises ConfigError, all stays as it is.
    Returns the exit status: 0, or 1 where it could not start (stderr says why).
    """
    try:
        _check(settings)
        uvloop.run(_serve(settings, reread))
    except (StartError, LinkError, PkiError, ValueError) as error:
        print(f"llmgw gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _check(settings: GatewaySettings) -> None:
    if settings.workers > 1:
        raise StartError("more than one gateway worker is not built yet; set gateway.workers: 1")
    if (settings.front_cert is None) != (settings.front_key is None):
        raise StartError("gateway.tls needs both: cert and key")
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"the gateway's state directory {settings.state_dir}: {error.strerror or error}") from error


async def _serve(settings: GatewaySettings, reread: Callable[[], GatewaySettings] | None) -> None:
    gateway = Gateway(settings)
    ops = OpsServer(gateway, settings.metrics_host, settings.metrics_port)
    feed = Feed(gateway, settings)
    feed.load()
    stop = _stop_on_signals(gateway)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _take_limits, gateway, reread)
    await ops.start()
    try:
        await gateway.start()
        feed.start()
        _log.info("gateway ready", version=VERSION, id=settings.id, port=gateway.port, metrics_port=ops.port)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.keep())
            await stop.wait()
            _log.info("stopping", in_flight=len(gateway.active), limit_s=settings.drain_s)
            await gateway.stop()
            await feed.stop()
    finally:
        await feed.stop()
        await ops.stop()
    _log.info("stopped")


def _take_limits(gateway: Gateway, reread: Callable[[], GatewaySettings] | None) -> None:
    if reread is None:
        return
    try:
        gateway.take_limits(reread())
    except (StartError, ConfigError) as error:
        _log.error("the changed limits are refused; all stays as it is", reason=str(error))
    else:
        _log.info("limits taken up anew")


def _stop_on_signals(gateway: Gateway) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            gateway.stop_now()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop
