"""A whole control plane but for the stream's sockets: store, plane, desk and admin API, in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import httpx2
import uvicorn
from fastapi import FastAPI

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.model import (
    Cluster,
    Cpu,
    DesiredShard,
    EngineOnNode,
    EngineState,
    Fabric,
    Hca,
    Inventory,
    ObservedShard,
    ShardState,
    Traffic,
    Vitals,
)
from llmgw.config import load_server
from llmgw.control.api import Rooms, make_app
from llmgw.control.clock import Clock, system_clock
from llmgw.control.desk import Desk
from llmgw.control.keys import digest
from llmgw.control.logs import Logs
from llmgw.control.main import AdminServer
from llmgw.control.plane import Plane
from llmgw.control.reload import Reloader
from llmgw.link.messages import Desired, Heartbeat, Hello, Observed, Routes, RoutesAck, TrafficReport
from llmgw.link.server import Peer
from llmgw.link.session import Session
from llmgw.pki.certificate import PeerIdentity
from llmgw.store.base import Saved, Store
from llmgw.store.memory import MemoryStore
from tests.control.leading import leading

GIB = 2**30
CATALOG = Catalog(
    models=(
        ModelSpec(
            name="m",
            aliases=("org/m",),
            profiles=(Profile(name="p", engine="sim", memory_bytes=GIB),),
            replicas=2,
        ),
    )
)
VITALS = Vitals(memory_bytes=16 * GIB, memory_available_bytes=8 * GIB, disk_bytes=GIB, disk_free_bytes=GIB)
ENGINE = EngineOnNode(name="sim", version="1", state=EngineState.INSTALLED)
TOKEN = "llmgw-admin-of-the-test"
SERVER_FILE = """\
cluster: c
listen: {gateway: 127.0.0.1:1, admin: 127.0.0.1:2, agents: 127.0.0.1:3, metrics: 127.0.0.1:4}
tls: {ca: ca.pem, cert: server.pem, key: server-key.pem}
store: sqlite:////tmp/never-opened/llmgw.db
engines: {}
models:
  - name: m
    aliases: [org/m]
    replicas: 2
    profiles: [{name: p, engine: sim, memory: 1GiB}]
