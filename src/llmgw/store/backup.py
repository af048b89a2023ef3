"""A consistent copy of a database that is in use. Blocking: run it in a thread."""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from llmgw.store.base import StoreError
from llmgw.store.connect import plain_connection
from llmgw.store.faults import file_error, store_error


def back_up(source: Path, target: Path) -> None:
    """Copy ``source`` to ``target`` (0600): whole, checked and on the disk, or not there at all.

    Raises StoreError where ``target`` exists, is not absolute, or can't be written.
    """
    if not target.is_absolute():
        raise StoreError(
            f"can't back up to {str(target)!r}: expected an absolute path, since the control plane writes the file"
        )
    if os.path.lexists(target):
        raise _exists(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        _create(partial)
        try:
            _copy(source, partial)
            _check(partial)
            _publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        raise file_error(error, target, "write the backup") from error
    except sqlite3.Error as error:
        raise _failed(error, source, target) from error


def _exists(target: Path) -> StoreError:
    return StoreError(f"{target} exists: a backup overwrites nothing. Name a file that does not exist yet")


def _failed(error: sqlite3.Error, source: Path, target: Path) -> StoreError:
    code = getattr(error, "sqlite_errorname", None) or ""
    if code == "SQLITE_FULL":
        return StoreError(f"the disk that holds {target} is full: no backup was written (df {target.parent})")
    return StoreError(f"no backup was written to {target}: {store_error(error, source)}")


def _create(partial: Path) -> None:
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _copy(source: Path, partial: Path) -> None:
    with closing(plain_connection(source)) as connection:
        connection.execute("VACUUM INTO ?", (str(partial),))


def _check(partial: Path) -> None:
    with closing(sqlite3.connect(f"{partial.as_uri()}?mode=ro", uri=True)) as connection:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"the copy did not pass its check: {verdict}")


def _publish(partial: Path, target: Path) -> None:
    _sync(partial)
    try:
        os.link(partial, target)  # Unlike a rename, it fails where somebody made the file meanwhile.
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        os.rename(partial, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
