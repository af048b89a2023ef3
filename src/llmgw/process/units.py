"""Transient systemd units, by the command line tools alone: one per program where systemd runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llmgw.process.errors import StartError
from llmgw.process.identity import NONCE
from llmgw.process.record import DetachedSpec

SLICE = "llmgw.slice"
"""All units lie in it, so that an operator has one place for limits of their own."""

_COMMAND_S = 30.0
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9:_.-]+")


def systemd_runs() -> bool:
    """Whether this process may make units: systemd is the machine's init, and we are root."""
    return os.geteuid() == 0 and Path("/run/systemd/system").is_dir() and shutil.which("systemd-run") is not None


def unit_name(*parts: str) -> str:
    """A valid unit name that people recognise: ``unit_name("shard", "smol-abcde/0", "a1b2")``."""
    return "llmgw-" + "-".join(_NOT_IN_NAMES.sub("-", part) for part in parts) + ".service"


def run_in_unit(spec: DetachedSpec, command: Sequence[str]) -> None:
    """Run a reaper as the main process of its unit; returns once it has said that the start is decided.

    ``KillMode=mixed``: ``systemctl stop`` asks the reaper alone, which asks the program once; what is left after the
    time limit is killed with the whole control group. ``OOMPolicy=continue``: the reaper sees what was
    killed, and clears up itself.
    """
    assert spec.unit is not None
    properties = (
        "Type=notify",
        "NotifyAccess=main",
        "KillMode=mixed",
        "TimeoutStartSec=60",
        "TimeoutStopSec=90",
        "OOMPolicy=continue",
        "TasksMax=infinity",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "UMask=0077",
        f"StandardError=append:{spec.record_dir}/reaper.log",
    )
    arguments = ["systemd-run", "--quiet", f"--unit={spec.unit}", f"--slice={SLICE}"]
    arguments += [f"--property={text}" for text in properties]
    arguments += [f"--description={spec.description or spec.unit}", f"--setenv={NONCE}={spec.nonce}", "--", *command]
    done = _run(arguments)
    if done.returncode != 0:
        raise StartError(f"systemd did not start {spec.unit}: {done.stderr.strip() or f'status {done.returncode}'}")


def contains(unit: str, pid: int) -> bool:
    """Whether the process is in the unit's control group."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(f"/{unit}" in line for line in groups.splitlines())


def kill(unit: str) -> None:
    """SIGKILL to all of the unit's control group."""
    _run(["systemctl", "kill", "--signal=SIGKILL", "--kill-whom=all", unit])


def result(unit: str) -> str:
    """How systemd says that a unit ended (``success``, ``signal``, ``oom-kill`` ...), then let it forget the unit.

    Empty where it does not know the unit, or any more.
    """
    said = _run(["systemctl", "show", unit, "--property=Result", "--value"]).stdout.strip()
    _run(["systemctl", "reset-failed", unit])
    return said


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(arguments, 1, "", str(error))
