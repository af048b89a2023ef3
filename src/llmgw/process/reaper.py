"""The small parent of one detached program. Run by path: ``python -I -S reaper.py RECORD_DIR [--in-unit]``.

It is in a session of its own and outlives whoever started it. It starts the program in another session, writes down
who runs *before* the program's first instruction, keeps its output, and when the program has ended (or is told to end)
sees to it that nothing of it is left, writes how it ended, and goes.

SIGTERM: ask the program to end (SIGTERM to its whole group, once). SIGUSR1: kill what is left of it now.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # run by path, isolated: nothing else says where the package lies
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmgw.process import linux, memory, view
from llmgw.process.account import Account, account, become, set_limits, set_oom_score
from llmgw.process.errors import StartError
from llmgw.process.identity import NONCE, identify, pids, read_stat
from llmgw.process.output import OutputWriter, RotatingFile
from llmgw.process.record import (
    DetachedSpec,
    ExitRecord,
    Record,
    claim_spec,
    path_of,
    take_lock,
    write_exit,
    write_record,
)

STRAGGLER_GRACE_S = 1.0
"""After a stop that was asked for, children get this long to follow the program before they are killed."""

_REAPER_OOM_SCORE = -900
_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_FLUSH_S = 5.0
_TICK_S = 0.05
_LONGEST_TICK_S = 1.0
_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGPIPE,
)


class Reaper:
    def __init__(self, spec: DetachedSpec) -> None:
        self._spec = spec
        self._asked = False
        self._kill_now = False
        self._killed = False
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGUSR1, self._kill)
        signal.signal(signal.SIGCHLD, self._note_child)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._kills_before = memory.kills_counted()
        self._started_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._child_ended = False
        self._pid = 0
        self._output = -1
        self._writer: OutputWriter | None = None

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _kill(self, *_: object) -> None:
        self._asked = self._kill_now = True

    def _note_child(self, *_: object) -> None:
        self._child_ended = True

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the program and record it. Raises StartError; then nothing runs."""
        who = None if self._spec.user is None else account(self._spec.user)
        self._output, program_end = self._open_pipe(who)
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(go_write)
            run_program(self._spec, who, program_end, go_read, error_write)
        for fd in (program_end, go_read, error_write):
            os.close(fd)
        self._write_record()
        os.write(go_write, b"g")
        os.close(go_write)
        words = _read_all(error_read)
        if words:
            os.waitpid(self._pid, 0)
            raise StartError(words.decode("utf-8", "replace"))
        file = RotatingFile(self._spec.log_path, self._spec.log_limit_bytes, self._spec.logs_kept)
        self._writer = OutputWriter(file)

    def _open_pipe(self, who: Account | None) -> tuple[int, int]:
        """Both ends are open for reading *and* writing: the program is never told that nobody reads."""
        path = path_of(self._spec.record_dir, "output")
        os.mkfifo(path, 0o600)
        if who is not None:
            os.chown(path, who.uid, who.gid)  # programs open /dev/stderr by its name
        ours = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return ours, os.open(path, os.O_RDWR | os.O_CLOEXEC)

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
        self._clear_descendants()
        self._read_output()
        assert self._writer is not None
        self._writer.close(_FLUSH_S)
        write_exit(self._spec.record_dir, self._exit_record(ended))

    def _until_program_ended(self) -> os.waitid_result:
        forwarded = False
        while True:
            if self._asked and not forwarded:
                # Once only: a second SIGTERM makes some engines drop what they are still answering.
                forwarded = True
                self._signal_group(signal.SIGTERM)
            if self._kill_now and not self._killed:
                self._killed = True
                self._signal_group(signal.SIGKILL)
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended
            self._wait_for_news(None)
            if self._child_ended:
                self._child_ended = False
                self._reap_orphans()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _clear_descendants(self) -> None:
        """Until the program is waited for, its pid names its group and can't be anybody else's.

        Whatever a killed child leaves becomes our child, so killing our children until there are none reaches all.
        """
        if self._asked and not self._kill_now:
            self._grace()
        tick_s = _TICK_S
        while True:
            self._signal_group(signal.SIGKILL)
            for child in self._children():
                os.kill(child, signal.SIGKILL)
            self._reap_orphans()
            if not self._children():
                break
            self._wait_for_news(tick_s)  # one that hangs in a driver may take long
            tick_s = min(tick_s * 1.5, _LONGEST_TICK_S)
        os.waitpid(self._pid, 0)

    def _grace(self) -> None:
        deadline = time.monotonic() + STRAGGLER_GRACE_S
        for child in self._children():
            os.kill(child, signal.SIGTERM)
        while self._children() and time.monotonic() < deadline and not self._kill_now:
            self._wait_for_news(_TICK_S)
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

    def _wait_for_news(self, timeout_s: float | None) -> None:
        """Until a signal, output, or the timeout; takes the output."""
        ready, _, _ = select.select([self._wake, self._output], [], [], timeout_s)
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._output in ready:
            self._read_output(once=True)

    def _read_output(self, *, once: bool = False) -> None:
        assert self._writer is not None
        with suppress(BlockingIOError):
            while data := os.read(self._output, _READ_BYTES):
                self._writer.put(data)
                if once:
                    return

    def _exit_record(self, ended: os.waitid_result) -> ExitRecord:
        assert self._writer is not None
        by_exit = ended.si_code == os.CLD_EXITED
        name = None if by_exit else signal_name(ended.si_status)
        return ExitRecord(
            status=ended.si_status if by_exit else None,
            signal=name,
            oom=name == "SIGKILL" and not self._killed and self._out_of_memory(),
            asked=self._asked,
            ended_at=time.time(),
            lost_output_bytes=self._writer.lost_bytes,
        )

    def _out_of_memory(self) -> bool:
        after = memory.kills_counted()
        counted = after is not None and self._kills_before is not None and after > self._kills_before
        return counted or memory.kernel_named(self._pid, self._started_s)


