"""Sizes, times and counts as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(size_bytes: int, *, up: bool = False) -> str:
    """``2.1 GiB``; rounded down (what there is), or up (what is needed), so that two sizes never read falsely equal."""
    for unit_bytes, unit in _UNITS:
        if size_bytes >= unit_bytes:
            tenths = (size_bytes * 10 + (unit_bytes - 1 if up else 0)) // unit_bytes
            return f"{tenths // 10} {unit}" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{size_bytes} bytes"


def clock(wall_s: float) -> str:
    """``2026-03-01 10:02:03 UTC``; rounded up, so that nothing is said to be due before it is."""
    return datetime.fromtimestamp(math.ceil(wall_s), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
