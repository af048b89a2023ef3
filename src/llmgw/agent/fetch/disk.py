"""Files that are either whole and on the disk, or not there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 1 << 20
MARGIN_BYTES = 64 << 20
"""What a check for room leaves for everything else on the file system."""


class Stopped(Exception):
    """The work in a thread was called off."""


class NoRoom(Exception):
    """Words that name the file system, what is needed and what is free."""


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raises NoRoom where the file system of ``folder`` (which need not exist yet) has less free."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed_bytes + MARGIN_BYTES:
        raise NoRoom(
            f"{megabytes(needed_bytes + MARGIN_BYTES)} are needed under {folder} and {megabytes(free)} are free: "
            "make room, or name another folder in the agent's file"
        )


def sha256_of(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Runs at disk speed and lets other threads run meanwhile. Raises Stopped, OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(CHUNK_BYTES):
            if stopped():
                raise Stopped
            digest.update(piece)
    return digest.hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Replaces ``path`` by ``content``: a reader, or a power cut, sees the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """A lock between processes on one file. The kernel takes it from a process that has died."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Never waits. False: another process has it. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def megabytes(size_bytes: int) -> str:
    """``65 MB``; small sizes to a tenth."""
    size = size_bytes / 1e6
    return f"{size:.0f} MB" if size >= 10 else f"{size:.1f} MB"
