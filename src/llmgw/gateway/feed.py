"""Where the routing table comes from: the control plane's stream, and the file that outlives it.

The link runs on a thread of its own; whatever it says hops to the gateway's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from llmgw.gateway.gateway import Gateway
from llmgw.gateway.settings import GatewaySettings
from llmgw.gateway.table import TableFile
from llmgw.link.addresses import read_addresses
from llmgw.link.client import ClientIdentity, LinkClient, LinkState
from llmgw.link.messages import Hello, Routes, RoutesAck, TrafficReport
from llmgw.version import VERSION

RECONNECT_MAX_S = 5.0
"""Gateways are few, and each second without a control plane is one with an old table."""
REPORTED_EVERY_S = 0.1
"""At most, while requests end at replicas that left the table; that the last one has ended is said at once."""

_log = structlog.get_logger("llmgw.gateway")

_Said = TypeVar("_Said")


class Feed:
    """Feeds a gateway. ``load`` before anything is served, then ``start``; ``keep`` runs until ``stop``."""

    def __init__(self, gateway: Gateway, settings: GatewaySettings) -> None:
        self._gateway = gateway
        self._standing = gateway.standing
        self._settings = settings
        self._file = TableFile(settings.state_dir)
        self._loop = asyncio.get_running_loop()
        self._frame: Routes | None = None
        self._unsaved = asyncio.Event()
        self._stopping = False
        self._link: LinkClient | None = None
        self._report_due: asyncio.TimerHandle | None = None
        self._reported_at = 0.0
        gateway.departures.changed = self._traffic_changed
        self._instance = uuid.uuid4().hex
        self._fingerprint = _fingerprint()

    def load(self) -> None:
        """Serves from the table on disk, if there is one, until a control plane says more."""
        try:
            kept = self._file.load()
        except ValueError as error:
            _log.error("the table on disk is not used", why=str(error))
            return
        if kept is None:
            return
        frame, saved_at = kept
        standing = self._standing
        standing.version, standing.epoch, standing.lease_s = frame.version, frame.epoch, frame.lease_s
        standing.applied_at, standing.from_file = saved_at, True
        self._gateway.apply(frame)
        _log.warning(
            "serving from the table on disk until a control plane says more",
            version=frame.version,
            models=len(frame.routes),
            age_s=round(time.time() - saved_at),
        )

    def start(self) -> None:
        """Dials the control planes. Raises LinkError and PkiError, in words, where that can't work at all."""
        settings = self._settings
        if not settings.servers:
            self._standing.words = "no control plane is configured"
            return
        if settings.ca is None or settings.cert is None or settings.key is None:
            raise ValueError(
                "the gateway dials control planes with mutual TLS only: tls.ca, tls.cert and tls.key are needed"
            )
        self._link = LinkClient(
            role="gateway",
            id=settings.id,
            servers=settings.servers,
            tls=ClientIdentity(ca=settings.ca, cert=settings.cert, key=settings.key),
            hello=self._hello,
            vitals=lambda: None,
            on_frame=self._on_frame,
            on_state=self._on_state,
            reconnect_max_s=RECONNECT_MAX_S,
        )
        self._link.start()

    async def stop(self) -> None:
        """Ends the link, and ``keep`` once the newest table is on disk."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        if self._link is not None:
            await asyncio.to_thread(self._link.stop)
        self._stopping = True
        self._unsaved.set()

    async def keep(self) -> None:
        """Writes each new table to disk, off the loop; the newest only, where they come faster than the disk."""
        saved: Routes | None = None
        while not self._stopping or saved is not self._frame:
            await self._unsaved.wait()
            self._unsaved.clear()
            frame = self._frame
            if frame is None or frame is saved:
                continue
            saved = frame
            try:
                await asyncio.to_thread(self._file.save, frame, time.time())
            except OSError as error:
                _log.error(
                    "the routing table can't be kept on disk: this gateway could not restart without a control plane",
                    path=str(self._file.path),
                    why=error.strerror or str(error),
                )

    # On the link's thread

    def _hello(self) -> Hello:
        return Hello(
            role="gateway",
            id=self._settings.id,
            version=VERSION,
            fingerprint=self._fingerprint,
            boot_id=_first_line(Path("/proc/sys/kernel/random/boot_id")),
            instance=self._instance,
            routes_version=self._standing.version,
            addresses=tuple(sorted({address.ip for address in read_addresses()})),
        )

    def _on_frame(self, frame: object) -> None:
        if isinstance(frame, Routes):
            self._hop(self.take, frame)

    def _on_state(self, state: LinkState) -> None:
        self._hop(self.stand, state)

    def _hop(self, function: Callable[[_Said], None], argument: _Said) -> None:
        # RuntimeError: the gateway's loop has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)

    # On the gateway's loop

    def take(self, frame: Routes) -> None:
        """Takes a table up and says so to the control plane. The same again renews its lease."""
        standing = self._standing
        news = self._frame is None or _content(frame) != _content(self._frame)
        standing.version, standing.epoch, standing.lease_s = frame.version, frame.epoch, frame.lease_s
        standing.applied_at, standing.from_file = time.time(), False
        if news:
            self._gateway.apply(frame)
            self._frame = frame
            self._unsaved.set()
            _log.info(
                "routing table",
                version=frame.version,
                models=len(frame.routes),
                replicas=sum(len(route.endpoints) for route in frame.routes),
                keys=len(frame.keys),
            )
        if self._link is not None:
            # Not before the table is applied: from here on no request goes by an older one.
            self._link.send(RoutesAck(epoch=0, session=0, version=frame.version, traffic=self._gateway.traffic()))
            self._gateway.departures.told()

    def stand(self, state: LinkState) -> None:
        """Notes whether a control plane is connected."""
        standing = self._standing
        if standing.connected and not state.connected:
            standing.applied_at = time.time() if standing.has_table and not standing.from_file else standing.applied_at
            _log.warning("the control plane is away: serving on from the last table", why=state.words)
        elif state.connected and not standing.connected:
            _log.info("connected to a control plane", server=state.server)
        standing.connected = state.connected
        standing.words = state.words
        standing.connected_since = state.since if state.connected else 0.0
        if state.connected:
            self._report()

    def _traffic_changed(self, to_zero: bool) -> None:
        if not self._standing.connected:
            return  # all of it is said once a control plane is back
        wait_s = self._reported_at + REPORTED_EVERY_S - time.monotonic()
        if to_zero or wait_s <= 0:
            self._report()
        elif self._report_due is None:
            self._report_due = self._loop.call_later(wait_s, self._report)

    def _report(self) -> None:
        """Says what is still in flight at replicas that left the table."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        if self._link is None or not self._standing.connected:
            return
        self._reported_at = time.monotonic()
        departures = self._gateway.departures
        self._link.send(TrafficReport(epoch=0, session=0, replicas=departures.traffic()))
        departures.told()


def _content(frame: Routes) -> tuple[object, ...]:
    return frame.version, frame.lease_s, frame.routes, frame.keys


def _fingerprint() -> str:
    """Of this machine: the same machine takes its own old session over, another is refused."""
    machine = (
        _first_line(Path("/etc/machine-id")) or _first_line(Path("/var/lib/dbus/machine-id")) or socket.gethostname()
    )
    return hashlib.sha256(b"llmgw gateway\0" + machine.encode()).hexdigest()[:32]


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
