"""Locks of package commands, read from what those say: who holds one, so that it can be waited for by name.

A held lock ends apt-get with the same status as every other failure, so only its words tell. ``LC_ALL=C`` keeps them
as they are here. The locks are record locks (fcntl), which /proc/locks lists by inode.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lock that another process holds."""

    file: str | None = None
    pid: int | None = None
    name: str | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return f"{self.file} is locked" if self.file else "who holds the lock is not known"
        return f"held by {self.name}, pid {self.pid}" if self.name else f"held by pid {self.pid}"


_NO_RIGHT = re.compile(r"are you root\?|\(13: Permission denied\)")

_APT = tuple(
    re.compile(pattern)
    for pattern in (
        r"Could not get lock (?P<file>\S+?)\. It is held by process (?P<pid>\d+)(?: \((?P<name>[^)]*)\))?",
        # apt before 1.9.11
        r"Could not get lock (?P<file>\S+) - open \(11: Resource temporarily unavailable\)",
        r"Could not get lock (?P<file>\S+?)\.?(?:\s|$)",
        r"Unable to acquire the dpkg frontend lock \((?P<file>\S+)\), is another process using it",
        r"Unable to lock the administration directory \((?P<folder>\S+)\), is another process using it",
        r"Unable to lock directory (?P<folder>\S+)",
        r"dpkg: error: dpkg [a-z ]+ (?:was|is) locked by another process(?: with pid (?P<pid>\d+))?",
        r"(?P<file>/\S+/(?:config|passwords|templates)\.dat) is locked by another process",
    )
)

_DNF = tuple(
    re.compile(pattern)
    for pattern in (
        r"Waiting for process with pid (?P<pid>\d+) to finish",
        r"already locked by (?:PID )?(?P<pid>\d+)",
        r"can't create transaction lock on (?P<file>\S+) \(Resource temporarily unavailable\)",
        r"Failed to obtain (?:the|rpm) transaction lock",
        r"Another app is currently holding the (?:yum|dnf) lock",
    )
)

_RPM_LOCKS = ("/usr/lib/sysimage/rpm/.rpm.lock", "/var/lib/rpm/.rpm.lock")


def held_in_apt(text: str) -> Held | None:
    """The lock that stops apt-get or dpkg, by what it printed; None where something else does."""
    return None if _NO_RIGHT.search(text) else _first(_APT, text)


def held_in_dnf(text: str) -> Held | None:
    held = _first(_DNF, text)
    if held is not None and held.file is None and held.pid is None:
        held = next((found for file in _RPM_LOCKS if (found := _asked(Held(file=file))).pid is not None), held)
    return held


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> Held | None:
    for pattern in patterns:
        if found := pattern.search(text):
            said = found.groupdict()
            file = said.get("file") or (f"{said['folder'].rstrip('/')}/lock" if said.get("folder") else None)
            pid = int(said["pid"]) if said.get("pid") else None
            return _asked(Held(file=file, pid=pid, name=said.get("name") or None))
    return None


def _asked(held: Held) -> Held:
    """With what the kernel knows where the text did not say it."""
    pid = held.pid if held.pid is not None or held.file is None else holder(Path(held.file))
    name = held.name if held.name or pid is None else _command(pid)
    return Held(file=held.file, pid=pid, name=name)


def holder(lock: Path, proc: Path = Path("/proc")) -> int | None:
    """The pid that holds a record lock on ``lock``; None where nobody does, or it is not seen from here."""
    with suppress(OSError, ValueError):
        found = lock.stat()
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in (proc / "locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 1: POSIX ADVISORY WRITE 812 fe:00:1234 0 EOF; those that wait have an arrow
            if len(fields) >= 6 and fields[1] == "POSIX" and fields[5] == place and int(fields[4]) > 0:
                return int(fields[4])
    return None


def _command(pid: int) -> str | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() or None
    return None
