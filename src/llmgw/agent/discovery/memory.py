"""Main memory: /proc/meminfo, bounded by control groups."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.discovery.cgroups import Limits
from llmgw.agent.discovery.files import read_text

_LINE = re.compile(r"(\w+(?:\(\w+\))?):\s+([0-9]{1,15})(?:\s+kB)?\s*")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. ``total_bytes`` is never 0: a size that can't be read is not a size."""

    total_bytes: int
    available_bytes: int


def parse_meminfo(text: str) -> tuple[int | None, int | None]:
    """(total, available) in bytes; None where the text does not say.

    Kernels before 3.14 have no MemAvailable: free memory and the caches stand in for it.
    """
    values = {match[1]: int(match[2]) * 1024 for line in text.splitlines() if (match := _LINE.fullmatch(line.strip()))}
    total = values.get("MemTotal") or None
    available = values.get("MemAvailable")
    if available is None and "MemFree" in values:
        available = values["MemFree"] + values.get("Buffers", 0) + values.get("Cached", 0)
    return total, available if total is None or available is None else min(available, total)


def read_memory(root: Path, limits: Limits) -> Memory:
    """Raises OSError only where neither /proc/meminfo nor the kernel's own count is to be had."""
    total, available = parse_meminfo(read_text(root / "proc/meminfo") or "")
    if total is None:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page_bytes
        available = os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    if available is None:
        available = total
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    if limits.memory_room_bytes is not None:
        available = min(available, limits.memory_room_bytes)
    return Memory(total_bytes=total, available_bytes=min(available, total))
