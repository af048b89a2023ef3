"""The machine's systemd, by its command line tools."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNIT = "llmgw-agent.service"
UNIT_FILE = Path("/etc/systemd/system") / UNIT
DROP_INS = UNIT_FILE.with_name(f"{UNIT}.d")

RUNNING = Path("/run/systemd/system")
_COMMAND_S = 60.0
START_S = 330.0
"""For what waits until the agent has started: a little longer than its unit lets it take."""
_LINES = 20


class ServiceRefused(Exception):
    """The service can't be put in place, or taken away; the message says why, what was done, and what to do next."""


@dataclass(frozen=True, slots=True)
class State:
    """What systemd knows of the agent's unit. ``pid`` is 0 where no process of it runs."""

    loaded: str
    active: str
    enabled: str
    pid: int
    needs_reload: bool

    @property
    def runs(self) -> bool:
        return self.active in ("active", "activating", "reloading", "deactivating")


def check_here(what: str, command: str) -> None:
    """Refuses in words where there is no systemd, or no right to change what it runs."""
    if not RUNNING.is_dir():
        raise ServiceRefused(
            f"systemd does not run this machine ({RUNNING} is not there), so there is nothing to {what}; "
            "have whatever manages services here run `llmgw agent --config FILE`"
        )
    if os.geteuid() != 0:
        raise ServiceRefused(f"only root can {what} a service of this machine: sudo {command}")


def state() -> State:
    names = ("LoadState", "ActiveState", "UnitFileState", "MainPID", "NeedDaemonReload")
    said = run("show", UNIT, *(f"--property={name}" for name in names))
    told = dict(line.partition("=")[::2] for line in said.splitlines())
    pid = told.get("MainPID", "")
    return State(
        loaded=told.get("LoadState", ""),
        active=told.get("ActiveState", ""),
        enabled=told.get("UnitFileState", ""),
        pid=int(pid) if pid.isdecimal() else 0,
        needs_reload=told.get("NeedDaemonReload") == "yes",
    )


def run(*arguments: str, limit_s: float = _COMMAND_S) -> str:
    """One ``systemctl``; what it printed. Raises ServiceRefused with its own words."""
    done = attempt(*arguments, limit_s=limit_s)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
        raise ServiceRefused(f"`systemctl {' '.join(arguments)}` failed: {words}")
    return done.stdout


def attempt(*arguments: str, limit_s: float = _COMMAND_S) -> subprocess.CompletedProcess[str]:
    return _run(("systemctl", "--no-pager", "--no-ask-password", *arguments), limit_s)


def journal() -> list[str]:
    """What the agent said last, as far as the journal can be read."""
    done = _run(("journalctl", "--no-pager", "--quiet", f"--unit={UNIT}", f"--lines={_LINES}", "--output=cat"), 20.0)
    return done.stdout.splitlines() if done.returncode == 0 else []


def started_at(pid: int) -> float:
    """When a process was started, in Unix time by today's clock; 0 where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    ticks = int(text[text.rindex(")") + 1 :].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _run(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"},
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no {command[0]} on PATH")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {limit_s:g} s")
