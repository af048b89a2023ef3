"""Short-lived programs that the agent runs: in a process group of their own, with a time limit, and never its heirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

OUTPUT_BYTES = 1 << 20

# The kernel ends the program when the agent dies, however it dies: a download must not go on without its owner.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\\n")
    os._exit(126)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program's end. ``status`` is negative for a signal; None: it was killed at its time limit."""

    status: int | None
    output: str
    """stdout and stderr, in the order in which they came."""


@contextlib.asynccontextmanager
async def started(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    merged: bool = False,
    stdin: int = asyncio.subprocess.DEVNULL,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs ``argv`` while the block does; what is left of its group then is killed. Raises OSError.

    ``merged`` sends stderr where stdout goes; ``stdin`` is a descriptor that the program reads from.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *argv),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if merged else asyncio.subprocess.PIPE,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill_group(process.pid)
        # Pipes are drained too: a transport that still holds bytes is never closed.
        await process.communicate()


async def run(argv: Sequence[str], *, env: Mapping[str, str], limit_s: float, cwd: str | None = None) -> Ended:
    """Runs ``argv`` to its end, or to its time limit. Raises OSError."""
    kept = bytearray()
    async with started(argv, env=env, cwd=cwd, merged=True) as process:
        try:
            async with asyncio.timeout(limit_s):
                assert process.stdout is not None
                while piece := await process.stdout.read(1 << 16):
                    kept += piece[: OUTPUT_BYTES - len(kept)]
                status: int | None = await process.wait()
        except TimeoutError:
            status = None
    return Ended(status, kept.decode("utf-8", "replace"))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def ending(status: int | None) -> str:
    """An end in words: "ended with status 1", "was killed by SIGILL"."""
    if status is None:
        return "did not end in time"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
