"""Who listens on a port of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def port_holder(port: int, root: Path = Path("/proc")) -> str | None:
    """The process that listens on a TCP port, such as "pid 812 (nginx)"; None where it can't be seen."""
    inodes = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(root / "net" / name, port)}
    if not inodes:
        return None
    for process in root.iterdir():
        if process.name.isdigit() and _holds(process / "fd", inodes):
            return f"pid {process.name} ({_name(process)})"
    return None


def _listening(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if len(row) > 9 and row[3] == "0A" and row[1].endswith(f":{port:04X}")]


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        return any(_target(entry) in inodes for entry in folder.iterdir())
    except OSError:
        return False


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "unknown"
