"""Files written whole or not at all. Standard library only: reapers import it too."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write ``path`` anew, for nobody but its owner to read. Raises OSError."""
    write_whole(path, text, 0o600)


def write_whole(path: Path, text: str, mode: int) -> None:
    """Write ``path`` anew: a reader sees the old text or the new, also through a power cut. Raises OSError."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # until its mode is set
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
