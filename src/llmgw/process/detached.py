"""Start programs that outlive us, and find them again: the starter's side of the reaper."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from llmgw.process import output, units
from llmgw.process.errors import RecordError, StartError, StopError
from llmgw.process.identity import NONCE, Identity, alive, boot_id, holders, send_signal
from llmgw.process.record import (
    DetachedSpec,
    ExitRecord,
    Record,
    is_settled,
    lock_is_held,
    path_of,
    read_exit,
    read_record,
    take_back,
    void_spec,
    write_exit,
    write_spec,
)
from llmgw.process.watch import gone

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH of a program whose environment is built from nothing."""

_REAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")))
_START_S = 60.0
_CLAIMED_S = 15.0
_LOOK_S = 0.02
_KILLED_S = 15.0
"""How long a killed program may take to be gone; longer means that it hangs in the kernel."""


def new_nonce() -> str:
    return secrets.token_hex(16)


class Detached:
    """A handle on one started program, by its record directory. Holds nothing open: any number may exist."""

    def __init__(self, record_dir: str | Path, record: Record) -> None:
        self.record_dir = Path(record_dir)
        self.record = record

    @property
    def pid(self) -> int:
        return self.record.program.pid

    def running(self) -> bool:
        """Whether the program itself, or the reaper that is still clearing up behind it, runs."""
        return self._reaper_alive() or self._program_alive()

    def ended(self) -> ExitRecord | None:
        """How it ended; None while it runs. One whose end nobody saw is entered as such."""
        if self._reaper_alive():
            return None
        told = read_exit(self.record_dir)
        if told is not None or self._program_alive():
            return told
        return read_exit(self.record_dir) or self._unseen()

    async def wait(self) -> ExitRecord:
        """Return when it has ended and nothing of it is left. Raises StopError where something hangs in the kernel."""
        while (ended := self.ended()) is None:
            await asyncio.to_thread(self.mend)
            await gone(self.record.reaper if self._reaper_alive() else self.record.program)
        await self._clear(ended)
        return ended

    def mend(self) -> None:
        """Give a running program whose reaper was killed another one, which goes on with its output. Blocks."""
        if self.record.unit is not None or self._reaper_alive() or not self._program_alive():
            return
        with suppress(StartError):
            _run_reaper(self.record_dir, self.record.program.nonce, "--succeed")
        self._reaper_alive()

    async def stop(self, timeout_s: float) -> ExitRecord:
        """SIGTERM to the whole group, after ``timeout_s`` SIGKILL to everything that descends from it.

        Returns when all of it is gone. Raises StopError where something does not go although it was killed.
        """
        if self.ended() is None:
            self._signal(signal.SIGTERM)
        if (ended := await self._within(timeout_s)) is not None:
            return ended
        self._signal(signal.SIGUSR1)
        if (ended := await self._within(_KILLED_S)) is not None:
            return ended
        if self.record.unit is not None:
            await asyncio.to_thread(units.kill, self.record.unit)
            if (ended := await self._within(_KILLED_S)) is not None:
                return ended
        raise self._hangs()

    async def _within(self, timeout_s: float) -> ExitRecord | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        return None

    async def _clear(self, ended: ExitRecord) -> None:
        """Kill what a program has left where its reaper was killed as well and could not do it."""
        if ended.seen:
            return
        deadline = time.monotonic() + _KILLED_S
        while left := await asyncio.to_thread(self._holders):
            for process in left:
                send_signal(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise self._hangs()
            await asyncio.sleep(_LOOK_S)

    def _unseen(self) -> ExitRecord:
        unit = self.record.unit
        result = "" if unit is None else units.result(unit)
        ended = ExitRecord(
            ended_at=time.time(), oom=result == "oom-kill", signal="SIGKILL" if result == "oom-kill" else None
        )
        write_exit(self.record_dir, ended)
        return ended

    def _hangs(self) -> StopError:
        left = ", ".join(str(process.pid) for process in self._holders())
        return StopError(
            f"{self.record.argv[0]} (pid {self.pid}) was killed and is still there (pids {left}): it hangs in the "
            "kernel, most likely in a device driver; see `dmesg`. If it does not go, the machine has to be restarted"
        )

    def tail(self, lines: int) -> list[str]:
        return output.tail(self.record.log_path, lines)

    def _reaper_alive(self) -> bool:
        if self._ours(self.record.reaper):
            return True
        with suppress(RecordError):
            record = read_record(self.record_dir)
            if record is not None and record.reaper != self.record.reaper and record.program == self.record.program:
                self.record = record  # it has a successor
                return self._ours(record.reaper)
        return False

    def _program_alive(self) -> bool:
        return self._ours(self.record.program)

    def _ours(self, process: Identity) -> bool:
        return alive(process) and (self.record.unit is None or units.contains(self.record.unit, process.pid))

    def _signal(self, number: signal.Signals) -> None:
        """To the reaper, which passes it on; where that was killed, to each process that carries the nonce."""
        if self._reaper_alive() and send_signal(self.record.reaper, number):
            return
        direct = signal.SIGKILL if number is signal.SIGUSR1 else number
        for process in self._holders():
            send_signal(process, direct)

    def _holders(self) -> tuple[Identity, ...]:
        """Everything that carries the program's nonce; nobody after a restart of the machine."""
        program = self.record.program
        return holders(program.nonce) if program.boot_id == boot_id() else ()


def start(spec: DetachedSpec) -> Detached:
    """Start a program and return once it runs. Blocks (about 0.1 s). Raises StartError in words; then nothing runs."""
    try:
        Path(spec.log_path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_spec(spec)
    except OSError as error:
        raise StartError(f"the start can't be written down in {spec.record_dir}: {error}") from None
    try:
        if spec.unit is not None:
            units.run_in_unit(spec, [*_REAPER, spec.record_dir, "--in-unit"])
        else:
            _run_reaper(spec.record_dir, spec.nonce)
    except StartError:
        if void_spec(spec.record_dir):
            raise  # nothing has taken the spec, and nothing will
    return _decided(spec.record_dir)


def find(record_dir: str | Path) -> Detached | None:
    """What an earlier starter left in a record directory, running or ended; None where nothing was ever started.

    Starts and signals nothing. Waits for a start that is under way. Raises RecordError where the files make no sense,
    and StartError where the start had failed.
    """
    void_spec(record_dir)
    if read_record(record_dir) is None and not lock_is_held(record_dir) and read_exit(record_dir) is None:
        return None
    return _decided(record_dir)


def _run_reaper(record_dir: str | Path, nonce: str, *options: str) -> None:
    """Run a reaper in a session of its own; returns once it has said that its start is decided."""
    environment = {"PATH": BASE_PATH, "LANG": "C.UTF-8", NONCE: nonce}
    log = os.open(path_of(record_dir, "reaper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        subprocess.run(
            [*_REAPER, str(record_dir), *options],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"the reaper could not be started: {error}") from None
    finally:
        os.close(log)


def _decided(record_dir: str | Path) -> Detached:
    """Wait for a start that a reaper has taken on to be decided."""
    deadline = time.monotonic() + _CLAIMED_S
    while True:
        held = lock_is_held(record_dir)
        ended, record = read_exit(record_dir), read_record(record_dir)
        if ended is not None and ended.error is not None:
            raise StartError(ended.error)
        if record is not None and (is_settled(record_dir) or not held):
            return Detached(record_dir, record)
        if not held:
            raise StartError(f"the reaper ended before it had started anything: {_complaint(record_dir)}")
        if time.monotonic() > deadline:
            raise _given_up(record_dir)
        time.sleep(_LOOK_S)


def _given_up(record_dir: str | Path) -> StartError:
    """Take back a start that does not come to an end, so that it is not obeyed when nobody expects it any more."""
    take_back(record_dir)
    record = read_record(record_dir)
    if record is not None:
        send_signal(record.reaper, signal.SIGUSR1)
        send_signal(record.program, signal.SIGKILL)
    return StartError(
        "the start did not come to an end and was given up: most likely a file system that it needs does not answer; "
        f"see {record_dir}"
    )


def _complaint(record_dir: str | Path) -> str:
    try:
        text = path_of(record_dir, "reaper.log").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return text.splitlines()[-1] if text else "it was killed"


__all__ = [
    "BASE_PATH",
    "Detached",
    "DetachedSpec",
    "ExitRecord",
    "Record",
    "RecordError",
    "StartError",
    "StopError",
    "find",
    "new_nonce",
    "start",
]
