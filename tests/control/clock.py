"""Time that tests move by hand."""

from __future__ import annotations

from llmgw.cluster.model import Instant


class Time:
    """Both clocks."""

    def __init__(self) -> None:
        self.at = Instant(1_000_000.0, 5_000.0)

    def __call__(self) -> Instant:
        return self.at

    def move(self, seconds: float) -> None:
        self.at = Instant(self.at.wall_s + seconds, self.at.monotonic_s + seconds)
