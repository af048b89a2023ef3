"""Puts the agent's unit in place, and starts it. Safe to run again: what is as it should be is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.service import systemd, unit_file
from llmgw.agent.service.systemd import DROP_INS, UNIT, ServiceRefused
from llmgw.agent.service.unit import unit
from llmgw.config import ConfigError, load_agent

USUAL_BINARY = Path("/usr/local/bin/llmgw")
_VERSION_S = 120.0
"""A release unpacks itself when it is first run."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What was done, one sentence each, and the pid of the agent that runs now (0: none was started)."""

    done: tuple[str, ...]
    pid: int


def install(config: Path, *, binary: Path | None = None, start: bool = True, restart: bool = False) -> Installed:
    """Write the unit, enable it, and have it running. Blocks until the agent has said that it started.

    It is started anew where its unit, its binary or its file changed since it was started, or with ``restart``.
    Raises ServiceRefused in words; where the file or the binary is not in order, before anything was changed.
    """
    systemd.check_here("install", f"llmgw agent install --config {config}")
    config, binary = _checked_config(config), _checked_binary(binary)
    version = _version(binary)
    before = systemd.state()
    if before.loaded == "masked":
        raise ServiceRefused(f"{UNIT} is masked on this machine: `systemctl unmask {UNIT}`, and install it again")
    done = unit_file.put(unit(binary, config))
    changed = bool(done) or before.needs_reload
    if changed:
        systemd.run("daemon-reload")
    if before.enabled != "enabled":
        systemd.run("enable", UNIT)
        done.append(f"enabled {UNIT}: it starts with the machine")
    if not start:
        done.append(f"not started, as asked; it would run {binary} ({version}): systemctl restart {UNIT}")
        return Installed(tuple(done), 0)
    why = _why_anew(before, binary, config, changed=changed, asked=restart)
    if why:
        _start(done)
        done.append(f"{why}; runs {binary} ({version}) for {config}")
    pid = systemd.state().pid
    if not why:
        done.append(f"{UNIT} runs since before ({binary}, {version}, pid {pid}); nothing had changed")
    return Installed(tuple(done), pid)


def _checked_config(config: Path) -> Path:
    config = config.absolute()
    try:
        load_agent(config)
    except ConfigError as error:
        hint = (
            "" if config.exists() else "\n`llmgw agent join` writes one; or see the documentation of the agent's file"
        )
        raise ServiceRefused(f"nothing was changed: the agent would not start with this file\n{error}{hint}") from error
    return config


def _checked_binary(binary: Path | None) -> Path:
    if binary is None:
        binary = _own_binary()
    binary = binary.absolute()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise ServiceRefused(
            f"nothing was changed: {binary} is no program that can be run; put llmgw there, as in "
            f"`install -m 755 llmgw-… {USUAL_BINARY}`, or name another with --binary"
        )
    return binary


def _own_binary() -> Path:
    """The ``llmgw`` that was typed, where that is a file of this name; else where it usually is."""
    typed = shutil.which(sys.argv[0])
    if typed is not None and Path(typed).name == "llmgw":
        return Path(typed)
    return USUAL_BINARY


def _version(binary: Path) -> str:
    """Run as the unit will run it. Raises ServiceRefused where it does not."""
    try:
        said = subprocess.run(
            [binary, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceRefused(f"nothing was changed: {binary} can't be run: {error}") from error
    version = said.stdout.strip()
    if said.returncode != 0 or not version.startswith("llmgw v"):
        words = " ".join((said.stderr or said.stdout).split())[-300:] or "it said nothing"
        raise ServiceRefused(
            f"nothing was changed: {binary} is not a llmgw that runs here: `{binary} --version` ended with status "
            f"{said.returncode}: {words}"
        )
    return version


_DOUBT_S = 0.05
"""The kernel counts the age of a process in hundredths of a second, and stamps files by its last tick."""


def _why_anew(before: systemd.State, binary: Path, config: Path, *, changed: bool, asked: bool) -> str:
    """Why the agent is started, as the beginning of a sentence; empty where it may go on as it is."""
    if before.pid == 0 or before.active != "active":
        return "started the agent"
    again = "started the agent anew (its engines went on)"
    if changed:
        return f"{again}: its unit had changed"
    started_at = systemd.started_at(before.pid)
    drop_ins = [(path, "a drop-in of its unit") for path in sorted(DROP_INS.glob("*.conf"))]
    for path, what in ((binary, "its binary"), (config, "its file"), *drop_ins):
        # Where the clocks leave a doubt it is started: that costs its engines nothing.
        if path.stat().st_ctime >= started_at - _DOUBT_S:
            return f"{again}: {what} had changed"
    return f"{again}, as asked" if asked else ""


def _start(done: list[str]) -> None:
    systemd.run("daemon-reload")  # systemd does not see by itself that there is a first drop-in
    ended = systemd.attempt("restart", UNIT, limit_s=systemd.START_S)
    if ended.returncode == 0:
        return
    lines = systemd.journal()
    said = "".join(f"\n  {line}" for line in lines) or "\n  (nothing)"
    before = "".join(f"{sentence}\n" for sentence in done)
    words = " ".join(ended.stderr.split())
    raise ServiceRefused(
        f"{before}the agent did not start: {words}\nit said:{said}\n"
        f"it is tried again every 2 s; `systemctl status {UNIT}` and `journalctl -u {UNIT}` say how that goes"
    )
