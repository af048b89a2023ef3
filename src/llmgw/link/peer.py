"""One welcomed session on the server's side, and what a control plane is told about sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from llmgw.link.messages import (
    Desired,
    Heartbeat,
    Hello,
    LogLines,
    LogsCancel,
    LogsRequest,
    Observed,
    RefusalCode,
    Refused,
    Renew,
    Role,
    Routes,
    RoutesAck,
    ToPeer,
    TrafficReport,
)
from llmgw.link.outbox import Outbox
from llmgw.link.session import Session
from llmgw.pki.certificate import PeerIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPeer:
    """Somebody who was not let in. ``code`` is a RefusalCode, or ``tls`` where the handshake failed already."""

    address: str
    common_name: str
    """Empty where no certificate was accepted."""
    claimed_id: str
    """Empty where it came to no hello."""
    code: str
    words: str


class Peer:
    """A node or a gateway that was welcomed. To be used on the server's event loop only."""

    def __init__(self, session: Session, hello: Hello, identity: PeerIdentity, connected_at: float) -> None:
        self.id = session.id
        self.role: Role = session.role
        self.session = session.number
        self.address = session.address
        """host:port that it dialled in from."""
        self.hello = hello
        self.connected_at = connected_at
        """Wall-clock Unix time."""
        self.identity = identity
        """Who it is by its certificate: serial, expiry."""
        self.entry = session
        self.outbox: Outbox[ToPeer] = Outbox()
        self._end: tuple[str, Refused | None] | None = None
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"Peer({self.role} {self.id!r}, session {self.session}, {self.address})"

    @property
    def open(self) -> bool:
        return self._end is None

    def send(self, frame: Desired | Routes | LogsRequest | LogsCancel | Renew) -> None:
        """Queue a frame; never blocks. Desired and Routes replace an unsent older one of their kind.

        After the end of the session it does nothing. A peer that lets too much pile up is closed.
        """
        if self.open and not self.outbox.put(frame):
            self.end(f"it does not read: {len(self.outbox)} frames are waiting to be sent")

    def close(self, words: str, code: RefusalCode = "fenced") -> None:
        """End the session; the peer is told ``words``."""
        self.end(words, Refused(code=code, words=words))

    def end(self, why: str, last: Refused | None = None) -> None:
        """End the session once; ``last`` is sent where the connection still takes it."""
        if self.open:
            self._end = (why, last)
            self._ended.set()

    async def ended(self) -> tuple[str, Refused | None]:
        await self._ended.wait()
        assert self._end is not None
        return self._end


class Delegate(Protocol):
    """Who is told what happens. Called on the server's event loop; must not block."""

    def on_welcomed(self, peer: Peer) -> None: ...

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | TrafficReport | LogLines) -> None: ...

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None: ...

    def on_closed(self, peer: Peer, why: str) -> None:
        """Once for each peer that was welcomed, before a peer that takes its place is welcomed."""

    def on_refused(self, refusal: RefusedPeer) -> None:
        """Once for each peer and reason in ten minutes, however often it tries."""
