"""The output of a program, in files that turn over. Written by the reaper, read by anyone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_QUEUE_BYTES = 8 * 1024 * 1024
_STALLED_S = 1.0
_BLOCK_BYTES = 64 * 1024
LINE_BYTES = 16 * 1024
"""Longer lines are cut when they are read back."""


class RotatingFile:
    """An append-only file that turns over at ``limit_bytes``, at the end of a line where there is one."""

    def __init__(self, path: str, limit_bytes: int, kept: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._kept = kept
        self._fd = -1
        self._size = 0
        self._at_line_start = True

    def write(self, data: bytes) -> int:
        """Write what there is room for and return how much that was; raises OSError where it was nothing at all."""
        done = 0
        while done < len(data):
            try:
                done += self._write_piece(data, done)
            except OSError:
                if done:
                    return done
                raise
        return done

    @property
    def at_line_start(self) -> bool:
        return self._at_line_start

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_piece(self, data: bytes, start: int) -> int:
        self._open()
        piece = self._piece(data, start)
        written = os.write(self._fd, piece)
        self._size += written
        self._at_line_start = piece[written - 1 : written] == b"\n"
        if self._size >= self._limit_bytes and (self._at_line_start or self._size >= 2 * self._limit_bytes):
            self._turn_over()
        return written

    def _piece(self, data: bytes, start: int) -> bytes:
        """Up to the first line end past the limit, so that no line is torn between two files."""
        room = max(self._limit_bytes - self._size, 1)
        if len(data) - start <= room:
            return data[start:]
        end = data.find(b"\n", start + room - 1)
        return data[start : end + 1] if end >= 0 else data[start:]

    def _open(self) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self.close()  # somebody removed the file: what is written to it now would be seen by nobody
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _turn_over(self) -> None:
        self.close()
        with suppress(OSError):
            for number in range(self._kept - 1, 0, -1):
                with suppress(FileNotFoundError):
                    os.rename(f"{self._path}.{number}", f"{self._path}.{number + 1}")
            if self._kept:
                os.rename(self._path, f"{self._path}.1")
            else:
                os.unlink(self._path)


class OutputWriter:
    """Takes output at once and writes it from a thread, so that a slow or full disk never holds up the program.

    What can't be written is dropped and counted, and the next line that can be written says how much it was.
    """

    def __init__(self, file: RotatingFile) -> None:
        self._file = file
        self._pieces: deque[bytes] = deque()
        self._queued_bytes = 0
        self._taken = 0
        self._closing = False
        self._lost_bytes = 0
        self._unsaid_bytes = 0
        self._unsaid_why = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    @property
    def lost_bytes(self) -> int:
        return self._lost_bytes

    def put(self, data: bytes) -> None:
        """Take output. Waits for room only as long as the disk moves; returns within a second when it does not."""
        with self._changed:
            while self._queued_bytes >= _QUEUE_BYTES:
                before = self._taken
                self._changed.wait(_STALLED_S)
                if self._taken == before:
                    self._lose(len(data), "the disk did not take it")
                    return
            self._pieces.append(data)
            self._queued_bytes += len(data)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._closing)
                if not self._pieces:
                    self._say_lost()
                    self._file.close()
                    return
                data = b"".join(self._pieces)
                self._pieces.clear()
            self._write(data)
            with self._changed:
                self._queued_bytes -= len(data)
                self._taken += 1
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        self._say_lost()
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:] if done else data)
        except OSError as error:
            self._lose(len(data) - done, error.strerror or str(error))

    def _lose(self, count: int, why: str) -> None:
        self._lost_bytes += count
        self._unsaid_bytes += count
        self._unsaid_why = why

    def _say_lost(self) -> None:
        if not self._unsaid_bytes:
            return
        words = f"[llmgw: {self._unsaid_bytes} bytes of output were lost: {self._unsaid_why}]\n"
        start = "" if self._file.at_line_start else "\n"
        with suppress(OSError):
            self._file.write((start + words).encode())
            self._unsaid_bytes = 0


def files(log_path: str | Path) -> list[Path]:
    """The files of an output that are there, oldest first."""
    path = Path(log_path)
    rotated: list[tuple[int, Path]] = []
    for candidate in path.parent.glob(f"{path.name}.*"):
        number = candidate.name[len(path.name) + 1 :]
        if number.isdecimal():
            rotated.append((int(number), candidate))
    older = [candidate for _, candidate in sorted(rotated, reverse=True)]
    return [*older, path] if path.exists() else older


def tail(log_path: str | Path, lines: int) -> list[str]:
    """The last ``lines`` lines, oldest first, over as many files as it takes. Empty where there is no output."""
    found: list[str] = []
    seen: set[int] = set()
    for path in reversed(files(log_path)):
        if len(found) >= lines:
            break
        with suppress(FileNotFoundError), path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino not in seen:  # else it turned over while we looked
                seen.add(status.st_ino)
                found[:0] = _last_lines(file, lines - len(found), status.st_size)
    return found


def text_of(line: bytes) -> str:
    shown = line if len(line) <= LINE_BYTES else line[:LINE_BYTES] + f" [... {len(line) - LINE_BYTES} bytes]".encode()
    return shown.decode("utf-8", "replace").rstrip("\r\n")


def _last_lines(file: BinaryIO, lines: int, end: int) -> list[str]:
    """The last lines of what lies before ``end``. Split at line feeds alone: progress bars redraw with carriage
    returns."""
    if lines <= 0:
        return []
    block = b""
    while end > 0 and block.count(b"\n") <= lines and len(block) < lines * LINE_BYTES + _BLOCK_BYTES:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start) + block
        end = start
    pieces = block.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    return [text_of(line) for line in pieces[-lines:]]


def _whole_lines_end(file: BinaryIO) -> int:
    """Where the last line that is complete ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class Follower:
    """Reads an output as it grows, through its turning over. Starts with the last ``lines`` whole lines."""

    def __init__(self, log_path: str | Path, lines: int = 0) -> None:
        self._path = Path(log_path)
        self._file: BinaryIO | None = None
        self._partial = b""
        self._first: list[str] = []
        there = files(self._path)
        with suppress(FileNotFoundError, IndexError):
            self._file = there[-1].open("rb")  # right after a turning over, the youngest is not the current one
            end = _whole_lines_end(self._file)
            self._first = _last_lines(self._file, lines, end)
            self._file.seek(end)
            for path in reversed(there[:-1]):
                if len(self._first) >= lines:
                    break
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    self._first[:0] = _last_lines(file, lines - len(self._first), size)

    def read(self, *, final: bool = False) -> Iterator[str]:
        """The lines that came since; with ``final`` also the last one that has no line end."""
        yield from self._first
        self._first = []
        yield from self._drain()
        while following := self._following():
            yield from self._drain()  # what was written between our last look and its turning over
            self.close()
            with suppress(FileNotFoundError):
                self._file = following[0].open("rb")
            yield from self._drain()
        if final and self._partial:
            yield text_of(self._partial)
            self._partial = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drain(self) -> Iterator[str]:
        while self._file is not None and (block := self._file.read(_BLOCK_BYTES)):
            pieces = (self._partial + block).split(b"\n")
            self._partial = pieces.pop()
            yield from (text_of(piece) for piece in pieces)

    def _following(self) -> list[Path]:
        """The files that are younger than the one we read, oldest first."""
        there = files(self._path)
        if self._file is None:
            return there
        reading = os.fstat(self._file.fileno()).st_ino
        for position, path in enumerate(there):
            with suppress(FileNotFoundError):
                if path.stat().st_ino == reading:
                    return there[position + 1 :]
        return there
