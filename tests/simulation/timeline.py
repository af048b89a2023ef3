"""Virtual time: what happens next, and when. Equal times happen in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

WALL_S = 1_700_000_000.0
"""Wall-clock Unix time at which every run begins."""


class Timer:
    """Something that will happen, unless it is cancelled before."""

    __slots__ = ("act", "arguments")

    def __init__(self, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.act: Callable[..., object] | None = act
        self.arguments = arguments

    def cancel(self) -> None:
        self.act, self.arguments = None, ()


class Timeline:
    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0

    def at(self, when_s: float, act: Callable[..., object], *arguments: Any) -> Timer:
        timer = Timer(act, arguments)
        self._count += 1
        heapq.heappush(self._heap, (max(when_s, self.now), self._count, timer))
        return timer

    def after(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> Timer:
        return self.at(self.now + delay_s, act, *arguments)

    def step(self) -> bool:
        """Let the next thing happen; False where nothing is to come."""
        while self._heap:
            when_s, _, timer = heapq.heappop(self._heap)
            act = timer.act
            if act is not None:
                self.now = when_s
                act(*timer.arguments)
                return True
        return False
