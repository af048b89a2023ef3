"""Work that would hold up the event loop, in a thread that can be called off."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Stop = Callable[[], bool]
"""True once the work is no longer wanted."""


async def in_thread(work: Callable[[Stop], T]) -> T:
    """Runs ``work`` in a thread. Cancelled, it tells the work so and returns only when that has ended."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop.is_set))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise


class Pace:
    """Thins progress out to what people can follow: every message of it goes over the network."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0

    def due(self, percent: int) -> bool:
        """True now and then, and always at 100."""
        now = time.monotonic()
        if now < self._next_s and percent < 100:
            return False
        self._next_s = now + self._interval_s
        return True


def on_loop(show: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Takes bytes done and in all in a thread, and calls ``show(percent, total)`` on this loop now and then."""
    loop = asyncio.get_running_loop()
    pace = Pace()

    def hop(done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        if pace.due(percent):
            loop.call_soon_threadsafe(show, percent, total)

    return hop
