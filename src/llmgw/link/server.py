"""The control plane's end of the stream: WebSockets over mutual TLS, one for each node and gateway."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime

import structlog
from aiohttp import WebSocketError, WSMessage, WSMsgType, web

from llmgw.link.joining import Joining, add_joining
from llmgw.link.listener import Listener, bind, host_port
from llmgw.link.messages import (
    OLDEST_PROTOCOL,
    Heartbeat,
    Hello,
    LogLines,
    Observed,
    RefusalCode,
    Refused,
    Role,
    RoutesAck,
    TrafficReport,
    Unknown,
)
from llmgw.link.notices import Notices
from llmgw.link.peer import Delegate, Peer, RefusedPeer
from llmgw.link.session import Admitted, AllowSerial, Refusal, Registry, SerialUsed
from llmgw.link.wire import MAX_FRAME_BYTES, FrameTooLarge, MalformedFrame, close_reason, decode, encode
from llmgw.pki.certificate import PeerIdentity, peer_identity
from llmgw.pki.contexts import Identity, ServerIdentity, listener_context
from llmgw.pki.diagnose import SHOWED_NONE, client_failure

__all__ = ["Delegate", "LinkServer", "Peer", "RefusedPeer", "ServerIdentity"]

PATH = "/v1/stream"
MAX_REQUEST_BYTES = 64 * 1024
HELLO_S = 10.0
CLOSE_S = 2.0
SILENT_HEARTBEATS = 6
WARN_EVERY_S = 86_400.0

NO_CERTIFICATE = f"you {SHOWED_NONE}\n"

log = structlog.get_logger("llmgw.link")


class LinkServer:
    """Takes peers in on ``listen`` and tells ``delegate``. All on the event loop that ``start`` was called on.

    ``allow_serial`` is asked at the hello and at every heartbeat, ``serial_used`` told at the welcome. ``joining`` is
    where nodes get their certificates; without it there is none to be had here.
    A session that was silent for SILENT_HEARTBEATS heartbeats is closed.
    """

    def __init__(
        self,
        *,
        listen: tuple[str, int],
        tls: ServerIdentity,
        cluster: str,
        epoch: int,
        delegate: Delegate,
        servers: tuple[str, ...] = (),
        heartbeat_s: float = 5.0,
        allow_serial: AllowSerial | None = None,
        serial_used: SerialUsed | None = None,
        joining: Joining | None = None,
    ) -> None:
        self.port = listen[1]
        """The port that is listened on; known after ``start`` where 0 was asked for."""
        self.counted: Counter[str] = Counter()
        """``refused-CODE``, ``malformed``, ``unknown-type``; stale frames are in ``registry.dropped``."""
        self.registry = Registry(
            cluster=cluster,
            epoch=epoch,
            heartbeat_s=heartbeat_s,
            servers=servers,
            allow_serial=allow_serial,
            serial_used=serial_used,
        )
        self._joining = joining
        self._listen = listen
        self._tls = tls
        self._delegate = delegate
        self._silent_s = SILENT_HEARTBEATS * heartbeat_s
        self._peers: dict[tuple[str, str], Peer] = {}
        self._notices = Notices()
        self._stopping = False
        self._warn_at_s = 0.0
        self._identity: Identity | None = None
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises IdentityError or ListenError in words; nothing is left open then."""
        now = datetime.now(UTC)
        context, identity = listener_context(self._tls, now)
        sock = bind(*self._listen)
        self.port = sock.getsockname()[1]
        self._identity = identity
        self._warn_of_own_files()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get(PATH, self._stream)
        if self._joining is not None:
            add_joining(app, self._joining)
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=CLOSE_S + 1)
        await runner.setup()
        assert runner.server is not None
        self._runner = runner
        self._listener = Listener(sock, context, runner.server, self._handshake_failed)
        self._listener.start()
        log.info("listening for agents", address=host_port(sock.getsockname()), epoch=self.registry.epoch)

    def take_up_files(self) -> None:
        """Show the certificate that is in the files now, and trust the authorities in them, from the next connection
        on. Raises IdentityError, with nothing changed, where they can't be used."""
        context, identity = listener_context(self._tls, datetime.now(UTC))
        self._identity, self._warn_at_s = identity, 0.0
        if self._listener is not None:
            self._listener.use(context)

    def close_refused(self) -> None:
        """End every session whose certificate is not taken any more."""
        for peer in self.peers:
            if (refusal := self.registry.serial_refusal(peer.entry)) is not None:
                peer.close(refusal.words, refusal.code)

    async def stop(self) -> None:
        """Close the listener and every session; each peer is told that the control plane is stopping."""
        self._stopping = True
        if self._listener is not None:
            await self._listener.stop()
        for peer in list(self._peers.values()):
            peer.end("the control plane is stopping")
        if self._runner is not None:
            await self._runner.cleanup()

    def peer(self, id: str, role: Role) -> Peer | None:
        """The live session of this id in this role."""
        return self._peers.get((role, id))

    def beat_every(self, heartbeat_s: float) -> None:
        """Have peers beat at another pace. It is told at the welcome: all are asked to come in again for it."""
        silent_s = SILENT_HEARTBEATS * heartbeat_s
        if silent_s == self._silent_s:
            return
        self._silent_s = silent_s
        self.registry.beat_every(heartbeat_s)
        for peer in self.peers:
            peer.close(f"heartbeats are wanted every {heartbeat_s:g} s from now on: connect again")

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    # -- one connection

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        tls = transport.get_extra_info("ssl_object") if transport else None
        if transport is None or tls is None:
            raise web.HTTPBadRequest(text="mutual TLS was expected")
        address = host_port(transport.get_extra_info("peername"))
        if tls.session_reused:
            # What was revoked or has expired since would be passed over.
            raise web.HTTPForbidden(text="resumed TLS sessions are not taken; connect anew")
        certificate = tls.getpeercert(True)
        if certificate is None:
            self._note_refused(("tls", _host(address), "none"), _without_certificate(address))
            raise web.HTTPUnauthorized(text=NO_CERTIFICATE)
        identity = peer_identity(certificate)
        ws = web.WebSocketResponse(timeout=CLOSE_S, compress=False, max_msg_size=MAX_FRAME_BYTES)
        if not ws.can_prepare(request):
            raise web.HTTPUpgradeRequired(text="this is the stream of llmgw's agents: a WebSocket was expected\n")
        await ws.prepare(request)
        try:
            await self._session(ws, identity, address)
        except Exception:
            log.exception("a connection failed", address=address, certificate=identity.common_name)
        finally:
            # A peer that does not read would hold the connection open.
            transport.abort()
        return ws

    async def _session(self, ws: web.WebSocketResponse, identity: PeerIdentity, address: str) -> None:
        hello = await self._hello(ws, identity, address)
        if hello is None:
            return
        verdict = self.registry.admit(hello, identity, address, datetime.now(UTC))
        if isinstance(verdict, Refusal):
            await self._refuse(ws, verdict, identity, address, hello.id)
            return
        peer = self._welcome(verdict, hello, identity)
        why, last = "the connection broke", None
        try:
            why, last = await self._converse(ws, peer)
        finally:
            # Before the farewell, which may take its time: the peer is gone now.
            self._forget(peer, why)
        await self._farewell(ws, why, last)

    async def _hello(self, ws: web.WebSocketResponse, identity: PeerIdentity, address: str) -> Hello | None:
        """The peer's first frame; None where it gave none, or was refused for it."""
        try:
            message = await ws.receive(timeout=HELLO_S)
        except TimeoutError:
            refusal = _malformed(f"no hello within {HELLO_S:g} s", address)
            await self._refuse(ws, refusal, identity, address, "")
            return None
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            return None
        if message.type is not WSMsgType.TEXT:
            await self._refuse(ws, _malformed("the first frame was not a text frame", address), identity, address, "")
            return None
        try:
            frame = decode(message.data)
        except MalformedFrame as error:
            refusal = self._protocol_to_come(error, address) or _malformed(str(error), address)
            await self._refuse(ws, refusal, identity, address, str(error.raw.get("id", "")))
            return None
        if isinstance(frame, Hello):
            return frame
        refusal = _malformed(f"the first frame was {frame.type!r}, not 'hello'", address)
        await self._refuse(ws, refusal, identity, address, "")
        return None

    def _protocol_to_come(self, error: MalformedFrame, address: str) -> Refusal | None:
        """A hello that can't be read may be of another protocol: then that is what to say."""
        theirs, oldest = error.raw.get("protocol"), error.raw.get("oldest_protocol", OLDEST_PROTOCOL)
        if error.raw.get("type") != "hello" or not isinstance(theirs, int) or not isinstance(oldest, int):
            return None
        who = f"{error.raw.get('id', 'a peer')!r} at {address}"
        return self.registry.protocol_refusal(theirs, oldest, who, str(error.raw.get("version", "")))

    def _welcome(self, verdict: Admitted, hello: Hello, identity: PeerIdentity) -> Peer:
        session = verdict.session
        key = (session.role, session.id)
        old = self._peers.get(key)
        if old is not None:
            old.end(verdict.displaced_words, Refused(code="duplicate", words=verdict.displaced_words))
            self._forget(old, verdict.displaced_words)
        peer = Peer(session, hello, identity, time.time())
        self._peers[key] = peer
        self._notices.forget(("refused", _host(session.address), session.id))
        peer.outbox.put(verdict.welcome)
        log.info("welcomed", role=peer.role, id=peer.id, session=peer.session, address=peer.address)
        if self._stopping:
            peer.end("the control plane is stopping")
        self._tell(self._delegate.on_welcomed, peer)
        return peer

    def _forget(self, peer: Peer, why: str) -> None:
        peer.end(why)
        self.registry.end(peer.entry)
        if self._peers.get((peer.role, peer.id)) is peer:
            del self._peers[(peer.role, peer.id)]
            log.info("closed", role=peer.role, id=peer.id, session=peer.session, address=peer.address, why=why)
            self._tell(self._delegate.on_closed, peer, why)

    async def _converse(self, ws: web.WebSocketResponse, peer: Peer) -> tuple[str, Refused | None]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_ending(peer, self._read(ws, peer))),
                group.create_task(_ending(peer, self._write(ws, peer))),
            ]
            ended = await peer.ended()
            for task in tasks:
                task.cancel()
        return ended

    async def _read(self, ws: web.WebSocketResponse, peer: Peer) -> str:
        while True:
            try:
                message = await ws.receive(timeout=self._silent_s)
            except TimeoutError:
                return f"nothing was heard from it for {self._silent_s:g} s"
            if message.type is not WSMsgType.TEXT:
                return _why_closed(message)
            try:
                self._take(peer, message.data)
            except MalformedFrame as error:
                self.counted["malformed"] += 1
                log.warning("malformed frame", role=peer.role, id=peer.id, address=peer.address, why=str(error))
                peer.close(str(error), "malformed")
                return str(error)

    def _take(self, peer: Peer, text: str) -> None:
        frame = decode(text)
        match frame:
            case Unknown() | Hello():
                self.counted["unknown-type"] += 1
            case Observed() | Heartbeat() | RoutesAck() | TrafficReport() | LogLines():
                if not self.registry.takes(peer.entry, frame):
                    return
                if isinstance(frame, Heartbeat):
                    self._beat(peer, frame)
                else:
                    self._tell(self._delegate.on_frame, peer, frame)
            case _:
                raise MalformedFrame(f"a {frame.type!r} frame is not a peer's to send")

    def _beat(self, peer: Peer, frame: Heartbeat) -> None:
        self._warn_of_own_files()
        refusal = self.registry.serial_refusal(peer.entry)
        if refusal is not None:
            peer.close(refusal.words, refusal.code)
            return
        self._tell(self._delegate.on_heartbeat, peer, frame)

    def _warn_of_own_files(self) -> None:
        """Once a day: a control plane may run for longer than its certificate lasts."""
        if self._identity is None or time.monotonic() < self._warn_at_s:
            return
        self._warn_at_s = time.monotonic() + WARN_EVERY_S
        for words in self._identity.warnings(datetime.now(UTC)):
            log.warning("identity", why=words)

    async def _write(self, ws: web.WebSocketResponse, peer: Peer) -> str:
        while True:
            frame = await peer.outbox.get()
            try:
                async with asyncio.timeout(self._silent_s):
                    await ws.send_str(encode(frame))
            except FrameTooLarge as error:
                log.error("a frame can't be sent", role=peer.role, id=peer.id, why=str(error))
            except TimeoutError:
                return f"it did not read for {self._silent_s:g} s"
            except (OSError, RuntimeError):
                return "the connection broke"

    async def _farewell(self, ws: web.WebSocketResponse, why: str, last: Refused | None) -> None:
        with suppress(TimeoutError, OSError, RuntimeError):
            async with asyncio.timeout(CLOSE_S):
                if last is not None and not ws.closed:
                    await ws.send_str(encode(last))
                await ws.close(code=1001, message=close_reason(why))

    # -- refusals

    async def _refuse(
        self, ws: web.WebSocketResponse, refusal: Refusal, identity: PeerIdentity, address: str, claimed: str
    ) -> None:
        self._note_refused(
            ("refused", _host(address), claimed),
            RefusedPeer(
                address=address,
                common_name=identity.common_name,
                claimed_id=claimed,
                code=refusal.code,
                words=refusal.event,
            ),
        )
        await self._farewell(ws, refusal.words, Refused(code=refusal.code, words=refusal.words))

    def _handshake_failed(self, address: str, error: BaseException) -> None:
        assert self._identity is not None
        words = client_failure(error, self._identity, datetime.now(UTC))
        kind = (getattr(error, "verify_code", None), getattr(error, "reason", None)) if _is_tls(error) else None
        refused = RefusedPeer(address=address, common_name="", claimed_id="", code="tls", words=f"{address}: {words}")
        self._note_refused(("tls", _host(address), kind), refused)

    def _note_refused(self, key: tuple[object, ...], refused: RefusedPeer) -> None:
        self.counted[f"refused-{refused.code}"] += 1
        unsaid = self._notices.due(key, refused.code, time.monotonic())
        if unsaid is None:
            return
        log.warning(
            "refused",
            address=refused.address,
            certificate=refused.common_name,
            claims=refused.claimed_id,
            code=refused.code,
            why=refused.words,
            unsaid=unsaid,
        )
        self._tell(self._delegate.on_refused, refused)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            log.exception("the control plane failed at a message", call=getattr(call, "__name__", str(call)))


