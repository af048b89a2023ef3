"""Both ends of the stream for tests: a recording delegate, a server and clients on loopback, over real mutual TLS."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgw.cluster.model import Vitals
from llmgw.link.client import ClientIdentity, LinkClient, LinkState
from llmgw.link.messages import Heartbeat, Hello, LogLines, Observed, Role, RoutesAck, TrafficReport
from llmgw.link.server import LinkServer, Peer, RefusedPeer, ServerIdentity
from llmgw.pki.authority import Authority, Issued

DEADLINE_S = 20.0
VITALS = Vitals(memory_bytes=4, memory_available_bytes=3, disk_bytes=2, disk_free_bytes=1)


def server_files(issued: Issued) -> ServerIdentity:
    return ServerIdentity(issued.ca, issued.cert, issued.key)


def client_files(issued: Issued) -> ClientIdentity:
    return ClientIdentity(issued.ca, issued.cert, issued.key)


@dataclass
class Pki:
    """An authority with a server certificate for loopback; node certificates on demand."""

    directory: Path
    authority: Authority
    server: ServerIdentity

    @classmethod
    def make(cls, directory: Path, cluster: str = "lab") -> Pki:
        authority = Authority.create(directory / "pki", cluster)
        server = authority.issue_server(["127.0.0.1", "localhost"], directory / "server", "cp-1")
        return cls(directory, authority, server_files(server))

    def node(self, id: str) -> ClientIdentity:
        out = self.directory / "nodes" / id
        if (out / f"{id}.pem").exists():
            return ClientIdentity(out / "ca.pem", out / f"{id}.pem", out / f"{id}-key.pem")
        return client_files(self.authority.issue_client(id, out))


@dataclass
class Recorder:
    """A delegate that keeps what it is told; ``wait`` waits for it, on the loop."""

    told: list[tuple[Any, ...]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _note(self, *entry: Any) -> None:
        self.told.append(entry)
        self.changed.set()

    def on_welcomed(self, peer: Peer) -> None:
        self._note("welcomed", peer)

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | TrafficReport | LogLines) -> None:
        self._note("frame", peer, frame)

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None:
        self._note("heartbeat", peer, frame)

    def on_closed(self, peer: Peer, why: str) -> None:
        self._note("closed", peer, why)

    def on_refused(self, refusal: RefusedPeer) -> None:
        self._note("refused", refusal)

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.told if entry[0] == kind]

    async def wait(self, kind: str, count: int = 1) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.of(kind)) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.of(kind)


@dataclass
class End:
    """A LinkClient and what it told: ``frames`` and ``states`` are filled from its thread."""

    client: LinkClient
    frames: queue.Queue[Any]
    states: queue.Queue[LinkState]
    seen: list[LinkState]

    async def state(self, wanted: Callable[[LinkState], bool]) -> LinkState:
        return await asyncio.to_thread(self.state_now, wanted)

    def state_now(self, wanted: Callable[[LinkState], bool]) -> LinkState:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                state = self.states.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the state did not come; last: {self.client.state}") from None
            self.seen.append(state)
            if wanted(state):
                return state

    async def connected(self) -> LinkState:
        return await self.state(lambda state: state.connected)

    async def failed(self) -> LinkState:
        return await self.state(lambda state: not state.connected)

    async def frame(self, kind: type[Any]) -> Any:
        def get() -> Any:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                frame = self.frames.get(timeout=max(0.01, deadline - time.monotonic()))
                if isinstance(frame, kind):
                    return frame

        return await asyncio.to_thread(get)


def make_end(
    servers: Sequence[str],
    tls: ClientIdentity,
    id: str,
    *,
    role: Role = "node",
    fingerprint: str | None = None,
    instance: str | None = None,
    **options: Any,
) -> End:
    frames: queue.Queue[Any] = queue.Queue()
    states: queue.Queue[LinkState] = queue.Queue()
    hello = Hello(
        role=role,
        id=id,
        fingerprint=fingerprint or f"machine-of-{id}",
        instance=instance or f"{id}-{threading.get_ident()}-{random.getrandbits(32):x}",
    )
    settings: dict[str, Any] = {"reconnect_base_s": 0.05, "reconnect_max_s": 0.2, "hello": lambda: hello} | options
    client = LinkClient(
        role=role,
        id=id,
        servers=servers,
        tls=tls,
        vitals=lambda: VITALS,
        on_frame=frames.put,
        on_state=states.put,
        **settings,
    )
    return End(client, frames, states, [])


def make_server(pki: Pki, delegate: Recorder, **options: Any) -> LinkServer:
    settings: dict[str, Any] = {
        "listen": ("127.0.0.1", 0),
        "tls": pki.server,
        "cluster": "lab",
        "epoch": 1,
        "heartbeat_s": 0.5,
    } | options
    return LinkServer(delegate=delegate, **settings)
