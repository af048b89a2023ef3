"""The disk that weights go to."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from llmgw.agent.discovery.bounded import Gate, StillHanging

_LIMIT_S = 1.0
_gate = Gate("statvfs of weights_dir")


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes. What can't be read has no room: nothing can be written there, and ``problem`` says why."""

    total_bytes: int
    free_bytes: int
    """For whoever writes the weights; blocks reserved for root are not counted."""
    problem: str | None = None


_last: dict[Path, Disk] = {}


def read_disk(weights_dir: Path) -> Disk:
    """The file system of ``weights_dir``, or where it would be made. Returns within about a second."""
    try:
        disk = _gate.call(lambda: _measure(weights_dir), _LIMIT_S)
    except StillHanging:
        # Heartbeats must go on over a dead mount: engines that have their weights in memory are fine.
        hung = f"weights_dir {weights_dir} does not answer: is what is mounted there gone?"
        return replace(_last.get(weights_dir, Disk(0, 0)), problem=hung)
    except OSError as error:
        why = f"weights_dir {weights_dir} can't be read ({error.strerror}): it counts as full"
        return Disk(total_bytes=0, free_bytes=0, problem=why)
    _last[weights_dir] = disk
    return disk


def _measure(folder: Path) -> Disk:
    while True:
        try:
            found = os.statvfs(folder)
        except (FileNotFoundError, NotADirectoryError):
            if folder == folder.parent:
                raise
            folder = folder.parent
        else:
            return Disk(total_bytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize)
