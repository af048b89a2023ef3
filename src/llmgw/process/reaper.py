"""The small parent of one detached program. Run by path: ``python -I -S reaper.py RECORD_DIR [--in-unit|--succeed]``.

It is in a session of its own and outlives whoever started it. It starts the program in another session, writes down
who runs *before* the program's first instruction, keeps its output, and when the program has ended (or is told to end)
sees to it that nothing of it is left, writes how it ended, and goes.

SIGTERM: ask the program to end (SIGTERM to its whole group, once). SIGUSR1: kill what is left of it now.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # run by path, isolated: nothing else says where the package lies
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmgw.process import linux, memory
from llmgw.process.account import account, oom_score, set_oom_score
from llmgw.process.attendant import Attendant, make_pipe
from llmgw.process.birth import run_program
from llmgw.process.errors import StartError
from llmgw.process.identity import alive, identify, pids, read_stat
from llmgw.process.record import (
    DetachedSpec,
    ExitRecord,
    Record,
    claim_spec,
    is_taken_back,
    lock_is_held,
    read_record,
    settle,
    take_lock,
    write_exit,
    write_record,
)
from llmgw.process.successor import Successor

STRAGGLER_GRACE_S = 1.0
"""After a stop that was asked for, children get this long to follow the program before they are killed."""

_REAPER_OOM_SCORE = -900
_TICK_S = 0.05
_LONGEST_TICK_S = 1.0


class Reaper(Attendant):
    """The parent of the program."""

    def __init__(self, spec: DetachedSpec) -> None:
        super().__init__()
        self._spec = spec
        self._kills_before = memory.kills_counted()
        self._killed = False
        self._started_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._pid = 0

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the program and record it. Raises StartError; then nothing runs."""
        who = None if self._spec.user is None else account(self._spec.user)
        pipe, program_end = make_pipe(self._spec.record_dir, who)
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(go_write)
            run_program(self._spec, who, program_end, go_read, error_write)
        for fd in (program_end, go_read, error_write):
            os.close(fd)
        self._write_record()
        if not is_taken_back(self._spec.record_dir):
            os.write(go_write, b"g")
        os.close(go_write)
        words = _read_all(error_read)
        if words:
            os.waitpid(self._pid, 0)
            raise StartError(words.decode("utf-8", "replace"))
        self.take_output(pipe, self._spec.log_path, self._spec.log_limit_bytes, self._spec.logs_kept)

    def _write_record(self) -> None:
        spec = self._spec
        record = Record(
            program=identify(self._pid, spec.nonce),
            reaper=identify(os.getpid(), spec.nonce),
            started_at=time.time(),
            argv=spec.argv,
            log_path=spec.log_path,
            unit=spec.unit,
            labels=spec.labels,
            log_limit_bytes=spec.log_limit_bytes,
            logs_kept=spec.logs_kept,
        )
        write_record(spec.record_dir, record)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Stay until the program and everything it started are gone, then write how it ended."""
        ended = self._until_program_ended()
        ended_at = time.time()  # not that of what it left: of programs that fall together, the first is the reason
        self._clear_descendants()
        lost_bytes = self.finish_output()
        write_exit(self._spec.record_dir, self._exit_record(ended, ended_at, lost_bytes))

    def _until_program_ended(self) -> os.waitid_result:
        forwarded = False
        while True:
            if self.asked and not forwarded:
                # Once only: a second SIGTERM makes some engines drop what they are still answering.
                forwarded = True
                self._signal_group(signal.SIGTERM)
            if self.kill_now and not self._killed:
                self._killed = True
                self._signal_group(signal.SIGKILL)
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended
            self.wait_for_news(None)
            if self.child_ended:
                self.child_ended = False
                self._reap_orphans()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _clear_descendants(self) -> None:
        """Until the program is waited for, its pid names its group and can't be anybody else's.

        Whatever a killed child leaves becomes our child, so killing our children until there are none reaches all.
        """
        if self.asked and not self.kill_now:
            self._grace()
        tick_s = _TICK_S
        while True:
            self._signal_group(signal.SIGKILL)
            for child in self._children():
                os.kill(child, signal.SIGKILL)
            self._reap_orphans()
            if not self._children():
                break
            self.wait_for_news(tick_s)  # one that hangs in a driver may take long
            tick_s = min(tick_s * 1.5, _LONGEST_TICK_S)
        os.waitpid(self._pid, 0)

    def _grace(self) -> None:
        deadline = time.monotonic() + STRAGGLER_GRACE_S
        told: set[int] = set()
        while (left := set(self._children())) and time.monotonic() < deadline and not self.kill_now:
            for child in left - told:
                os.kill(child, signal.SIGTERM)
            told |= left
            self.wait_for_news(_TICK_S)
            self._reap_orphans()

    def _children(self) -> list[int]:
        """Our children but for the program itself. Ours alone to wait for, so that their pids stay theirs."""
        me, found = os.getpid(), []
        for pid in pids():
            stat = read_stat(pid)
            if stat is not None and stat.parent == me and pid != self._pid:
                found.append(pid)
        return found

    def _reap_orphans(self) -> None:
        for child in self._children():
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)

    def _exit_record(self, ended: os.waitid_result, ended_at: float, lost_bytes: int) -> ExitRecord:
        by_exit = ended.si_code == os.CLD_EXITED
        name = None if by_exit else signal_name(ended.si_status)
        return ExitRecord(
            status=ended.si_status if by_exit else None,
            signal=name,
            oom=name == "SIGKILL" and not self._killed and self._out_of_memory(),
            asked=self.asked,
            ended_at=ended_at,
            lost_output_bytes=lost_bytes,
        )

    def _out_of_memory(self) -> bool:
        after = memory.kills_counted()
        counted = after is not None and self._kills_before is not None and after > self._kills_before
        return counted or memory.kernel_named(self._pid, self._started_s)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _read_all(fd: int) -> bytes:
    found = b""
    while data := os.read(fd, 4096):
        found += data
    os.close(fd)
    return found


def _tell_systemd() -> None:
    """sd_notify(3): the unit counts as started from here on."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, suppress(OSError):
            notify.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def _leave_starter() -> int:
    """Go on in a child that belongs to nobody. Returns a descriptor to close when the start is decided."""
    decided_read, decided_write = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(decided_write)
        os.read(decided_read, 1)
        os._exit(0)
    os.close(decided_read)
    os.setsid()
    return decided_write


