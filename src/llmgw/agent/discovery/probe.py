"""Running a program that talks to a driver which may hang: bounded in time, output and number.

A process in uninterruptible sleep ignores SIGKILL. It is not waited for, and while it is there, the same
program is not started again: a wedged driver costs one stuck process, not one a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from llmgw.process.identity import read_stat

_OUTPUT_LIMIT_BYTES = 4 << 20
_REAP_LIMIT_S = 1.0
_stuck: dict[str, asyncio.subprocess.Process] = {}


class ProbeHung(Exception):
    """The program did not end in time, or an earlier run of it can't be killed."""


class ProbeMissing(Exception):
    """There is no such program, or it can't be executed. The message is the kernel's."""


@dataclass(frozen=True, slots=True)
class Output:
    """``status`` < 0: ended by that signal."""

    status: int
    stdout: str
    stderr: str


async def run_probe(name: str, argv: Sequence[str], limit_s: float) -> Output:
    """Runs ``argv`` in a session of its own; nothing of that session is left when this returns. ``name`` is for people.

    Raises ProbeHung, and ProbeMissing.

    Output goes to memory files rather than pipes, so that a grandchild which keeps it open delays nothing.
    """
    if (earlier := _stuck.get(name)) is not None and earlier.returncode is None and _runs(earlier.pid):
        raise ProbeHung(f"{name} is stuck in the driver and can't be killed")
    _stuck.pop(name, None)
    with _memory_file() as stdout, _memory_file() as stderr:
        process = await _start(name, argv, stdout.fileno(), stderr.fileno())
        try:
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_OUTPUT_LIMIT_BYTES, _OUTPUT_LIMIT_BYTES))
            status = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            raise ProbeHung(f"{name} did not end in time") from None
        finally:
            await _end(name, process)
        return Output(status, _text(stdout.fileno()), _text(stderr.fileno()))


async def _start(name: str, argv: Sequence[str], stdout: int, stderr: int) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio would kill the program alone, and leave behind what it has started by now.
        with contextlib.suppress(OSError):
            await _end(name, await starting)
        raise
    except OSError as error:
        raise ProbeMissing(error.strerror or str(error)) from error


async def _end(name: str, process: asyncio.subprocess.Process) -> None:
    """Kills what is left of the session (the group outlives its leader), and reaps the leader if it dies."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is not None:
        return
    try:
        await asyncio.wait_for(process.wait(), _REAP_LIMIT_S)
    except TimeoutError:
        _stuck[name] = process


def _runs(pid: int) -> bool:
    """False also of one that has died, and that asyncio has not noticed yet."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in ("Z", "X")


def _memory_file() -> contextlib.AbstractContextManager[_Descriptor]:
    return contextlib.closing(_Descriptor(os.memfd_create("llmgw-probe", os.MFD_CLOEXEC)))


class _Descriptor:
    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        os.close(self._number)


def _text(descriptor: int) -> str:
    return os.pread(descriptor, _OUTPUT_LIMIT_BYTES, 0).decode("utf-8", "replace")
