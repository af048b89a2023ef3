"""Becomes a program that runs as another user. Run by path: ``python -I -S run_as.py SPEC PARENT PROGRAM ARGUMENT…``.

SPEC is JSON: ``{"user": NAME, "reads": [PATH…], "writes": [PATH…]}``. PARENT is the pid whose death ends the program,
however that one dies. Needs root. What goes wrong before the program runs is said on stderr; the status is then 126.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # run by path, isolated: nothing else says where the package lies
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmgw.process import linux, view
from llmgw.process.account import account, become, set_limits
from llmgw.process.errors import StartError

_NOT_STARTED = 126


def command(
    argv: Sequence[str], *, user: str, reads: Sequence[Path], writes: Sequence[Path], parent: int
) -> tuple[str, ...]:
    """The command line under which this module becomes ``argv`` as ``user``, who sees ``reads`` and ``writes``."""
    spec = {"user": user, "reads": [str(path) for path in reads], "writes": [str(path) for path in writes]}
    return (sys.executable, "-I", "-S", str(Path(__file__)), json.dumps(spec), str(parent), *argv)


def run(spec: str, parent: int, argv: Sequence[str]) -> NoReturn:
    try:
        _settle(**json.loads(spec))
        # After the change of user, which makes the kernel forget it.
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.execv(argv[0], list(argv))
    except StartError as failed:
        sys.stderr.write(f"{failed}\n")
    except OSError as failed:
        sys.stderr.write(f"{argv[0]}: {failed.strerror or failed}\n")
    sys.stderr.flush()
    os._exit(_NOT_STARTED)


def _settle(user: str, reads: list[str], writes: list[str]) -> None:
    who = account(user)
    set_limits(None)
    os.umask(0o022)
    here = os.getcwd()
    view.enter(reads, writes, who)
    os.umask(0o077)
    become(who)
    linux.set_no_new_privileges()
    closed = view.unreadable(reads)
    if closed is not None:
        raise StartError(f"{who.name} may not read {closed}; give it read access, or put it where it has")
    os.chdir(here)  # again, by its name: the view may have covered it


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
