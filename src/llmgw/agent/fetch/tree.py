"""Writes the members of an archive into one folder, and nowhere else.

Every path is walked from the folder's own descriptor, a part at a time, and no link is ever followed; nothing that
is there is opened for writing. Links are made when all files are there, so that no file can be written through one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from llmgw.agent.fetch.contents import CONTENTS, Contents
from llmgw.agent.fetch.disk import NoRoom, megabytes
from llmgw.agent.fetch.members import BadArchive

FILE_MODE = 0o644
EXECUTABLE_MODE = FOLDER_MODE = 0o755

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_CHECK_ROOM_BYTES = 1 << 20

STAGING = ".unpacking-"
"""Begins the name of the folder that is filled, before it is merged into the target."""

_libc = ctypes.CDLL(None, use_errno=True)


class Tree:
    """A new folder in ``target``, to be filled and then merged into it. Use it in a ``with``."""

    def __init__(self, target: Path) -> None:
        """``target`` must be there, and nobody else's. Raises OSError."""
        self._target = target
        self._staging = target / f"{STAGING}{os.getpid()}"
        self._names = {""}
        self._open: tuple[str, int] | None = None
        self._files: list[str] = []
        self._links: dict[str, str] = {}
        self._contents = Contents()
        self.written_bytes = 0

    def __enter__(self) -> Tree:
        self._staging.mkdir(mode=FOLDER_MODE)
        self._root = os.open(self._staging, _FOLDER)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        os.close(self._root)

    def folder(self, name: str) -> None:
        self._enter(name)

    def file(self, name: str, size_bytes: int, content: Iterable[bytes | memoryview], *, executable: bool) -> None:
        """Writes a new file. Raises NoRoom, OSError, and whatever ``content`` raises."""
        folder, _, last = name.rpartition("/")
        parent = self._enter(folder)
        self._require_room(name, size_bytes)
        mode = EXECUTABLE_MODE if executable else FILE_MODE
        descriptor = os.open(last, NEW_FILE, mode, dir_fd=parent)
        digest = hashlib.sha256()
        try:
            os.fchmod(descriptor, mode)
            for piece in content:
                _write(descriptor, piece)
                digest.update(piece)
                self.written_bytes += len(piece)
            # The disk begins while the next file is unpacked; that it has ended is waited for once, in `finish`.
            _libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_START_WRITING))
        except OSError as error:
            raise self._no_room(name, size_bytes, error) from None
        finally:
            os.close(descriptor)
        self._files.append(name)
        self._contents.files[name] = digest.hexdigest()

    def link(self, name: str, target: str) -> None:
        """A symbolic link to ``target`` beside it; made in ``finish``."""
        self._links[name] = target

    def finish(self, *, strip: bool) -> Contents:
        """Makes the links, waits until all is on the disk, and merges it into the target.

        ``strip`` leaves out the one folder in which everything lies, where there is one. Raises BadArchive, OSError.
        """
        self._make_links()
        for name in self._files:
            self._sync(name)
        for name in sorted(self._names, reverse=True):
            os.fsync(self._enter(name))
        self._leave()
        top = self._top() if strip else ""
        return self._merge(top)

    def _make_links(self) -> None:
        for name, target in self._links.items():
            self._require_file(name, target)
            folder, _, last = name.rpartition("/")
            os.symlink(target, last, dir_fd=self._enter(folder))
            self._contents.links[name] = target

    def _require_file(self, name: str, target: str) -> None:
        """Links lead to files of this archive, over other links at most."""
        folder = name.rpartition("/")[0]
        seen = {name}
        at = _joined(folder, target)
        while at in self._links and at not in seen:
            seen.add(at)
            at = _joined(folder, self._links[at])
        if at in seen:
            raise BadArchive(f"{name!r} is a symbolic link that leads back to itself")
        if at not in self._contents.files:
            raise BadArchive(f"{name!r} is a symbolic link to {target!r}, which is no file of the archive")

    def _enter(self, name: str) -> int:
        """A descriptor of the folder, which is made where need be; it stays open until another one is entered."""
        if self._open is not None and self._open[0] == name:
            return self._open[1]
        self._leave()
        descriptor = os.dup(self._root)
        path = ""
        for part in name.split("/") if name else ():
            path = _joined(path, part)
            try:
                below = self._step(descriptor, part, new=path not in self._names)
            finally:
                os.close(descriptor)
            self._names.add(path)
            descriptor = below
        self._open = (name, descriptor)
        return descriptor

    def _step(self, parent: int, part: str, *, new: bool) -> int:
        if new:
            try:
                os.mkdir(part, FOLDER_MODE, dir_fd=parent)
            except OSError as error:
                raise self._no_room(part, 0, error) from None
        descriptor = os.open(part, _FOLDER, dir_fd=parent)
        if new:
            os.fchmod(descriptor, FOLDER_MODE)  # whatever the umask: the engine's user reads here
        return descriptor

    def _leave(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _sync(self, name: str) -> None:
        folder, _, last = name.rpartition("/")
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._enter(folder))
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise self._no_room(name, 0, error) from None
        finally:
            os.close(descriptor)

    def _top(self) -> str:
        """The folder in which everything lies, if there is one."""
        tops = {name.partition("/")[0] for name in (*self._names, *self._files, *self._links) if name}
        return tops.pop() if len(tops) == 1 and tops <= self._names else ""

    def _merge(self, top: str) -> Contents:
        """Moves what is in ``top`` of the new folder into the target, beside what other archives left there."""
        new = self._contents.below(top)
        there = Contents.of(self._target)
        source = self._enter(top)
        target = os.open(self._target, _FOLDER)
        try:
            os.fchmod(target, FOLDER_MODE)
            for name in sorted(os.listdir(source)):
                if name == CONTENTS or (_exists(name, target) and not _same(name, new, there)):
                    raise BadArchive(f"{name!r} is there already, from another archive or made by llmgw")
                # Where both have the same file, a licence say, one replaces the other.
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
            self._leave()
            if top:
                os.rmdir(top, dir_fd=self._root)
            os.rmdir(self._staging.name, dir_fd=target)
            both = there.and_also(new)
            both.write(self._target)
        finally:
            os.close(target)
        return both

    def _require_room(self, name: str, size_bytes: int) -> None:
        if size_bytes < _CHECK_ROOM_BYTES:
            return
        free = _free_bytes(self._root)
        if free < size_bytes:
            raise NoRoom(self._needs(name, size_bytes, free))

    def _no_room(self, name: str, size_bytes: int, error: OSError) -> Exception:
        if error.errno not in _FULL:
            return error
        free = _free_bytes(self._root)
        if error.errno == errno.EDQUOT or free >= max(size_bytes, _CHECK_ROOM_BYTES):
            return NoRoom(f"{self._needs(name, size_bytes, free)}, which a quota or a limit does not let it have")
        return NoRoom(self._needs(name, size_bytes, free))

    def _needs(self, name: str, size_bytes: int, free_bytes: int) -> str:
        return (
            f"{name!r} needs {megabytes(size_bytes)} under {self._target} and {megabytes(free_bytes)} are free, with "
            f"{megabytes(self.written_bytes)} of the archive unpacked: make room, or name another folder in the "
            "agent's file"
        )


def _same(name: str, new: Contents, there: Contents) -> bool:
    return name in there.files and there.files[name] == new.files.get(name)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _free_bytes(descriptor: int) -> int:
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def _write(descriptor: int, piece: bytes | memoryview) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(descriptor, left) :]
