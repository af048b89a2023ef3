"""Time, read in one place so that it can be injected."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmgw.cluster.model import Instant

Clock = Callable[[], Instant]


def system_clock() -> Instant:
    return Instant(time.time(), time.monotonic())
