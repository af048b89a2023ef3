"""Whether anything still runs from a folder, asked of the kernel: engines outlive agents, and several may share one."""

from __future__ import annotations

import os
from pathlib import Path


def runs_from(folder: Path, proc: Path = Path("/proc")) -> int | None:
    """The pid of a process whose program, script or libraries lie in ``folder``; None where there is none.

    Of processes that this user may not look into, only the command line is known. Blocks for milliseconds.
    """
    inside = os.fsencode(folder.resolve()) + b"/"
    for entry in proc.iterdir():
        if entry.name.isdigit() and _touches(entry, inside):
            return int(entry.name)
    return None


def _touches(process: Path, inside: bytes) -> bool:
    for name in ("cmdline", "maps"):
        try:
            if inside in (process / name).read_bytes():
                return True
        except OSError:
            continue
    return False
