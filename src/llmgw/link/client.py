"""A peer's end of the stream: dials the control planes in turn and keeps one session open.

It runs an event loop of its own in a thread of its own, so that heartbeats go out while the rest of the process
is busy. Callbacks run on that thread and must not block; callers hop to their own loop.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import aiohttp
import structlog

from llmgw.cluster.model import Vitals
from llmgw.link.course import Course, Delivered, Ended, LinkError, Outgoing, ServerAddress
from llmgw.link.dialogue import LEFT, Dialogue, Voice
from llmgw.link.failures import explain
from llmgw.link.messages import Hello, Role, Welcome
from llmgw.link.notices import Notices
from llmgw.link.wire import MAX_FRAME_BYTES, close_reason
from llmgw.pki.contexts import ClientIdentity, Identity, client_context, read_identity
from llmgw.pki.diagnose import own_certificate
from llmgw.pki.names import IdentityError

__all__ = ["ClientIdentity", "LinkClient", "LinkError", "LinkState"]

PATH = "/v1/stream"
CONNECT_S = 10.0
CLOSE_S = 1.0

log = structlog.get_logger("llmgw.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """Where the link stands. ``words``: why it is not connected, for people; ``since`` is wall-clock Unix time."""

    connected: bool = False
    server: str = ""
    epoch: int = 0
    session: int = 0
    words: str = "not connected yet"
    since: float = 0.0


class LinkClient:
    """Keeps a session with whichever control plane welcomes this peer, from ``start`` to ``stop``.

    ``hello`` is called before each hello and says everything anew; ``vitals`` at each heartbeat. What ``send`` is
    given while no session is open or being opened is dropped: the next hello says it all.
    ``heartbeat_s``: the shorter of this and the server's counts.
    """

    def __init__(
        self,
        *,
        role: Role,
        id: str,
        servers: Sequence[str],
        tls: ClientIdentity,
        hello: Callable[[], Hello],
        vitals: Callable[[], Vitals | None],
        on_frame: Callable[[Delivered], None],
        on_state: Callable[[LinkState], None],
        heartbeat_s: float | None = None,
        reconnect_base_s: float = 1.0,
        reconnect_max_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        """Raises LinkError where a server's address can't be dialled."""
        self._log = log.bind(role=role, id=id)
        self._tls = tls
        self._on_state = on_state
        self._voice = Voice(
            hello=hello,
            vitals=vitals,
            welcomed=self._connected,
            deliver=lambda frame: self._call(on_frame, frame),
            heartbeat_s=heartbeat_s,
        )
        self._course = Course(servers, base_s=reconnect_base_s, max_s=reconnect_max_s, rng=rng or random.Random())
        self._contexts = _Contexts(tls)
        self._notices = Notices()
        self._state = LinkState(since=time.time())
        self._why: dict[ServerAddress, str] = {}
        self._attempts = 0
        self._dialogue: Dialogue | None = None
        self._stop_asked: asyncio.Event | None = None
        self._again = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._turned_at_s = 0.0

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def waiting(self) -> int:
        """Frames that were given to ``send`` and have not been sent yet. From any thread."""
        dialogue = self._dialogue
        return dialogue.waiting if dialogue is not None else 0

    def stuck_s(self) -> float:
        """For how long the link's thread has done nothing, as far as earlier calls asked it to; from any thread."""
        loop = self._loop
        if loop is None:
            return 0.0
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._turned)
        return time.monotonic() - self._turned_at_s

    def start(self) -> None:
        """Begin to dial. Raises IdentityError in words where the TLS files can't be used at all."""
        identity, now = read_identity(self._tls), datetime.now(UTC)
        problem = own_certificate(identity, now)
        for words in [problem] if problem else identity.warnings(now):
            self._log.warning("identity", why=words)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="link", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, close the session, and end the thread. From any thread but the link's own."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._stop)
        thread.join(timeout_s)
        if thread.is_alive():
            self._log.error("the link did not stop in time", timeout_s=timeout_s)

    def send(self, frame: Outgoing) -> None:
        """From any thread. Epoch and session are stamped here; see the class for when it is dropped."""
        loop = self._loop
        if loop is None:
            return
        # The loop may be closed by now: then there is nobody to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._take, frame)

    def redial(self, why: str) -> None:
        """Leave the session that is open, if one is, and dial the same server at once. From any thread.

        Each dial reads the identity's files anew: this is for when they have changed. The old session is closed
        before the new one is asked for, so that no server hears the old certificate after the new one.
        """
        loop = self._loop
        if loop is None:
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._leave, why)

    # -- on the link's thread

    def _run(self, ready: threading.Event) -> None:
        # Whatever loop the process has chosen for itself: this one's sockets can be shut down from here.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._main(ready))

    async def _main(self, ready: threading.Event) -> None:
        self._turned()
        self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        ready.set()
        while not self._stop_asked.is_set():
            server = self._course.current
            try:
                ended, lasted_s = await self._attempt(server)
            except Exception as error:
                # The thread must outlive any fault of one attempt: without it the node is cut off for good.
                self._log.exception("the link failed", server=server.url)
                ended, lasted_s = Ended("internal", f"{server.url}: {type(error).__name__}: {error}"), 0.0
            if self._stop_asked.is_set():
                break
            if ended.key == LEFT:
                self._set_state(LinkState(words=ended.words, epoch=self._course.newest_epoch))
                continue
            delay_s = self._course.failed(lasted_s=lasted_s, patient=ended.patient)
            self._not_connected(server, ended, delay_s)
            await self._pause(delay_s)
        self._set_state(LinkState(words="stopped", epoch=self._course.newest_epoch))

    async def _pause(self, delay_s: float) -> None:
        """Until the delay is over, or until there is a reason to dial before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._again.wait()

    def _leave(self, why: str) -> None:
        self._again.set()
        if self._dialogue is not None:
            self._dialogue.leave(why)

    def _stop(self) -> None:
        assert self._stop_asked is not None
        self._stop_asked.set()
        self._again.set()

    async def _attempt(self, server: ServerAddress) -> tuple[Ended, float]:
        """Dial one server and stay with it as long as it goes. Returns why it ended, and how long it was welcomed."""
        assert self._stop_asked is not None
        self._attempts += 1
        self._again.clear()
        try:
            context, identity = self._contexts.current()
        except IdentityError as error:
            return Ended("identity", str(error)), 0.0
        dialogue = Dialogue(server, self._course.newest_epoch, self._voice)
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            try:
                async with asyncio.timeout(CONNECT_S):
                    ws = await http.ws_connect(
                        server.url + PATH, autoping=False, max_msg_size=MAX_FRAME_BYTES, compress=0
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = await explain(server, error, identity, self._tls, greeted=False)
                return Ended(failure.key, failure.words), 0.0
            why = ""
            try:
                if self._again.is_set():
                    # While it was dialled: what was shown is the identity of before.
                    return Ended(LEFT, "dialling anew"), 0.0
                self._dialogue = dialogue
                ended = await dialogue.run(ws, self._stop_asked)
                why = ended.words
                return ended, dialogue.lasted_s
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = await explain(server, error, identity, self._tls, greeted=True)
                return Ended(failure.key, failure.words), dialogue.lasted_s
            finally:
                self._dialogue = None
                await _close(ws, why)

    def _turned(self) -> None:
        self._turned_at_s = time.monotonic()

    def _take(self, frame: Outgoing) -> None:
        if self._dialogue is not None:
            self._dialogue.put(frame)

    def _connected(self, server: ServerAddress, welcome: Welcome) -> None:
        self._course.welcomed(welcome)
        self._notices.forget_all()
        self._why.clear()
        self._log.info(
            "connected",
            server=server.url,
            epoch=welcome.epoch,
            session=welcome.session,
            version=welcome.version,
            attempts=self._attempts,
        )
        self._attempts = 0
        self._set_state(
            LinkState(
                connected=True,
                server=server.url,
                epoch=welcome.epoch,
                session=welcome.session,
                words=f"connected to {server.url}",
            )
        )

    def _not_connected(self, server: ServerAddress, ended: Ended, delay_s: float) -> None:
        self._why[server] = ended.words
        unsaid = self._notices.due(server, ended.key, time.monotonic())
        if unsaid is not None:
            self._log.warning(
                "not connected", server=server.url, why=ended.words, retry_in_s=round(delay_s, 1), unsaid=unsaid
            )
        words = "; ".join(self._why[address] for address in self._course.servers if address in self._why)
        self._set_state(LinkState(words=words or ended.words, epoch=self._course.newest_epoch))

    def _set_state(self, state: LinkState) -> None:
        if state == replace(self._state, since=0.0):
            return
        since = time.time() if state.connected != self._state.connected else self._state.since
        self._state = replace(state, since=since)
        self._call(self._on_state, self._state)

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            self._log.exception("a callback of the link failed", callback=getattr(callback, "__name__", str(callback)))


async def _close(ws: aiohttp.ClientWebSocketResponse, why: str) -> None:
    """Close the connection, and see it gone: a server that hangs must leave no socket behind here."""
    sock = ws.get_extra_info("socket")
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await ws.close(message=close_reason(why))
    if sock is None:
        return
    # TLS would wait for the server's own goodbye; the end of the connection below it is enough.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    for _ in range(200):
        if sock.fileno() == -1:
            return
        await asyncio.sleep(0.005)


class _Contexts:
    """One TLS context as long as the files stay the same; where new ones can't be used, the old one goes on."""

    def __init__(self, files: ClientIdentity) -> None:
        self._files = files
        self._stamp: object = None
        self._made: tuple[ssl.SSLContext, Identity] | None = None

    def current(self) -> tuple[ssl.SSLContext, Identity]:
        """Raises IdentityError where there never was one that could be used."""
        stamp = self._stamp_now()
        if self._made is not None and stamp == self._stamp:
            return self._made
        try:
            self._made = client_context(self._files)
        except IdentityError as error:
            if self._made is None:
                raise
            log.warning("the new certificate can't be used; going on with the old one", why=str(error))
        self._stamp = stamp
        return self._made

    def _stamp_now(self) -> object:
        try:
            stats = [path.stat() for path in (self._files.ca, self._files.cert, self._files.key)]
        except OSError as error:
            return (error.errno, error.filename)
        return [(stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
