"""The part of a file that has come so far: ``NAME.part``, and what its source said of it in ``NAME.part.json``."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from llmgw.agent.fetch.disk import (
    CHUNK_BYTES,
    NoRoom,
    megabytes,
    require_room,
    sync_folder,
    write_durably,
)

_KEEP_SIZE = 1
_ROOM_EVERY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """By this a server's file is known to be the one that a part is of."""

    etag: str | None = None
    last_modified: str | None = None

    @property
    def if_range(self) -> str | None:
        """A weak ETag does not do: it says "as good as", and bytes are joined here."""
        if self.etag is not None:
            return self.etag if not self.etag.startswith("W/") else None
        return self.last_modified

    def agrees(self, other: Validator) -> bool:
        """False only where both say something, and not the same."""
        if self.etag is not None and other.etag is not None:
            return self.etag.removeprefix("W/") == other.etag.removeprefix("W/")
        if self.last_modified is not None and other.last_modified is not None:
            return self.last_modified == other.last_modified
        return True


class Part:
    """A file on its way. Everything here blocks: meant for threads, one call at a time.

    ``hashed_bytes`` of it have gone through the hash; what lies on the disk beyond them came before, in another life.
    """

    def __init__(self, folder: Path, name: str, sha256: str) -> None:
        self.whole = folder / name
        self.path = folder / f"{name}.part"
        self._note = folder / f"{name}.part.json"
        self._sha256 = sha256
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._reserved = False
        self._look_for_room_at = 0
        self.hashed_bytes = 0
        self.complete = False
        """It was a whole file once: this one, another of its name, or changed since."""
        self.validator = Validator()

    def open(self) -> int:
        """Takes up what lies there of the same file; returns its size in bytes. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.whole.is_file():
            self._write_note()
            self.whole.replace(self.path)
            self.complete = True
        known = self._read_note()
        if known is None:
            self.path.unlink(missing_ok=True)
        else:
            self.validator = known
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "r+b", buffering=0)
        return self.size_bytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._open.fileno()).st_size

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def begin(self, validator: Validator) -> None:
        """Notes what the source says of the file whose bytes come now."""
        self.validator = validator
        self._write_note()

    def restart(self) -> None:
        """Forgets every byte."""
        self._open.truncate(0)
        self._forget()

    def rewind(self) -> None:
        """What lies there is to be hashed again."""
        self._hash = hashlib.sha256()
        self.hashed_bytes = 0

    def discard(self) -> None:
        """Removes what there is of it. ``open`` begins anew."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        self.rewind()
        self._reserved = False
        self.complete = False
        self.validator = Validator()

    def reserve(self, total_bytes: int) -> None:
        """Takes the room for the whole file from the file system, before a byte of it has come. Raises NoRoom."""
        missing = total_bytes - self.size_bytes
        if missing <= 0:
            return
        require_room(self.path.parent, missing)
        failure = _allocate(self._open.fileno(), total_bytes)
        if failure in (errno.ENOSPC, errno.EDQUOT):
            raise self._full(total_bytes)
        self._reserved = failure == 0

    def catch_up(self) -> bytes:
        """The next of the bytes that lie there and were not hashed yet, hashed now; empty: there are no more."""
        self._open.seek(self.hashed_bytes)
        piece = self._open.read(CHUNK_BYTES)
        self._hash.update(piece)
        self.hashed_bytes += len(piece)
        return piece

    def write(self, piece: bytes) -> None:
        """Appends and hashes. Raises NoRoom, OSError."""
        if not self._reserved and self.hashed_bytes >= self._look_for_room_at:
            require_room(self.path.parent, 0)  # the last of it belongs to everybody else
            self._look_for_room_at = self.hashed_bytes + _ROOM_EVERY_BYTES
        self._open.seek(self.hashed_bytes)
        view = memoryview(piece)
        try:
            while view:
                view = view[self._open.write(view) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._open.truncate(self.hashed_bytes)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(self.hashed_bytes + len(piece)) from None
            raise
        self._hash.update(piece)
        self.hashed_bytes += len(piece)

    def settle(self) -> Path:
        """Its name, once its hash is right and it is on the disk for good."""
        os.fsync(self._open.fileno())
        self.close()
        self.path.replace(self.whole)
        self._note.unlink(missing_ok=True)
        sync_folder(self.whole.parent)
        return self.whole

    @property
    def _open(self) -> BinaryIO:
        assert self._file is not None
        return self._file

    def _full(self, needed_bytes: int) -> NoRoom:
        free = shutil.disk_usage(self.path.parent).free
        return NoRoom(
            f"the disk is full: {self.whole.name} needs at least {megabytes(needed_bytes)} under {self.path.parent}, "
            f"{megabytes(self.hashed_bytes)} of it have come and {megabytes(free)} are free: make room there"
        )

    def _write_note(self) -> None:
        write_durably(self._note, json.dumps({"sha256": self._sha256, **asdict(self.validator)}).encode())

    def _read_note(self) -> Validator | None:
        """None: what lies there is of another file, or nobody knows of which."""
        try:
            found = json.loads(self._note.read_bytes())
            if found["sha256"] != self._sha256:
                return None
            etag, modified = found["etag"], found["last_modified"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(etag, str | None) or not isinstance(modified, str | None):
            return None
        return Validator(etag=etag, last_modified=modified)


def _allocate(descriptor: int, total_bytes: int) -> int:
    """Blocks on the disk for so many bytes without changing the file's size. 0, or an errno; many systems can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        allocate = libc.fallocate64
    except AttributeError:
        allocate = libc.fallocate
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if allocate(descriptor, _KEEP_SIZE, 0, total_bytes) else 0
