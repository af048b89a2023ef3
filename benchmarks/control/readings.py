"""What the kernel says about a process and the machine, and percentiles."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from llmgw.version import VERSION

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


def machine() -> str:
    """Where and when this is measured, and how busy the machine is with other things."""
    model = next(
        (
            text.partition(":")[2].strip()
            for text in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in text
        ),
        platform.machine(),
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = " ".join(f"{average:.1f}" for average in os.getloadavg())
    return (
        f"{when}, {model}, {os.cpu_count()} cores, load average {load}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, llmgw v{VERSION}."
    )


def choose_cores() -> tuple[int, int]:
    """For the control plane, and for everything else."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("only one core may be used: the agents' work counts against the control plane", file=sys.stderr)
    return cores[0], cores[-1]