def reap(record_dir: str, decided: Callable[[], None]) -> None:
    """Start what the spec in ``record_dir`` says and stay with it. ``decided`` is called once it runs, or will not."""
    take_lock(record_dir)
    spec = claim_spec(record_dir)
    if spec is None:
        return  # taken back by a later starter, which found no reaper
    if not spec.spares_others:
        linux.become_subreaper()
    inherited = oom_score()
    set_oom_score(_REAPER_OOM_SCORE)
    reaper = Reaper(replace(spec, oom_score_adj=inherited if spec.oom_score_adj is None else spec.oom_score_adj))
    try:
        reaper.start()
    except (StartError, OSError) as error:
        write_exit(record_dir, ExitRecord(error=str(error), ended_at=time.time()))
        return
    finally:
        settle(record_dir)
        decided()
    reaper.run()


def succeed(record_dir: str, decided: Callable[[], None]) -> None:
    """Take the place of a reaper that was killed. Nothing happens where there is one, or nothing to look after."""
    record = None if lock_is_held(record_dir) else read_record(record_dir)
    if record is None or not alive(record.program):
        return
    take_lock(record_dir)
    set_oom_score(_REAPER_OOM_SCORE)
    successor = Successor(record_dir, record)
    successor.begin()
    decided()
    successor.run()


def main(arguments: list[str]) -> int:
    record_dir, options = arguments[0], arguments[1:]
    os.umask(0o077)
    if "--in-unit" in options:
        reap(record_dir, _tell_systemd)
        return 0
    decided = _leave_starter()
    if "--succeed" in options:
        succeed(record_dir, lambda: os.close(decided))
    else:
        reap(record_dir, lambda: os.close(decided))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
