"""A long-lived program that is there once: adopted where it runs, started where it does not, and started again
when it ends. It outlives whoever keeps it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.process import units
from llmgw.process.detached import Detached, find, new_nonce, start
from llmgw.process.errors import ProcessError
from llmgw.process.identity import send_signal
from llmgw.process.record import DetachedSpec, ExitRecord

AGAIN_FIRST_S = 0.2
AGAIN_MOST_S = 30.0
STEADY_S = 60.0
"""After running for this long, the next end is answered as quickly as the first."""
LAST_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is kept. ``folder`` belongs to this program alone; its keeper must be the only one (hold a lock)."""

    name: str
    folder: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    labels: Mapping[str, str] = field(default_factory=dict)


def llmgw_argv(*arguments: str) -> tuple[str, ...]:
    """This llmgw, run as it is run now. ``-P``: what lies in the working directory is never imported."""
    return (sys.executable, "-P", "-m", "llmgw", *arguments)


class Kept:
    def __init__(self, program: Program, say: Callable[[str], None]) -> None:
        self._program = program
        self._say = say
        self._running: Detached | None = None
        self._since_s = 0.0

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running and self._running.running() else None

    def find(self) -> bool:
        """Whether it runs now; adopted if so, never started."""
        self._running = self._find()
        return self._running is not None

    async def ensure(self) -> bool:
        """Have it running; True where it was found running. Raises StartError."""
        if await asyncio.to_thread(self.find):
            self._since_s = time.monotonic() - STEADY_S
            return True
        self._running = await asyncio.to_thread(start, self._spec())
        self._since_s = time.monotonic()
        return False

    async def keep(self) -> None:
        """Starts it again whenever it ends, quickly at first, then ever more slowly; until cancelled."""
        pause = AGAIN_FIRST_S
        while True:
            if self._running is not None:
                ended = await self._running.wait()
                if time.monotonic() - self._since_s >= STEADY_S:
                    pause = AGAIN_FIRST_S
                self._say(f"{self._program.name} {how(ended)}; starting it again in {pause:g} s{self._last()}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_MOST_S)
            try:
                await self.ensure()
            except ProcessError as error:
                self._running = None
                self._say(f"{self._program.name} can't be started: {error}; trying again in {pause:g} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_MOST_S)

    def signal(self, number: signal.Signals) -> bool:
        """Signal the program itself; False where it does not run."""
        return self._running is not None and send_signal(self._running.record.program, number)

    async def stop(self, timeout_s: float) -> None:
        """Stops it for good: SIGTERM, then SIGKILL after ``timeout_s``. Raises StopError."""
        known = self._running if self.pid is not None else None
        running = known or await asyncio.to_thread(self._find)
        if running is not None:
            await running.stop(timeout_s)
        self._running = None

    def last_lines(self) -> list[str]:
        return self._running.tail(LAST_LINES) if self._running else []

    def _last(self) -> str:
        lines = self.last_lines()
        return "; its last words: " + " | ".join(lines[-3:]) if lines else ""

    def _spec(self) -> DetachedSpec:
        nonce = new_nonce()
        program = self._program
        return DetachedSpec(
            argv=program.argv,
            env=program.env,
            cwd="/",
            log_path=str(program.log_path),
            record_dir=str(program.folder / nonce),
            nonce=nonce,
            labels=program.labels,
            spares_others=True,
            # Under systemd what is started here would end with the unit that started it.
            unit=units.unit_name(program.folder.name, nonce[:8]) if units.systemd_runs() else None,
        )

    def _find(self) -> Detached | None:
        """The one that runs; what is left of those that ended is cleared away."""
        found: Detached | None = None
        folder = self._program.folder
        for record_dir in sorted(folder.iterdir()) if folder.is_dir() else []:
            known: Detached | None = None
            with suppress(ProcessError):
                known = find(record_dir)
            if known is not None and known.running():
                found = known
            else:
                shutil.rmtree(record_dir, ignore_errors=True)
        return found


def how(ended: ExitRecord) -> str:
    """How it ended, as the end of a sentence."""
    if ended.error:
        return f"was not started: {ended.error}"
    if ended.oom:
        return "was killed for lack of memory"
    if ended.signal:
        return f"was killed by {ended.signal}"
    return f"exited with status {ended.status}" if ended.status is not None else "ended unseen"
