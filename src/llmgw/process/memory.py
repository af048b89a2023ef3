"""Whether it was the kernel, for lack of memory, that killed a process."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KILLED = re.compile(r"[Kk]illed process (\d+) \(")
_RECORD_BYTES = 8192


def kills_counted() -> int | None:
    """How many processes of this process's cgroup the kernel has killed for lack of memory; None: it is not told.

    cgroup v2: ``oom_kill`` of memory.events; v1: the same word in memory.oom_control.
    """
    for path in _counters():
        with suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _counters() -> list[Path]:
    found: list[Path] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                found.append(_CGROUPS / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(_CGROUPS / "memory" / group.lstrip("/") / "memory.oom_control")
    return found


def kernel_named(pid: int, since_boot_s: float) -> bool:
    """Whether the kernel's log says that it killed ``pid`` after ``since_boot_s`` (seconds since boot)."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return any(says_killed(record, pid, since_boot_s) for record in _records(fd))
    finally:
        os.close(fd)


def _records(fd: int) -> list[str]:
    found: list[str] = []
    while True:
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:
            continue  # overwritten while it was read; the next read gives the next one (ABI/testing/dev-kmsg)
        except OSError:
            return found
        if not record:
            return found
        found.append(record.decode("utf-8", "replace"))


def says_killed(record: str, pid: int, since_boot_s: float) -> bool:
    """Read one record of /dev/kmsg: ``LEVEL,SEQUENCE,MICROSECONDS,FLAGS;TEXT``."""
    head, _, text = record.partition(";")
    fields = head.split(",")
    killed = _KILLED.search(text)
    if killed is None or len(fields) < 3 or not fields[2].isdecimal():
        return False
    return int(killed[1]) == pid and int(fields[2]) / 1e6 >= since_boot_s
