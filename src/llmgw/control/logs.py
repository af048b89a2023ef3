"""Reading a shard's output through the stream: who asked, and what comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from llmgw.link.messages import LogLines, LogsCancel, LogsRequest
from llmgw.link.server import Peer

ANSWER_S = 10.0
PENDING_CHARACTERS = 16 * 1024 * 1024
"""What may wait for a slow reader; past it the reading ends, in words, rather than filling memory."""


class LogsUnavailable(Exception):
    """The output can't be read; the message says why."""


@dataclass(slots=True)
class Reading:
    node: str
    frames: asyncio.Queue[LogLines] = field(default_factory=asyncio.Queue)
    pending: int = 0
    over: bool = False
    """Its last frame has come, or was put in its place."""

    def put(self, frame: LogLines) -> None:
        size = sum(map(len, frame.lines)) + len(frame.lines) + 1
        if self.over:
            return
        if self.pending + size > PENDING_CHARACTERS:
            frame, size = LogLines(id=frame.id, end=True, error="the reader is too slow: ended here"), 0
        self.over = frame.end
        self.pending += size
        self.frames.put_nowait(frame)

    async def get(self) -> LogLines:
        frame = await self.frames.get()
        self.pending -= sum(map(len, frame.lines)) + len(frame.lines) + 1
        return frame


class Logs:
    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}
        self._ids = itertools.count(1)

    @asynccontextmanager
    async def read(
        self, peer: Peer, shard: str, lines: int, follow: bool
    ) -> AsyncIterator[Callable[[], AsyncIterator[str]]]:
        """Lines of a shard's output, oldest first; with ``follow`` it goes on until the caller leaves."""
        request = LogsRequest(id=str(next(self._ids)), shard=shard, lines=lines, follow=follow)
        reading = self._readings[request.id] = Reading(peer.id)
        peer.send(request)
        try:
            first = await self._first(reading, peer.id)

            async def rest() -> AsyncIterator[str]:
                frame = first
                while True:
                    for line in frame.lines:
                        yield line
                    if frame.error:
                        yield f"[{frame.error}]"
                    if frame.end:
                        return
                    frame = await reading.get()

            yield rest
        finally:
            del self._readings[request.id]
            if follow:
                peer.send(LogsCancel(id=request.id))

    async def _first(self, reading: Reading, node: str) -> LogLines:
        try:
            async with asyncio.timeout(ANSWER_S):
                frame = await reading.get()
        except TimeoutError:
            raise LogsUnavailable(f"{node} did not answer within {ANSWER_S:.0f} s") from None
        if frame.error and not frame.lines:
            raise LogsUnavailable(frame.error)
        return frame

    def deliver(self, frame: LogLines) -> None:
        if reading := self._readings.get(frame.id):
            reading.put(frame)

    def node_gone(self, node: str) -> None:
        for id, reading in self._readings.items():
            if reading.node == node:
                self.deliver(LogLines(id=id, end=True, error=f"{node} is disconnected"))
