"""A peer's end of the stream: dials the control planes in turn and keeps one session open.

It runs an event loop of its own in a thread of its own, so that heartbeats go out while the rest of the process
is busy. Callbacks run on that thread and must not block; callers hop to their own loop.
"""

from __future__ import annotations

import asyncio
import random
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
from llmgw.link.dialling import Dialling, Line
from llmgw.link.dialogue import LEFT, Dialogue, Voice
from llmgw.link.messages import Hello, Role, Welcome
from llmgw.link.notices import Notices
from llmgw.pki.contexts import ClientIdentity, read_identity
from llmgw.pki.diagnose import own_certificate

__all__ = ["ClientIdentity", "LinkClient", "LinkError", "LinkState"]

AGAIN_S = 1.0
AGAIN_MOST_S = 30.0
"""Between tries to go over to a new connection while the one before still stands."""

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


@dataclass(frozen=True, slots=True)
class _Talk:
    """A connection, what is said on it, and the task that says it."""

    line: Line
    dialogue: Dialogue
    running: asyncio.Task[Ended]


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
        self._dialling = Dialling(tls)
        self._notices = Notices()
        self._state = LinkState(since=time.time())
        self._why: dict[ServerAddress, str] = {}
        self._attempts = 0
        self._dialogue: Dialogue | None = None
        self._stop_asked: asyncio.Event | None = None
        self._again = asyncio.Event()
        """A new connection is wanted, by an identity that is read after this."""
        self._wake = asyncio.Event()
        """Ends whatever pause there is."""
        self._leaving = ""
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
        """Go over to a new connection to the same server, at once. From any thread.

        Each dial reads the identity's files anew: this is for when they have changed. The old connection is left once
        the new one is welcomed; where there is none, the next dial does not wait.
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
                await self._wake.wait()

    def _leave(self, why: str) -> None:
        self._leaving = why
        self._again.set()
        self._wake.set()

    def _stop(self) -> None:
        assert self._stop_asked is not None
        self._stop_asked.set()
        self._wake.set()

    async def _attempt(self, server: ServerAddress) -> tuple[Ended, float]:
        """Dial one server and stay with it as long as it goes. Returns why it ended, and how long it was welcomed."""
        line = await self._dial(server)
        if isinstance(line, Ended):
            return line, 0.0
        if self._again.is_set():
            # While it was dialled: what was shown is the identity of before.
            await line.close("dialling anew")
            return Ended(LEFT, "dialling anew"), 0.0
        talk = self._begin(line)
        try:
            while (successor := await self._successor(talk, server)) is not None:
                talk = await self._go_over(talk, successor)
        except Exception:
            talk.dialogue.leave("a fault of llmgw's own")
            await self._over(talk)
            raise
        return await self._over(talk)

    async def _dial(self, server: ServerAddress) -> Line | Ended:
        self._attempts += 1
        self._again.clear()
        self._wake.clear()
        return await self._dialling.dial(server)

    def _begin(self, line: Line) -> _Talk:
        assert self._stop_asked is not None
        dialogue = self._dialogue = Dialogue(line.server, self._course.newest_epoch, self._voice)
        running = asyncio.get_running_loop().create_task(dialogue.run(line.ws, self._stop_asked), name="link: talk")
        return _Talk(line, dialogue, running)

    async def _successor(self, talk: _Talk, server: ServerAddress) -> Line | None:
        """The connection that is to replace ``talk``'s, once one is wanted; None: the talk is over."""
        dialled = asyncio.get_running_loop().create_task(self._dial_again(server), name="link: successor")
        try:
            await asyncio.wait([talk.running, dialled], return_when=asyncio.FIRST_COMPLETED)
            if not talk.running.done():
                return dialled.result()
        finally:
            dialled.cancel()
            with suppress(asyncio.CancelledError):
                line = await dialled
                if talk.running.done():
                    await line.close("the session before it is over")
        return None

    async def _dial_again(self, server: ServerAddress) -> Line:
        """Wait until it is asked for, and dial until it succeeds: what stands goes on standing meanwhile."""
        await self._again.wait()
        tries = 0
        while True:
            line = await self._dial(server)
            if isinstance(line, Line):
                return line
            delay_s = min(AGAIN_S * 2.0 ** min(tries, 16), AGAIN_MOST_S)
            tries += 1
            self._log.warning("the session goes on as before", why=line.words, retry_in_s=delay_s)
            await self._pause(delay_s)

    async def _go_over(self, old: _Talk, line: Line) -> _Talk:
        """Begin on the new connection. The old one hears nothing more, and is left once the new one is welcomed.

        The server sees a peer that takes over its own session: at no time is there none.
        """
        old.dialogue.mute()
        new = self._begin(line)
        welcomed = asyncio.get_running_loop().create_task(new.dialogue.welcomed.wait(), name="link: welcome")
        try:
            await asyncio.wait([new.running, welcomed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            welcomed.cancel()
            old.dialogue.leave(self._leaving)
            await self._over(old)
        return new

    async def _over(self, talk: _Talk) -> tuple[Ended, float]:
        """What came of a talk; its connection is closed then."""
        why = ""
        try:
            ended = await talk.running
            why = ended.words
            return ended, talk.dialogue.lasted_s
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            ended = await self._dialling.failure(talk.line.server, error, talk.line.identity, greeted=True)
            return ended, talk.dialogue.lasted_s
        finally:
            if self._dialogue is talk.dialogue:
                self._dialogue = None
            await talk.line.close(why)

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
