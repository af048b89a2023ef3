"""Frames that wait to be sent to one peer: bounded, and whole states replace older ones that were not sent yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from llmgw.link.messages import Desired, Routes

MAX_WAITING = 1024

F = TypeVar("F")


class Outbox(Generic[F]):
    """Used on one event loop."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._frames: deque[F] = deque()
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: F) -> bool:
        """False where too many are waiting: the peer does not read."""
        if isinstance(frame, Desired | Routes):
            kind = type(frame)
            self._frames = deque(waiting for waiting in self._frames if not isinstance(waiting, kind))
        if len(self._frames) >= self._limit:
            return False
        self._frames.append(frame)
        self._filled.set()
        self._idle.clear()
        return True

    async def get(self) -> F:
        """The next frame. Asking says that the one before it has been sent."""
        if not self._frames:
            self._filled.clear()
            self._idle.set()
            await self._filled.wait()
        return self._frames.popleft()

    async def sent(self) -> None:
        """Wait until all that was put has been sent."""
        await self._idle.wait()
