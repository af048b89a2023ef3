"""The child's side of a start: from the fork to the program's first instruction."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from llmgw.process import linux, view
from llmgw.process.account import Account, become, set_limits
from llmgw.process.errors import StartError
from llmgw.process.identity import NONCE
from llmgw.process.record import DetachedSpec


def run_program(spec: DetachedSpec, who: Account | None, output: int, go: int, error: int) -> NoReturn:
    """In the child: wait until we are on record, become the program. Words on ``error`` where that fails."""
    as_user = "" if who is None else f" (as {who.name})"
    try:
        if os.read(go, 1) != b"g":
            os._exit(1)  # the reaper died before it could write us down
        os.setsid()
        _settle(spec, who, output)
        os.execvpe(spec.argv[0], list(spec.argv), {**spec.env, NONCE: spec.nonce})
    except StartError as failed:
        os.write(error, str(failed).encode())
    except OSError as failed:
        os.write(error, f"{spec.argv[0]} can't be run: {failed.strerror or failed}{as_user}".encode())
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
    user = "the program's user" if who is None else who.name
    closed = view.unreadable(spec.reads)
    if closed is not None:
        raise StartError(f"{user} may not read {closed}; give it read access, or put it where it has")
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        raise StartError(f"{user} can't enter the directory to run in, {spec.cwd}: {error.strerror}") from None