async def _ending(peer: Peer, part: Coroutine[None, None, str]) -> None:
    """One half of a conversation: whichever ends first ends the session, and neither takes the handler with it."""
    try:
        peer.end(await part)
    except (OSError, RuntimeError):
        # What aiohttp raises where it writes (a pong, say) to a connection that is closing.
        peer.end("the connection broke")
    except Exception:
        log.exception("a session failed", role=peer.role, id=peer.id, session=peer.session)
        peer.close("the control plane failed at this session; its log says why")


def _without_certificate(address: str) -> RefusedPeer:
    words = f"{address}: it {SHOWED_NONE}"
    return RefusedPeer(address=address, common_name="", claimed_id="", code="tls", words=words)


def _malformed(words: str, address: str) -> Refusal:
    code: RefusalCode = "malformed"
    return Refusal(code=code, words=words, event=f"{address}: {words}")


def _why_closed(message: WSMessage) -> str:
    kind, data, extra = message.type, message.data, message.extra
    if kind is WSMsgType.BINARY:
        return "it sent a binary frame; text frames were expected"
    if isinstance(data, WebSocketError):
        return f"it sent what can't be taken: {data}"
    if kind is WSMsgType.ERROR:
        return f"the connection broke: {data}"
    if kind is WSMsgType.CLOSE:
        return "it closed the connection" + (f": {extra}" if extra else "")
    return "the connection broke"


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _is_tls(error: BaseException) -> bool:
    return isinstance(error, ssl.SSLError)
