"""OS packages that engines need, installed from the system's own sources by its own tool.

Other package commands are waited for, never got rid of: their locks are not deleted, their processes not killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch.artifact import Say
from llmgw.agent.fetch.child import Ended, ending
from llmgw.agent.install.held import Held, held_in_apt, held_in_dnf
from llmgw.agent.install.lasting import run_lasting
from llmgw.agent.install.providers import System, Tool

WAIT_S = 600.0
"""How long others are waited for, in all."""
RUN_LIMIT_S = 1800.0
_PAUSE_FIRST_S = 1.0
_PAUSE_MOST_S = 10.0
_LOCK_SHOWS_WITHIN_S = 1.0
"""By then, what is run again has met the lock that it met before."""
_LAST_LINES = 5

_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")


class PackagesNotAllowed(Exception):
    """Nothing may be installed here; the message says why, and what to type."""


class PackagesFailed(Exception):
    """They were not installed; the message holds the last lines of the command that failed."""


class OsPackages:
    """One per agent. Installs of one agent take turns; those of several wait for each other by the tool's own locks."""

    def __init__(
        self, folder: Path, *, system: System | None = None, wait_s: float = WAIT_S, run_dir: Path = Path("/run")
    ) -> None:
        """``folder`` gets the transcript of the last install. ``run_dir`` is where cloud-init says how far it is."""
        self.transcript = folder / "os-packages.log"
        """What the commands of the last install printed."""
        self._system = system or System.here()
        self._wait_s = wait_s
        self._run_dir = run_dir
        self._turn = asyncio.Lock()

    def refusal(self, packages: Sequence[str]) -> str | None:
        """Why this agent installs none, and what to type instead; None where it may."""
        tool = self._system.tool
        if tool is None:
            none = f"no {self._system.family}" if self._system.family else "neither apt-get nor dnf"
            return f"there is {none} on this node: install {_listed(packages)} by hand"
        if os.geteuid() != 0:
            return f"the agent is not root, so that it can't install packages: {tool} install {' '.join(packages)}"
        return None

    async def install(self, packages: Sequence[str], say: Say) -> None:
        """Has ``packages`` whole, also those that are there and have lost files. ``say`` hears what is done, in words.

        Raises PackagesNotAllowed, PackagesFailed, OSError. Called off, it leaves no package half installed.
        """
        if refusal := self.refusal(packages):
            raise PackagesNotAllowed(refusal)
        if self._turn.locked():
            say(f"waiting for the OS packages of another engine, to install {_listed(packages)} then")
        async with self._turn:
            self.transcript.parent.mkdir(parents=True, exist_ok=True)
            self.transcript.unlink(missing_ok=True)
            assert self._system.tool is not None
            run = _Run(self._system, self._system.tool, self.transcript, say, time.monotonic() + self._wait_s)
            await self._first_boot(run)
            if self._system.tool == "apt-get":
                await _install_by_apt(run, packages)
            else:
                await _install_by_dnf(run, packages)

    async def _first_boot(self, run: _Run) -> None:
        """cloud-init installs packages, too, and takes up its lock again and again: it goes first.

        However it ends: what it leaves broken shows by itself.
        """
        program = shutil.which("cloud-init", path=self._system.path)
        begun = (self._run_dir / "cloud-init/status.json").exists()
        if program is not None and begun and not (self._run_dir / "cloud-init/result.json").exists():
            await run.once([program, "status", "--wait"], "waiting for cloud-init to finish this machine's first boot")


