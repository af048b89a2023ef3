"""Which process is meant: a pid alone may have been handed to a stranger since.

A process is ours when its pid, its start time in clock ticks since boot, the boot itself, and the nonce in its
environment all agree. The environment is the one that the kernel keeps from the last ``execve``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmgw.process.errors import RecordError

NONCE = "LLMGW_NONCE"
"""Environment variable by which a process and its children are recognised."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one boot. ``start_ticks`` is field 22 of /proc/PID/stat (clock ticks since boot)."""

    pid: int
    start_ticks: int
    boot_id: str
    nonce: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_ticks": self.start_ticks, "boot_id": self.boot_id, "nonce": self.nonce}

    @classmethod
    def from_json(cls, value: Any) -> Identity:
        """Raises RecordError where ``value`` is not what ``to_json`` gave."""
        if not isinstance(value, Mapping):
            raise RecordError(f"a process identity must be an object, found {type(value).__name__}")
        pid, ticks, boot, nonce = (value.get(key) for key in ("pid", "start_ticks", "boot_id", "nonce"))
        if type(pid) is not int or pid <= 1 or type(ticks) is not int or ticks < 0:
            raise RecordError(f"a process identity needs a pid above 1 and a start time, found {pid!r} and {ticks!r}")
        if not isinstance(boot, str) or not boot or not isinstance(nonce, str) or not nonce:
            raise RecordError(f"the identity of pid {pid} lacks its boot id or its nonce")
        return cls(pid, ticks, boot, nonce)


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says, as far as it matters here."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def parse_stat(text: str) -> Stat:
    """Read a line of /proc/PID/stat. The name may hold blanks and parentheses: it ends at the *last* one (proc(5))."""
    opening, closing = text.index("("), text.rindex(")")
    fields = text[closing + 1 :].split()
    return Stat(
        pid=int(text[:opening]),
        name=text[opening + 1 : closing],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def nonce_of(pid: int) -> str | None:
    """The nonce in a process's environment; None where it has none or can't be looked into."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = f"{NONCE}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return None


def identify(pid: int, nonce: str | None = None) -> Identity:
    """The identity of a live process, with the nonce that its environment holds or the one that is given.

    Raises ProcessLookupError where there is no such process, or one without a nonce.
    """
    stat = read_stat(pid)
    held = nonce if nonce is not None else nonce_of(pid)
    if stat is None:
        raise ProcessLookupError(f"there is no process {pid}")
    if held is None:
        raise ProcessLookupError(f"process {pid} ({stat.name}) has no {NONCE} in its environment")
    return Identity(pid, stat.start_ticks, boot_id(), held)


def alive(identity: Identity) -> bool:
    """Whether this very process runs: pid, start time, boot and nonce agree, and it is not a zombie."""
    stat = read_stat(identity.pid)
    return (
        stat is not None
        and stat.state not in "ZXx"
        and stat.start_ticks == identity.start_ticks
        and identity.boot_id == boot_id()
        and nonce_of(identity.pid) == identity.nonce
    )


def open_pidfd(identity: Identity) -> int | None:
    """A pidfd of this very process, or None where it does not run. The caller closes it.

    The identity is checked *after* opening: from then on the descriptor can't come to mean another process.
    Raises OSError where there are no descriptors left, or on a kernel before 5.3.
    """
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # the last two: now a thread has that number
            return None
        raise
    if alive(identity):
        return fd
    os.close(fd)
    return None


def send_signal(identity: Identity, number: signal.Signals) -> bool:
    """Signal this very process and no other. False where it no longer runs: then nothing was sent."""
    fd = open_pidfd(identity)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())


def holders(nonce: str) -> tuple[Identity, ...]:
    """Every process but this one whose environment holds the nonce: a program, its children, and its reaper."""
    found = []
    for pid in pids():
        if pid != os.getpid() and nonce_of(pid) == nonce:
            with contextlib.suppress(ProcessLookupError):
                found.append(identify(pid, nonce))
    return tuple(process for process in found if alive(process))
