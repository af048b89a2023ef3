"""Files of an identity: written whole or not at all, keys private from their first byte on."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from llmgw.pki.names import PkiError

KEY_MODE = 0o600
CERT_MODE = 0o644


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Create ``path`` with ``data``; raises FileExistsError where it is there already, also in a race."""
    temporary = _write_temporary(path, data, mode)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()
    _sync_directory(path.parent)


def replace(path: Path, data: bytes, mode: int) -> None:
    """Write ``path`` anew; a reader sees the old file or the new one, never a part."""
    temporary = _write_temporary(path, data, mode)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def private_directory(path: Path) -> None:
    """Make ``path`` with mode 0700; one that is there already must be closed to others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        return
    except FileExistsError:
        pass
    if not path.is_dir():
        raise PkiError(f"{path} is not a directory: name another one for the authority")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PkiError(
            f"{path} is open to others (mode {mode:04o}), and the authority's key must not be: "
            f"`chmod 700 {path}`, or name a directory that does not exist yet"
        )


def _write_temporary(path: Path, data: bytes, mode: int) -> Path:
    # mkstemp makes the file 0600, so that a key is never readable by others, not even for a moment.
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
