"""A terminal of a stated width around code that prints: what people see, and what a pipe gets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable

import pytest

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def seen(patch: pytest.MonkeyPatch, width: int, prints: Callable[[], object]) -> str:
    """What a terminal of that many columns gets, without its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(ours, 65536):
                found.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with patch.context() as inside, open(theirs, "w", encoding="utf-8") as terminal:
            inside.setenv("TERM", "xterm")
            inside.setenv("COLUMNS", str(width))
            inside.setattr(sys, "stdout", terminal)
            prints()
    finally:
        reader.join()
        os.close(ours)
    text = b"".join(found).decode().replace("\r\n", "\n")
    return _ESCAPES.sub("", text)


def widest(text: str) -> int:
    return max(len(line) for line in text.splitlines())
