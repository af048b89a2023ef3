"""What SQLite and the file system say, in words that tell an operator what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from llmgw.store.base import StoreError


def store_error(error: SQLAlchemyError | sqlite3.Error, path: Path) -> StoreError:
    """The fault of a database at ``path``. The transaction that met it was rolled back, unless it says otherwise."""
    fault = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    code = getattr(fault, "sqlite_errorname", None) or ""
    said = f"{fault} ({code})" if code else str(fault)
    for prefix, words in _WORDS.items():
        if code.startswith(prefix):
            return StoreError(words.format(path=path, directory=path.parent, said=said, uid=os.geteuid()))
    return StoreError(f"{path}: {said}. Nothing of this step was written")


_WORDS = {
    "SQLITE_FULL": (
        "the disk that holds {path} is full: nothing of this step was written, and what was there before is safe. "
        "Free space there (df {directory}); no restart is needed. SQLite said: {said}"
    ),
    "SQLITE_CORRUPT": (
        "{path} is damaged: {said}. Keep the file for later, check the disk, and restore a backup (docs/backup.md)"
    ),
    "SQLITE_NOTADB": (
        "{path} is not a database: {said}. Expected a file that llmgw made, or none. "
        "Name another file (store: in server.yaml), or move this one away"
    ),
    "SQLITE_READONLY": (
        "{path} can't be written: {said}. Nothing was changed. {directory} and the files in it must be writable for "
        "uid {uid}, and not on a read-only mount"
    ),
    "SQLITE_CANTOPEN": (
        "{path} can't be opened: {said}. {directory} must be a directory that uid {uid} may read and write"
    ),
    "SQLITE_PERM": "{path} can't be opened: {said}. It must be readable and writable for uid {uid}",
    "SQLITE_BUSY": (
        "{path} is held by another program: {said}. Nothing of this step was written. "
        "Close what has it open (fuser {path}), an sqlite3 shell for instance"
    ),
    "SQLITE_IOERR": (
        "the disk under {path} failed: {said}. Whether the last step was written is not known. "
        "Check the disk (dmesg, df {directory}), then restart the control plane"
    ),
}


def file_error(error: OSError, path: Path, doing: str) -> StoreError:
    """The fault of a file or directory: ``doing`` is what was tried ("make the data directory")."""
    hint = _HINTS.get(error.errno or 0, "Check the path (store: in server.yaml)")
    return StoreError(
        f"can't {doing}: {path}: {error.strerror or error}. {hint.format(directory=path.parent, uid=os.geteuid())}"
    )


_HINTS = {
    errno.EACCES: "{directory} must be writable for uid {uid}",
    errno.EPERM: "{directory} must be writable for uid {uid}",
    errno.EROFS: "{directory} is mounted read-only; remount it, or name another place",
    errno.ENOSPC: "The disk is full; free space there (df {directory})",
    errno.EDQUOT: "The quota of uid {uid} is used up; free space there, or raise it",
    errno.ENOENT: "{directory} does not exist",
    errno.EEXIST: "It is a file; expected a directory, or nothing",
    errno.ENOTDIR: "{directory} is not a directory; expected one",
    errno.EISDIR: "It is a directory; expected a file",
    errno.ELOOP: "It is a symbolic link; expected a file of its own",
}