@dataclass(slots=True)
class _Run:
    """The commands of one install."""

    system: System
    tool: Tool
    transcript: Path
    say: Say
    waits_until: float
    """time.monotonic() after which no lock is waited for."""
    _told: str = ""

    async def patiently(
        self, argv: Sequence[str], doing: str, *, may_end: bool, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Runs ``argv``, again and again while what stops it is another's lock. Raises PackagesFailed where that stays.

        ``may_end``: it may be ended at any time; else only while it waits.
        """
        pause, waited = _PAUSE_FIRST_S, False
        while True:
            listener = _Listener(doing, self.tell, self._held, self._waiting, may_end)
            ended = await self._start(argv, listener, env or {}, quiet_s=_LOCK_SHOWS_WITHIN_S if waited else 0.0)
            held = self._held(ended.output) if ended.status != 0 else None
            if held is None:
                if ended.status is None:
                    raise PackagesFailed(self._stuck(argv, listener.held))
                return ended
            if time.monotonic() + pause > self.waits_until:
                raise PackagesFailed(self._given_up(held))
            self.tell(self._waiting(held))
            await asyncio.sleep(pause)
            waited = True
            pause = min(2 * pause, _PAUSE_MOST_S)

    async def once(self, argv: Sequence[str], doing: str) -> None:
        """Runs what may be ended at any time, for as long as others are waited for at most."""
        listener = _Listener(doing, self.tell, lambda text: None, self._waiting, may_end=True)
        await self._start(argv, listener, {}, limit_s=self.waits_left_s)

    def tell(self, words: str) -> None:
        """Each change once: apt-get says every second that it waits."""
        if words != self._told:
            self._told = words
            self.say(words)

    @property
    def waits_left_s(self) -> float:
        return max(0.0, self.waits_until - time.monotonic())

    async def _start(
        self,
        argv: Sequence[str],
        listener: _Listener,
        env: Mapping[str, str],
        *,
        limit_s: float = RUN_LIMIT_S,
        quiet_s: float = 0.0,
    ) -> Ended:
        """``quiet_s``: it does not count as begun before that."""
        if not quiet_s:
            listener.begin()
        begins = asyncio.get_running_loop().call_later(quiet_s, listener.begin) if quiet_s else None
        try:
            return await run_lasting(
                argv,
                env={**_environment(self.system.path), **env},
                transcript=self.transcript,
                hear=listener.hear,
                may_end=listener.may_end,
                limit_s=limit_s,
            )
        finally:
            if begins is not None:
                begins.cancel()

    def failed(self, ended: Ended, doing: str) -> PackagesFailed:
        lines = [line for line in ended.output.splitlines() if line.strip()][-_LAST_LINES:]
        return PackagesFailed(f"{doing} {ending(ended.status)} ({self.transcript} has it all): {' / '.join(lines)}")

    def _held(self, text: str) -> Held | None:
        return held_in_apt(text) if self.tool == "apt-get" else held_in_dnf(text)

    def _waiting(self, held: Held) -> str:
        return f"waiting for another {self.tool} to finish ({held})"

    def _given_up(self, held: Held) -> str:
        look = f": see what it does (ps -fp {held.pid})" if held.pid else ""
        return f"another {self.tool} did not finish ({held}){look}. Nothing was changed"

    def _stuck(self, argv: Sequence[str], held: Held | None) -> str:
        if held is not None:
            return self._given_up(held)
        return (
            f"{' '.join(argv)} did not end within {RUN_LIMIT_S / 60:g} minutes: {self.transcript} shows how far it is"
        )


class _Listener:
    """Tells from a command's lines, as they come, whether it works or waits."""

    def __init__(
        self,
        doing: str,
        say: Say,
        held: Callable[[str], Held | None],
        waiting: Callable[[Held], str],
        may_end: bool,
    ) -> None:
        self.held: Held | None = None
        """The last lock that it named."""
        self._doing = doing
        self._say = say
        self._read = held
        self._waiting = waiting
        self._may_end = may_end
        self._begun = False
        self._waits = False

    def begin(self) -> None:
        self._begun = True
        if not self._waits:
            self._say(self._doing)

    def hear(self, line: str) -> None:
        if not line.strip():
            return
        held = self._read(line)
        if held is not None:
            self.held = _more_telling(held, self.held)
            self._say(self._waiting(self.held))
        elif self._waits and self._begun:
            self._say(self._doing)
        self._waits = held is not None

    def may_end(self) -> bool:
        return self._may_end or self._waits


def _more_telling(held: Held, before: Held | None) -> Held:
    """apt-get's last line names no holder where those before it did."""
    return before if held.pid is None and before is not None and before.pid is not None else held


# -- apt-get


_NOT_AGAIN = "Reinstallation of "
"""``Reinstallation of X is not possible, it cannot be downloaded``: said with status 0, and nothing is done."""

_REFRESH = (
    "Unable to locate package",
    "has no installation candidate",
    "404  Not Found",
    "Unable to fetch some archives",
    _NOT_AGAIN,
)
"""What missing or old lists look like."""


async def _install_by_apt(run: _Run, packages: Sequence[str]) -> None:
    """Fetches first, and may be called off then; installing takes seconds, and is let be."""
    doing = f"installing {_listed(packages)} (apt-get)"
    refresh, mend = True, True
    stages = [["--download-only"], []]
    while stages:
        fetches = bool(stages[0])
        # --reinstall: a package may be there and its library not.
        argv = [*_apt(run), *stages[0], "--no-install-recommends", "--reinstall", "--yes", "install", "--", *packages]
        ended = await run.patiently(argv, doing, may_end=fetches)
        if ended.status == 0 and _NOT_AGAIN not in ended.output:
            stages.pop(0)
        elif mend and "dpkg was interrupted" in ended.output:
            mend = False
            await _configure(run)
        elif refresh and any(sign in ended.output for sign in _REFRESH):
            # However that ends: where some sources can't be read, the others may do.
            refresh = False
            await run.patiently(
                [*_apt(run), "update"], "reading the package sources anew (apt-get update)", may_end=True
            )
        else:
            raise run.failed(ended, f"apt-get install {' '.join(packages)}")


async def _configure(run: _Run) -> None:
    words = "finishing what an interrupted dpkg has left (dpkg --configure -a)"
    argv = [_program(run, "dpkg"), "--force-confold", "--configure", "-a"]
    ended = await run.patiently(argv, words, may_end=False)
    if ended.status != 0:
        raise run.failed(ended, "dpkg --configure -a")


def _apt(run: _Run) -> list[str]:
    # Heeded for dpkg's locks alone; those on lists and archives are waited for by running it again.
    lock = f"DPkg::Lock::Timeout={run.waits_left_s:.0f}"
    return [
        *(_program(run, "apt-get"), "-o", lock, "-o", "Acquire::Retries=3"),
        *("-o", "Dpkg::Options::=--force-confold", "-o", "Dpkg::Options::=--force-confdef"),
    ]


# -- dnf


async def _install_by_dnf(run: _Run, packages: Sequence[str]) -> None:
    there = [package for package in packages if await _is_there(run, package)]
    for verb, some in (("install", [name for name in packages if name not in there]), ("reinstall", there)):
        if some:
            argv = [_program(run, "dnf"), "--assumeyes", "--setopt=install_weak_deps=False", verb, *some]
            ended = await run.patiently(argv, f"installing {_listed(some)} (dnf)", may_end=False)
            if ended.status != 0:
                raise run.failed(ended, f"dnf {verb} {' '.join(some)}")


async def _is_there(run: _Run, package: str) -> bool:
    rpm = shutil.which("rpm", path=run.system.path)
    if rpm is None:
        return False
    ended = await run.patiently([rpm, "--query", "--quiet", package], f"looking for {package}", may_end=True)
    return ended.status == 0


# -- both


def _program(run: _Run, name: str) -> str:
    found = shutil.which(name, path=run.system.path)
    if found is None:
        raise PackagesFailed(f"there is no {name} on this node")
    return found


def _environment(path: str) -> dict[str, str]:
    """Built from nothing, but for the proxies, which apt reads by their small names alone, and apt's own file."""
    environment = {
        "PATH": path,
        "HOME": "/root",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
        "DEBIAN_PRIORITY": "critical",
        "NEEDRESTART_MODE": "a",
    }
    for name in _PROXIES:
        if value := os.environ.get(name) or os.environ.get(name.upper()):
            environment[name] = value
    if config := os.environ.get("APT_CONFIG"):
        environment["APT_CONFIG"] = config
    return environment


def _listed(packages: Sequence[str]) -> str:
    return " and ".join([", ".join(packages[:-1]), packages[-1]]) if len(packages) > 1 else packages[0]
