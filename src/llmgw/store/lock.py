"""One process per data directory.

A ``flock`` on a file in it: the kernel gives it back when its owner ends, however it ends, so there are no stale locks.
The file says who holds it, for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from llmgw.store.base import StoreError, StoreLocked
from llmgw.store.faults import file_error

LOCK_FILE = "llmgw.lock"


class DirectoryLock:
    """Held from ``acquire`` to ``release``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, directory: Path) -> Self:
        """Raises StoreLocked where another holds it, StoreError where the directory can't be locked."""
        path = directory / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise file_error(error, path, "lock the data directory") from error
        try:
            _flock(descriptor, directory, path)
            _sign(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Does nothing the second time. The file stays: to remove it would let two processes lock two files."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)


def _flock(descriptor: int, directory: Path, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreLocked(
            f"{directory} is in use by {_owner(descriptor)}: one data directory serves one control plane. "
            "Stop that process, or give this one a store of its own (store: in server.yaml)"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise StoreError(
                f"{path} can't be locked ({error.strerror}): expected a local file system. "
                "Put the store on a local disk, not on a network mount"
            ) from error
        raise file_error(error, path, "lock the data directory") from error


def _sign(descriptor: int, path: Path) -> None:
    words = json.dumps({"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")})
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words.encode() + b"\n", 0)
    except OSError as error:
        raise file_error(error, path, "write the data directory's lock") from error


def _owner(descriptor: int) -> str:
    """Who holds the lock, as far as the file says: it is empty for the moment between locking and signing."""
    for _ in range(20):
        try:
            signed = json.loads(os.pread(descriptor, 4096, 0))
            return f"process {int(signed['pid'])} (since {signed['since']})"
        except (ValueError, KeyError, TypeError, OSError):
            time.sleep(0.005)
    return "another process"
