"""The account that a program runs under, and the limits it starts with."""

from __future__ import annotations

import grp
import os
import pwd
import resource
from contextlib import suppress
from dataclasses import dataclass

from llmgw.process.errors import StartError

DEVICE_GROUPS = ("video", "render")
"""Groups that own GPU device files, where they exist."""

_OPEN_FILES = 65536


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def account(name: str) -> Account:
    """Raises StartError where there is no such user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise StartError(f"there is no user {name} on this machine; make it: useradd --system {name}") from None
    groups = set(os.getgrouplist(name, entry.pw_gid))
    for group in DEVICE_GROUPS:
        with suppress(KeyError):
            groups.add(grp.getgrnam(group).gr_gid)
    return Account(name, entry.pw_uid, entry.pw_gid, tuple(sorted(groups)))


def become(who: Account) -> None:
    """Give up the present user for good."""
    os.setgroups(who.groups)
    os.setresgid(who.gid, who.gid, who.gid)
    os.setresuid(who.uid, who.uid, who.uid)


def set_limits(oom_score_adj: int | None) -> None:
    """No core dumps (they would hold keys, and fill disks), many files, as much locked memory as allowed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if files_hard == resource.RLIM_INFINITY else min(_OPEN_FILES, files_hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, files_hard))
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        _, locked_hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked_hard, locked_hard))
    if oom_score_adj is not None:
        set_oom_score(oom_score_adj)


def oom_score() -> int:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


def set_oom_score(adjustment: int) -> None:
    """Lowering it takes a capability that not every root has: then it stays as it is."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(adjustment))