def run_program(spec: DetachedSpec, who: Account | None, output: int, go: int, error: int) -> NoReturn:
    """In the child: wait until we are on record, become the program. Words on ``error`` where that fails."""
    try:
        if os.read(go, 1) != b"g":
            os._exit(1)  # the reaper died before it could write us down
        os.setsid()
        _settle(spec, who, output)
        os.execvpe(spec.argv[0], list(spec.argv), {**spec.env, NONCE: spec.nonce})
    except StartError as failed:
        os.write(error, str(failed).encode())
    except OSError as failed:
        os.write(error, f"{spec.argv[0]} can't be run: {failed.strerror or failed} ({_about(spec, who)})".encode())
    except BaseException as failed:
        os.write(error, f"{spec.argv[0]} can't be run: {type(failed).__name__}: {failed}".encode())
    os._exit(127)


def _settle(spec: DetachedSpec, who: Account | None, output: int) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    set_limits(spec.oom_score_adj)
    os.umask(0o022)
    if who is not None:
        view.enter(spec.reads, spec.writes, who)
    os.umask(0o077)
    null = os.open("/dev/null", os.O_RDONLY)
    for fd, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    if who is not None:
        become(who)
    linux.set_no_new_privileges()
    os.chdir(spec.cwd)
    closed = view.unreadable(spec.reads)
    if closed is not None:
        user = "the program's user" if who is None else who.name
        raise StartError(f"{user} may not read {closed}; give it read access, or put it where it has")


def _about(spec: DetachedSpec, who: Account | None) -> str:
    return f"in {spec.cwd}" if who is None else f"as {who.name} in {spec.cwd}"


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


def main(arguments: list[str]) -> int:
    record_dir, in_unit = arguments[0], "--in-unit" in arguments[1:]
    decided = None if in_unit else _leave_starter()
    os.umask(0o077)
    take_lock(record_dir)
    spec = claim_spec(record_dir)
    if spec is None:
        return 0  # taken back by a later starter, which found no reaper
    linux.become_subreaper()
    set_oom_score(_REAPER_OOM_SCORE)
    reaper = Reaper(spec)
    try:
        reaper.start()
    except (StartError, OSError) as error:
        write_exit(record_dir, ExitRecord(error=str(error), ended_at=time.time()))
        with suppress(FileNotFoundError):
            path_of(record_dir, "claimed").unlink()
        return 0
    finally:
        _tell_systemd()
        if decided is not None:
            os.close(decided)
    reaper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
