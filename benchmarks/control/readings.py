"""What the kernel says about a process, and percentiles."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that all threads of a process have used, user and system (fields 14 and 15 of proc(5) stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def core_busy_s(core: int) -> float:
    """Seconds that a core has worked for anybody, this machine's hypervisor's other guests included (proc(5) stat)."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            ticks = [int(text) for text in fields[:8]]
            idle, waiting = ticks[3], ticks[4]
            return (sum(ticks) - idle - waiting) / TICKS_PER_S
    raise RuntimeError(f"this machine has no core {core}")


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"pid {pid} has no resident memory: it has ended")


def pin(pid: int, core: int) -> None:
    """Keep every thread of a process on one core; threads that it starts later inherit that."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of the values that ``percent`` of them do not exceed (nearest rank)."""
    ordered: Sequence[float] = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
