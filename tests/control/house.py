"""A control plane with its doors open: the office behind the real listener for agents, over real TLS on loopback.

Its clock runs as the machine's does, ``ahead_s`` ahead of it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from llmgw.cluster.model import Instant
from llmgw.control.certificate_operations import Identities, mint_token
from llmgw.control.joining import JoinOffice
from llmgw.link.server import LinkServer, Peer
from llmgw.pki.authority import Authority
from llmgw.pki.issuer import issue_issuer
from llmgw.pki.join_token import JoinToken, parse_join_token
from llmgw.store.base import Store
from tests.control.clock import Time
from tests.control.office import DAY_S, Office, open_office


class Running(Time):
    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> Instant:
        return Instant(time.time() + self.ahead_s, time.monotonic())


class House:
    def __init__(self, office: Office, clock: Running, lifetime_s: float) -> None:
        self.office, self.clock = office, clock
        plane, serials = office.plane, office.serials
        self.link = LinkServer(
            listen=("127.0.0.1", 0),
            tls=office.own.files,
            cluster="c",
            epoch=plane.epoch,
            delegate=office.floor.desk,
            allow_serial=serials.allow,
            serial_used=serials.used,
            joining=JoinOffice(
                plane, serials, office.own, lifetime_s=lifetime_s, servers=(), address_of=self._address_of
            ),
        )
        serials.on_revoked.append(self.link.close_refused)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.link.port}"

    @property
    def identities(self) -> Identities:
        office = self.office
        return Identities(office.plane, office.serials, office.own, (self.url,), self._peer)

    async def token(self, node: str, *, take_over: bool = False) -> JoinToken:
        made = await mint_token(self.identities, node, ttl_s=900.0, labels={}, take_over=take_over)
        return parse_join_token(made.token)

    def _peer(self, node: str) -> Peer | None:
        return self.link.peer(node, "node")

    def _address_of(self, node: str) -> str:
        peer = self._peer(node)
        return peer.address if peer is not None else ""


@asynccontextmanager
async def open_house(
    folder: Path, *, ahead_s: float = 0.0, lifetime_s: float = DAY_S, store: Store | None = None
) -> AsyncIterator[House]:
    """Its own certificates are a day old: whoever's clock is some minutes off can verify them."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    authority = Authority.create(folder / "pki", "c", now=yesterday)
    authority.issue_server(["127.0.0.1"], folder / "pki", "cp", now=yesterday)
    issue_issuer(authority, folder / "pki", now=yesterday)
    clock = Running(ahead_s)
    async with open_office(folder, time=clock, store=store) as office:
        house = House(office, clock, lifetime_s)
        await house.link.start()
        try:
            yield house
        finally:
            await house.link.stop()


class Opened:
    """Stands between a client and a control plane with the control plane's own certificate: it reads what TLS hides."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.seen = bytearray()
        """Both directions."""
        self.port = 0
        self._pipes: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[Opened]:
        files = self._house.office.own.files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.gather(*self._pipes)
            await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        trusting = ssl.create_default_context(cafile=str(self._house.office.own.files.ca))
        there = await asyncio.open_connection("127.0.0.1", self._house.link.port, ssl=trusting)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pipe(reader, there[1]))
            both.create_task(self._pipe(there[0], writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()
