"""The unprivileged user that engines run as, where the agent is root."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmgw.process.account import DEVICE_GROUPS

ENGINE_USER = "llmgw-engine"

_NEEDED = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
"""To give files away, to signal, to change user, to read a nonce, and to mount."""

_MOUNT_TEST = """
import sys; sys.path.insert(0, sys.argv[1])
from llmgw.process import linux
linux.unshare_mounts()
linux.mount("tmpfs", "/proc/self/cwd", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=64k")
"""
_COMMAND_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineUser:
    """Whom engines run as. ``refusal`` set: nothing may be started, and these words say why."""

    name: str | None
    """None: as the agent's own user."""
    warning: str | None = None
    refusal: str | None = None


def prepare(name: str | None) -> EngineUser:
    """Make the user where it is missing, and see whether this machine lets us run something as it. Blocks."""
    if name is None or os.geteuid() != 0:
        return EngineUser(None)
    hindrance = _missing_capabilities() or _mounting_refused()
    if hindrance is not None:
        return EngineUser(
            None,
            warning=f"engines run as root, not as {name}: {hindrance}. Give the agent the capabilities SYS_ADMIN and "
            "SYS_PTRACE (outside a container it has them), or run the whole agent as an unprivileged user",
        )
    failure = _make(name)
    if failure is not None:
        return EngineUser(
            name,
            refusal=f"engines run as the user {name}, which does not exist and could not be made: {failure}; "
            f"make it by hand: useradd --system --shell /usr/sbin/nologin {name}",
        )
    return EngineUser(name)


def _missing_capabilities() -> str | None:
    effective = 0
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        effective = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    missing = [name for name, bit in _NEEDED.items() if not effective >> bit & 1]
    return f"root lacks {', '.join(missing)} here" if missing else None


def _mounting_refused() -> str | None:
    package_root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MOUNT_TEST, str(package_root)],
        cwd="/var/empty" if os.path.isdir("/var/empty") else "/mnt" if os.path.isdir("/mnt") else "/tmp",
        env={},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return f"mount namespaces are not allowed here ({said[-1] if said else f'status {done.returncode}'})"


def _make(name: str) -> str | None:
    """None: it is there. Else why not."""
    if _exists(name):
        return None
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        return "there is no useradd"
    groups = ",".join(group for group in DEVICE_GROUPS if _group_exists(group))
    command = [program, "--system", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin"]
    command += (["--groups", groups] if groups else []) + [name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0 and not _exists(name):  # two agents may have made it at once
        return done.stderr.strip() or f"useradd ended with status {done.returncode}"
    return None


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