"""


def inventory(id: str, fabric: str | None = None) -> Inventory:
    adapter = Hca(name="mlx5_0", port=1, state="ACTIVE", phys_state="LinkUp", link_layer="InfiniBand")
    return Inventory(
        hcas=(adapter,) if fabric is not None else (),
        fabrics=(Fabric(name=fabric, hcas=("mlx5_0",)),) if fabric is not None else (),
        hostname=id,
        os="Debian",
        kernel="6.1",
        libc="glibc 2.36",
        cpu=Cpu(model="x", architecture="x86_64", cores=2),
        memory_bytes=16 * GIB,
        mgmt_addr="127.0.0.1",
    )


def dialled_in(hello: Hello, session: int) -> Peer:
    """A peer that was welcomed, whose outbox is read in place of a connection."""
    id, role = hello.id, hello.role
    address = f"10.0.0.{session}:1"
    opened = Session(role=role, id=id, number=session, address=address, fingerprint=id, instance=id, serial=id)
    identity = PeerIdentity(
        common_name=id,
        role=role,
        id=id,
        cluster="c",
        serial=id,
        not_after=datetime(2100, 1, 1, tzinfo=UTC),
        roles={role: id},
    )
    return Peer(opened, hello, identity, 0.0)


class ControlFloor:
    def __init__(self, plane: Plane, store: Store, folder: Path) -> None:
        self.plane = plane
        self.store = store
        self.logs = Logs()
        self.desk = Desk(plane, self.logs)
        self.file = folder / "server.yaml"
        self.file.write_text(SERVER_FILE)
        self.reloader = Reloader(self.file, load_server(self.file), plane, lambda config: None)
        self._sessions = 0

    @cached_property
    def app(self) -> FastAPI:
        return make_app(Rooms(self.plane, self.desk, self.logs, self.reloader, digest(TOKEN)))

    def join(self, id: str, shards: tuple[ObservedShard, ...] = (), fabric: str | None = None) -> Peer:
        """A node dials in, with what it runs already."""
        self._sessions += 1
        hello = Hello(
            role="node",
            id=id,
            inventory=inventory(id, fabric),
            vitals=VITALS,
            probed=True,
            engines=(ENGINE,),
            version="1",
            shards=shards,
        )
        peer = dialled_in(hello, self._sessions)
        self.desk.on_welcomed(peer)
        return peer

    def join_gateway(self, id: str) -> Peer:
        self._sessions += 1
        peer = dialled_in(Hello(role="gateway", id=id, version="1"), self._sessions)
        self.desk.on_welcomed(peer)
        return peer

    async def table(self, gateway: Peer) -> Routes:
        """The newest table that the gateway was sent."""
        async with asyncio.timeout(10):
            frame = await gateway.outbox.get()
            while len(gateway.outbox):
                frame = await gateway.outbox.get()
        assert isinstance(frame, Routes)
        return frame

    def ack(self, gateway: Peer, table: Routes, traffic: Mapping[str, Traffic] | None = None) -> None:
        frame = RoutesAck(epoch=self.plane.epoch, session=gateway.session, version=table.version, traffic=traffic or {})
        self.desk.on_frame(gateway, frame)

    def report(self, gateway: Peer, traffic: Mapping[str, Traffic]) -> None:
        self.desk.on_frame(gateway, TrafficReport(epoch=self.plane.epoch, session=gateway.session, replicas=traffic))

    def beat(self, peer: Peer) -> None:
        frame = Heartbeat(epoch=self.plane.epoch, session=peer.session, sent_at=0.0, vitals=VITALS)
        self.desk.on_heartbeat(peer, frame)

    async def obey(self, *peers: Peer) -> None:
        """Each node runs, ready, just what it was last asked for, until nothing more is asked of any."""
        for _ in range(50):
            await self.settled()
            if not any(len(peer.outbox) for peer in peers):
                return
            for peer in peers:
                while len(peer.outbox):
                    frame = await self.desired(peer)
                    if not len(peer.outbox):
                        self.observed(peer, frame)
        raise AssertionError("the nodes are asked for ever more")

    async def desired(self, peer: Peer) -> Desired:
        async with asyncio.timeout(10):
            frame = await peer.outbox.get()
        assert isinstance(frame, Desired)
        return frame

    def observed(self, peer: Peer, frame: Desired) -> tuple[ObservedShard, ...]:
        """The node runs all that it was asked for."""
        shards = tuple(ready(shard) for shard in frame.shards)
        self.desk.on_frame(
            peer, Observed(epoch=self.plane.epoch, session=peer.session, revision=frame.revision, shards=shards)
        )
        return shards

    async def settled(self) -> None:
        """All that was told so far is taken up, decided, stored and sent out."""

        async def nothing() -> None:
            return None

        async with asyncio.timeout(10):
            await self.plane.ask(nothing)
            await self.plane.ask(nothing)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The admin API on a socket; yields its URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(
                self.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
            server = AdminServer(config)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving

    @asynccontextmanager
    async def admin(self, token: str | None = TOKEN) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        async with self.listening() as url, httpx2.AsyncClient(base_url=url, headers=headers, timeout=20) as client:
            yield client


def ready(shard: DesiredShard) -> ObservedShard:
    return ObservedShard(
        id=shard.id,
        generation=shard.generation,
        state=ShardState.READY,
        since=1.0,
        pid=4711,
        endpoint=f"127.0.0.1:{shard.placement.port}",
    )


@asynccontextmanager
async def open_floor(
    folder: Path,
    store: Store | None = None,
    *,
    clock: Clock = system_clock,
    holder: str = "test",
    catalog: Catalog = CATALOG,
) -> AsyncIterator[ControlFloor]:
    """Starts from what the store holds, as a control plane does."""
    store = store or MemoryStore()
    leadership = await leading(store, holder, clock)
    saved: Saved = await store.load()
    newest = await store.events(limit=1)
    cluster = Cluster(
        name="c",
        catalog=catalog,
        nodes={node.id: node for node in saved.nodes},
        replicas={replica.id: replica for replica in saved.replicas},
        drains={drain.node: drain for drain in saved.drains},
        engines={history.name: history for history in saved.engines},
        scale=saved.scale,
        replicas_made=saved.replicas_made,
        secret=saved.secret,
    )
    plane = Plane(
        cluster,
        store=store,
        leadership=leadership,
        saved=saved,
        last_event=newest[-1].id if newest else None,
        clock=clock,
    )
    task = asyncio.ensure_future(plane.run())
    try:
        yield ControlFloor(plane, store, folder)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
