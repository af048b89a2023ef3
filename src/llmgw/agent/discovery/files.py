"""Reading the small text files of /proc, /sys and /etc: a file that is missing, odd or unreadable is no exception."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LIMIT_BYTES = 8 << 20
"""More than any such file holds (/proc/cpuinfo of 512 processors is about 1 MiB)."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a file has no text, as the kernel says it."""

    why: str
    missing: bool = False


def read(path: Path) -> str | Unreadable:
    """The text of ``path`` without blanks around it, bytes that are not UTF-8 replaced."""
    try:
        # O_NONBLOCK: a FIFO somebody left at a well-known path must not stop discovery.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return Unreadable("no such file", missing=True)
    except (OSError, ValueError) as error:
        return Unreadable(_words(error))
    try:
        return _read_all(descriptor).decode("utf-8", "replace").strip()
    except OSError as error:
        return Unreadable(_words(error))
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str | None:
    """The text of ``path``; None where there is none to be had."""
    text = read(path)
    return text if isinstance(text, str) else None


def names_in(directory: Path) -> tuple[str, ...]:
    """The entries of a directory in order; empty where it can't be listed."""
    try:
        return tuple(sorted(os.listdir(directory)))
    except OSError:
        return ()


def _read_all(descriptor: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < LIMIT_BYTES and (part := os.read(descriptor, 1 << 16)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
