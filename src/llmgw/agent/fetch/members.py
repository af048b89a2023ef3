"""The members of an archive that a stranger made: which of them may become files here.

What is refused is refused on every file system alike: an archive that is only safe where names are compared byte by
byte, or where paths are short, is not safe.
"""

from __future__ import annotations

import enum
import stat
import unicodedata
from dataclasses import dataclass, replace

_PART_BYTES = 255
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of characters that do not show, or change how what follows is shown."""


class BadArchive(Exception):
    """The archive may not be unpacked; the message says why, with the member's name. Say of which archive it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one archive may hold. Beyond any engine, and short of what hurts a node."""

    total_bytes: int = 16 << 30
    members: int = 50_000
    """Files, links and folders, those too that only stand in the path of another."""
    ratio: int = 250
    """Unpacked to packed size; real ones reach 20."""
    ratio_from_bytes: int = 1 << 20
    """What may be unpacked whatever the ratio: small files may be anything."""
    depth: int = 64
    path_bytes: int = 1024


LIMITS = Limits()


class Kind(enum.Enum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Member:
    """One member as the archive states it: nothing about it has been judged yet."""

    name: str
    kind: Kind
    size_bytes: int = 0
    mode: int = 0
    target: str = ""
    """Of a symbolic link."""


def judged(member: Member, limits: Limits) -> Member:
    """The member with a plain name, where it may be unpacked. Raises BadArchive."""
    name = member.name.removesuffix("/") if member.kind is Kind.FOLDER else member.name
    plain(name, limits)
    if member.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise BadArchive(f"{name!r} has a setuid, setgid or sticky bit")
    if member.kind is Kind.LINK and "/" in member.target:
        raise BadArchive(f"{name!r} is a symbolic link to {_short(member.target)}, which is not beside it")
    if member.kind is Kind.LINK:
        try:
            plain(member.target, limits)
        except BadArchive as error:
            raise BadArchive(f"{name!r} is a symbolic link: {error}") from None
    return replace(member, name=name)


def plain(name: str, limits: Limits) -> str:
    """``name`` where it is a relative path that stays below its folder. Raises BadArchive."""
    if not (name.isascii() and name.isprintable()) and any(unicodedata.category(one) in _UNSEEN for one in name):
        raise BadArchive(f"the name {_short(name)} has a control character")
    if name.startswith("/") or "\\" in name or name[1:2] == ":":
        raise BadArchive(f"the name {_short(name)} is not a relative path")
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        raise BadArchive(f"the name {_short(name)} leaves its folder or is not plain")
    sizes = [len(part.encode()) for part in parts]
    if max(sizes) > _PART_BYTES or sum(sizes) + len(sizes) > limits.path_bytes:
        raise BadArchive(f"the name {_short(name)} is too long")
    if len(parts) > limits.depth:
        raise BadArchive(f"the name {_short(name)} is more than {limits.depth} folders deep")
    return name


class Names:
    """All names of one archive so far: no two that some file system takes for one, no file that is also a folder."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[str, tuple[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take_file(self, name: str) -> None:
        """Raises BadArchive, as all here do."""
        self._take_parents(name)
        self._take(name, folder=False)

    def take_folder(self, name: str) -> None:
        self._take_parents(name)
        self._take(name, folder=True)

    def _take_parents(self, name: str) -> None:
        at = name.find("/")
        while at >= 0:
            self._take(name[:at], folder=True)
            at = name.find("/", at + 1)

    def _take(self, name: str, *, folder: bool) -> None:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        taken = self._taken.get(key)
        if taken is None:
            if len(self._taken) >= self._limits.members:
                raise BadArchive(f"it has more than {self._limits.members} members: {_short(name)} is one too many")
            self._taken[key] = (name, folder)
            return
        other, is_folder = taken
        if folder is not is_folder:
            raise BadArchive(f"{(other if folder else name)!r} is both a file and a folder")
        if not folder or other != name:
            raise BadArchive(f"{other!r} and {name!r} would be one {'folder' if folder else 'file'}")


def _short(name: str) -> str:
    """Names are part of messages, and may be a megabyte long."""
    return repr(name) if len(name) <= 100 else f"{name[:60]!r}… ({len(name)} characters)"
