"""What every reaper does: take the program's output, and listen to what it is told by signals."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from llmgw.process.account import Account
from llmgw.process.output import OutputWriter, RotatingFile
from llmgw.process.record import path_of

_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_FLUSH_S = 5.0
_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGPIPE,
)


def make_pipe(record_dir: str | Path, who: Account | None) -> tuple[int, int]:
    """Make the named pipe that the program writes to, and open both ends: ours, and the program's.

    Each side opens it for reading *and* writing: the program is never told that nobody reads (SIGPIPE) when a reaper
    is killed, and its successor finds the pipe again by name. Ours is open before the program runs, since a pipe that
    nobody holds forgets what is in it.
    """
    path = path_of(record_dir, "output")
    os.mkfifo(path, 0o600)
    if who is not None:
        os.chown(path, who.uid, who.gid)  # programs open /dev/stderr by its name
    return open_pipe(path), os.open(path, os.O_RDWR | os.O_CLOEXEC)


def open_pipe(path: Path) -> int:
    ours = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return ours


class Attendant:
    def __init__(self) -> None:
        self.asked = False
        """The program was told to end."""
        self.kill_now = False
        self.child_ended = False
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGUSR1, self._kill)
        signal.signal(signal.SIGCHLD, self._note_child)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._output = -1
        self._writer: OutputWriter | None = None

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _kill(self, *_: object) -> None:
        self.asked = self.kill_now = True

    def _note_child(self, *_: object) -> None:
        self.child_ended = True

    def take_output(self, pipe: int, log_path: str, limit_bytes: int, kept: int) -> None:
        """From here on output is taken. Starts a thread: forking is over."""
        self._output = pipe
        self._writer = OutputWriter(RotatingFile(log_path, limit_bytes, kept))

    def wait_for_news(self, timeout_s: float | None, *others: int) -> None:
        """Until a signal, output, one of ``others`` is readable, or the timeout; takes the output."""
        ready, _, _ = select.select([self._wake, self._output, *others], [], [], timeout_s)
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._output in ready:
            self._take(1)

    def finish_output(self) -> int:
        """Take and write what is left. Returns how many bytes of output were lost in all."""
        assert self._writer is not None
        self._take(None)
        self._writer.close(_FLUSH_S)
        return self._writer.lost_bytes

    def _take(self, pieces: int | None) -> None:
        assert self._writer is not None
        with suppress(BlockingIOError):
            while pieces is None or pieces > 0:
                self._writer.put(os.read(self._output, _READ_BYTES))
                pieces = None if pieces is None else pieces - 1
