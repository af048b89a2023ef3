"""One connection of a client: hello, welcome, and then three parts at once: read, write, beat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import WSMsgType

from llmgw.cluster.model import Vitals
from llmgw.link.course import Conversation, Delivered, Ended, Outgoing, ServerAddress
from llmgw.link.messages import Heartbeat, Hello, Welcome
from llmgw.link.outbox import Outbox
from llmgw.link.wire import FrameTooLarge, MalformedFrame, decode, encode

WELCOME_S = 15.0
SILENT_HEARTBEATS = 3
FLUSH_S = 2.0
SHORTEST_HEARTBEAT_S = 0.05
LEFT = "left"
"""The key of an end that the peer itself wanted."""

log = structlog.get_logger("llmgw.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """What a peer says about itself, and whom it tells what it hears."""

    hello: Callable[[], Hello]
    vitals: Callable[[], Vitals | None]
    welcomed: Callable[[ServerAddress, Welcome], None]
    deliver: Callable[[Delivered], None]
    heartbeat_s: float | None


class Dialogue:
    """Runs once, on the link's loop."""

    def __init__(self, server: ServerAddress, newest_epoch: int, voice: Voice) -> None:
        self._server = server
        self._voice = voice
        self._conversation = Conversation(server.url, newest_epoch)
        self._outbox: Outbox[Outgoing] = Outbox()
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self.welcomed = asyncio.Event()
        self._welcomed_at_s: float | None = None
        self._muted = False
        self._silent_s = WELCOME_S
        self._beaten_at_s = 0.0

    @property
    def lasted_s(self) -> float:
        """Seconds since the welcome; 0 where there was none."""
        return time.monotonic() - self._welcomed_at_s if self._welcomed_at_s is not None else 0.0

    @property
    def waiting(self) -> int:
        return len(self._outbox)

    def put(self, frame: Outgoing) -> None:
        """Queue a frame. One that comes before the welcome is kept for it: the hello may have been made before."""
        if not self._outbox.put(frame):
            self._end(Ended("full", f"{self._server.url} does not read: {len(self._outbox)} frames wait to be sent"))

    def mute(self) -> None:
        """What the server still says here counts no more: another session has begun, and says it all."""
        self._muted = True

    def leave(self, words: str) -> None:
        """End the session as if it had ended by itself; what is queued is not sent."""
        self._end(Ended(LEFT, words))

    async def run(self, ws: aiohttp.ClientWebSocketResponse, stop: asyncio.Event) -> Ended:
        """Talk until the connection ends, or ``stop``. Raises what ``ws`` raised where it came to no welcome."""
        try:
            hello = encode(self._voice.hello())
        except Exception as error:
            log.exception("the hello can't be made")
            return Ended("hello", f"the hello can't be made: {error}")
        await ws.send_str(hello)
        async with asyncio.TaskGroup() as group:
            self._start(group, lambda: self._read(ws, group))
            self._start(group, lambda: self._stopped(stop))
            await asyncio.wait([self._ended])
            for task in self._tasks:
                task.cancel()
        return self._ended.result()

    def _start(
        self, group: asyncio.TaskGroup, part: Callable[[], Coroutine[None, None, Ended]], name: str = "part"
    ) -> asyncio.Task[None]:
        task = group.create_task(self._part(part), name=f"link: {name}")
        self._tasks.append(task)
        return task

    async def _part(self, part: Callable[[], Coroutine[None, None, Ended]]) -> None:
        try:
            # Made here: one that is called off before it has begun is never made, and so never left unawaited.
            self._end(await part())
        except (aiohttp.ClientError, OSError) as error:
            if self._welcomed_at_s is None and not self._ended.done():
                self._ended.set_exception(error)
            self._end(Ended("broke", f"the connection to {self._server.url} broke: {error or type(error).__name__}"))

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)

    async def _stopped(self, stop: asyncio.Event) -> Ended:
        await stop.wait()
        if self._welcomed_at_s is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._outbox.sent()
        return Ended("stopped", "stopped")

    async def _read(self, ws: aiohttp.ClientWebSocketResponse, group: asyncio.TaskGroup) -> Ended:
        while True:
            try:
                async with asyncio.timeout(self._silent_s):
                    message = await ws.receive()
            except TimeoutError:
                return Ended("silent", f"nothing was heard from {self._server.url} for {self._silent_s:g} s")
            if message.type is WSMsgType.PONG:
                continue
            if message.type is WSMsgType.PING:
                await ws.pong(message.data)
                continue
            if message.type is not WSMsgType.TEXT:
                return self._closed(ws, message)
            ended = self._hear(ws, message.data, group)
            if ended is not None:
                return ended

    def _hear(self, ws: aiohttp.ClientWebSocketResponse, text: str, group: asyncio.TaskGroup) -> Ended | None:
        try:
            step = self._conversation.receive(decode(text))
        except MalformedFrame as error:
            return Ended("malformed", f"{self._server.url} sent what can't be read: {error}")
        if not step or (self._muted and not isinstance(step, Ended)):
            return None
        if isinstance(step, Ended):
            if step.refused is not None and not self._muted:
                self._voice.deliver(step.refused)
            return step
        if isinstance(step.frame, Welcome):
            self._welcomed(ws, step.frame, group)
        self._voice.deliver(step.frame)
        return None

    def _welcomed(self, ws: aiohttp.ClientWebSocketResponse, welcome: Welcome, group: asyncio.TaskGroup) -> None:
        own_s = self._voice.heartbeat_s
        heartbeat_s = min(own_s, welcome.heartbeat_s) if own_s else welcome.heartbeat_s
        heartbeat_s = max(heartbeat_s, SHORTEST_HEARTBEAT_S)
        self._silent_s = SILENT_HEARTBEATS * heartbeat_s
        self._welcomed_at_s = time.monotonic()
        self._voice.welcomed(self._server, welcome)
        self.welcomed.set()
        self._start(group, lambda: self._write(ws))
        beats = self._start(group, lambda: self._beat(ws, welcome, heartbeat_s), "beats")
        self._start(group, lambda: self._beating(beats, heartbeat_s))

    def _closed(self, ws: aiohttp.ClientWebSocketResponse, message: aiohttp.WSMessage) -> Ended:
        if message.type is WSMsgType.CLOSE and message.extra:
            return Ended("closed", f"{self._server.url} closed the connection: {message.extra}")
        if message.type is WSMsgType.BINARY:
            return Ended("binary", f"{self._server.url} sent a binary frame: this is not llmgw's control plane")
        error = ws.exception()
        if self._welcomed_at_s is None:
            raise error if isinstance(error, aiohttp.ClientError | OSError) else aiohttp.ServerDisconnectedError()
        return Ended("broke", f"the connection to {self._server.url} broke" + (f": {error}" if error else ""))

    async def _write(self, ws: aiohttp.ClientWebSocketResponse) -> Ended:
        while True:
            frame = await self._outbox.get()
            try:
                await ws.send_str(encode(self._conversation.stamp(frame)))
            except FrameTooLarge as error:
                log.error("a frame can't be sent", why=str(error))

    async def _beat(self, ws: aiohttp.ClientWebSocketResponse, welcome: Welcome, heartbeat_s: float) -> Ended:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + heartbeat_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            beat = Heartbeat(epoch=welcome.epoch, session=welcome.session, sent_at=time.time(), vitals=self._vitals())
            await ws.send_str(encode(beat))
            await ws.ping()
            self._beaten_at_s = time.monotonic()

    async def _beating(self, beats: asyncio.Task[None], heartbeat_s: float) -> Ended:
        """A stream that reads and does not beat looks alive from here and dead from there: it is begun anew."""
        self._beaten_at_s = time.monotonic()
        while True:
            await asyncio.sleep(heartbeat_s)
            if beats.done() or time.monotonic() - self._beaten_at_s > self._silent_s:
                words = f"no heartbeat goes out to {self._server.url} any more, though the connection is open"
                return Ended("mute", words)

    def _vitals(self) -> Vitals | None:
        try:
            return self._voice.vitals()
        except Exception:
            log.exception("the vitals can't be told")
            return None
