"""Seconds and megabytes of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Figures:
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, value: str) -> None:
        self.rows.append((what, value))
        print(f"\n  {what}: {value}", flush=True)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.add(what, f"{time.monotonic() - began:.1f} s")

    def __str__(self) -> str:
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        lines = [f"| {what} | {value} |" for what, value in self.rows]
        return "\n".join([f"| on {os.cpu_count()} cores, load {load} | |", "| --- | --- |", *lines])


def megabytes(*folders: Path) -> int:
    """What they take together on the disk: files with several names count once."""
    seen: set[int] = set()
    blocks = 0
    for folder in folders:
        for path in folder.rglob("*"):
            found = path.lstat()
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                blocks += found.st_blocks
    return blocks * 512 // 1_000_000


def resident_megabytes(pid: int) -> int:
    """Of a process and all its descendants."""
    sizes = [_status(each).get("VmRSS", "0 kB").split()[0] for each in descendants(pid)]
    return sum(map(int, sizes)) * 1024 // 1_000_000


def descendants(pid: int) -> list[int]:
    """The process itself first."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        children.setdefault(int(_status(int(process.name)).get("PPid", "0")), []).append(int(process.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        here = todo.pop()
        found.append(here)
        todo += children.get(here, [])
    return found


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)
