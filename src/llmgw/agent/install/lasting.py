"""Commands that change the system: they may outlive the agent, and are not cut off in the middle.

Their output goes to a file, so that the death of whoever reads it is nothing to them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from llmgw.agent.fetch.child import OUTPUT_BYTES, Ended
from llmgw.agent.fetch.threads import Stop, in_thread

_LOOK_S = 0.1
_ENDS_WITHIN_S = 10.0
"""How long a command may take to end after SIGTERM."""
_LEFT_ALONE_S = 60.0
"""How long whoever wants to go waits for a command that must not be ended."""


async def run_lasting(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    transcript: Path,
    hear: Callable[[str], None],
    may_end: Callable[[], bool],
    limit_s: float,
) -> Ended:
    """Runs ``argv`` with its output at the end of ``transcript``; ``hear`` gets each line as it comes.

    Called off, or at its limit, it is ended where ``may_end`` allows it then, and else left to end by itself. The
    status is None where it was still there at the limit. Raises OSError.
    """
    loop = asyncio.get_running_loop()

    def show(line: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(hear, line)

    return await in_thread(lambda stop: _run(argv, env, transcript, show, may_end, limit_s, stop))


def _run(
    argv: Sequence[str],
    env: Mapping[str, str],
    transcript: Path,
    show: Callable[[str], None],
    may_end: Callable[[], bool],
    limit_s: float,
    stop: Stop,
) -> Ended:
    descriptor = os.open(transcript, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"$ {' '.join(argv)}\n".encode())
        start = os.fstat(descriptor).st_size
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(env),
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    with transcript.open("rb") as said:
        said.seek(start)
        status = _watch(process, _Lines(said.read, show), may_end, time.monotonic() + limit_s, stop)
        if status is None:
            process.returncode = 0  # on its own from here on: nobody is going to wait for it
        said.seek(start)
        return Ended(status, said.read(OUTPUT_BYTES).decode("utf-8", "replace"))


def _watch(
    process: subprocess.Popen[bytes], lines: _Lines, may_end: Callable[[], bool], limit: float, stop: Stop
) -> int | None:
    while True:
        status = _within(process, _LOOK_S)
        lines.take()
        if status is not None:
            return status
        over = time.monotonic() > limit
        if not over and not stop():
            continue
        if may_end():
            status = _end(process)
            return None if over else status
        return None if over else _within(process, _LEFT_ALONE_S)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        status = _within(process, _ENDS_WITHIN_S)
        if status is not None:
            return status
    return None


def _within(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, read: Callable[[], bytes], show: Callable[[str], None]) -> None:
        self._read = read
        self._show = show
        self._rest = b""

    def take(self) -> None:
        *lines, self._rest = (self._rest + self._read()).split(b"\n")
        for line in lines:
            self._show(line.decode("utf-8", "replace").rstrip("\r"))
