"""Reads tar archives, strictly: ustar, pax and GNU long names.

Wherever two readers could see two different archives in the same bytes, or a rule of the format is broken, it is
refused rather than guessed at. Owners, times and extended attributes are not looked at. Formats: POSIX.1-2017 pax
(ustar and pax), GNU tar manual "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from llmgw.agent.fetch.members import BadArchive, Kind, Member

_BLOCK = 512
_NOTHING = bytes(_BLOCK)
_EXTENSION_BYTES = 1 << 20

_PAX_USED = frozenset(("path", "linkpath", "size"))
_PAX_IGNORED = frozenset(
    [
        "atime",
        "ctime",
        "mtime",
        "uid",
        "gid",
        "uname",
        "gname",
        "comment",
        "LIBARCHIVE.creationtime",
        "SCHILY.dev",
        "SCHILY.ino",
        "SCHILY.nlink",
        "SCHILY.fflags",
    ]
)
_PAX_IGNORED_PREFIXES = ("SCHILY.xattr.", "SCHILY.acl.", "LIBARCHIVE.xattr.", "RHT.security.", "MSWINDOWS.")

_REFUSED = {
    b"1": "a hard link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a fifo",
    b"S": "a sparse file",
}


@dataclass(slots=True)
class _Extension:
    """What stands before a header and says more about the member."""

    pax: dict[str, str] | None = None
    name: str | None = None
    target: str | None = None

    def __bool__(self) -> bool:
        return (self.pax, self.name, self.target) != (None, None, None)


class TarReader:
    """Iterate over it for the members; ``content`` gives that of the current one, and what is left of it is skipped."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """``pieces`` is the archive, unpacked, in order."""
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._left = 0
        self._padding = 0
        self._last = ""

    @property
    def where(self) -> str:
        """In words, for what goes wrong in between."""
        return f"at {self._last!r}" if self._last else "before its first member"

    def __iter__(self) -> Iterator[Member]:
        extension = _Extension()
        while True:
            for _ in self.content():
                pass
            self._exactly(self._padding)
            self._padding = 0
            header = self._exactly(_BLOCK)
            if header == _NOTHING:
                break
            _check(header, self.where)
            flag = header[156:157]
            if flag in (b"x", b"g", b"L", b"K"):
                self._extend(extension, flag, header)
                continue
            member = _member(header, flag, extension)
            extension = _Extension()
            self._last = member.name
            self._left = member.size_bytes
            self._padding = -member.size_bytes % _BLOCK
            if (member.kind, member.name) != (Kind.FOLDER, "./"):  # the folder itself
                yield replace(member, name=member.name.removeprefix("./"))
        if extension:
            raise BadArchive(f"it ends after a header that announces another member ({self.where})")
        self._end()

    def content(self) -> Iterator[memoryview]:
        """The rest of the current member's bytes."""
        while self._left:
            piece = self._some(self._left)
            self._left -= len(piece)
            yield piece

    def _end(self) -> None:
        if self._exactly(_BLOCK) != _NOTHING:
            raise BadArchive(f"something follows its end ({self.where})")
        # Writers fill up their last record with zeros.
        for piece in (self._piece, *self._pieces):
            if bytes(piece).strip(b"\0"):
                raise BadArchive(f"something follows its end ({self.where})")

    def _some(self, limit: int) -> memoryview:
        while not self._piece:
            following = next(self._pieces, None)
            if following is None:
                raise BadArchive(f"it ends in the middle, {self.where}: it was cut short")
            self._piece = memoryview(following)
        piece, self._piece = self._piece[:limit], self._piece[limit:]
        return piece

    def _exactly(self, count: int) -> bytes:
        kept = b""
        while len(kept) < count:
            kept += self._some(count - len(kept))
        return kept

    def _extend(self, extension: _Extension, flag: bytes, header: bytes) -> None:
        size = _number(header[124:136], "size", self.where)
        if size > _EXTENSION_BYTES:
            raise BadArchive(f"a header of {size} bytes describes the member after it ({self.where})")
        content = self._exactly(size)
        self._exactly(-size % _BLOCK)
        if flag == b"g":
            if used := _PAX_USED & _pax(content, self.where).keys():
                raise BadArchive(f"it states one {min(used)} for all members ({self.where})")
            return
        if flag == b"x":
            twice, extension.pax = extension.pax is not None, _pax(content, self.where)
        elif flag == b"L":
            twice, extension.name = extension.name is not None, _text(content, self.where)
        else:
            twice, extension.target = extension.target is not None, _text(content, self.where)
        if twice:
            raise BadArchive(f"two headers say the same of one member ({self.where})")


def _check(header: bytes, where: str) -> None:
    if header[257:265] not in (b"ustar\x0000", b"ustar  \x00"):
        raise BadArchive(f"there is no tar header where one should be ({where})")
    stated = _number(header[148:156], "checksum", where)
    if stated != sum(header[:148]) + sum(header[156:]) + 8 * 0x20:
        raise BadArchive(f"a header is damaged: its checksum is another ({where})")


def _member(header: bytes, flag: bytes, extension: _Extension) -> Member:
    pax = extension.pax or {}
    name = _one_of("names", _header_name(header), extension.name, pax.get("path"))
    target = _one_of("link targets", _text(header[157:257], repr(name)), extension.target, pax.get("linkpath"))
    if flag in _REFUSED:
        raise BadArchive(f"{name!r} is {_REFUSED[flag]}{f' to {target!r}' if flag == b'1' else ''}")
    if flag not in (b"0", b"\0", b"2", b"5"):
        raise BadArchive(f"{name!r} is of a kind that is not unpacked here ({flag!r})")
    kind = {b"5": Kind.FOLDER, b"2": Kind.LINK}.get(flag, Kind.FILE)
    size = _size(header, pax, name)
    if size and kind is not Kind.FILE:
        raise BadArchive(f"{name!r} is a {kind.value} with content")
    if (target or "linkpath" in pax) and kind is not Kind.LINK:
        raise BadArchive(f"{name!r} is a {kind.value} with a link's target")
    if kind is not Kind.FOLDER and name.endswith("/"):
        raise BadArchive(f"{name!r} is a {kind.value} in a folder's place")
    return Member(name, kind, size, _number(header[100:108], "mode", repr(name)), target)


def _header_name(header: bytes) -> str:
    # In GNU's own format other things stand where ustar has the first half of long names.
    name = _text(header[:100], "a header's name")
    prefix = _text(header[345:500], repr(name)) if header[263:265] == b"00" else ""
    return f"{prefix}/{name}" if prefix else name


def _one_of(what: str, short: str, long: str | None, pax: str | None) -> str:
    """The long form where there is one: the short one is then cut, or made up."""
    if long is not None and pax is not None:
        raise BadArchive(f"{pax!r} has two long {what}")
    return next(form for form in (pax, long, short) if form is not None)


def _size(header: bytes, pax: dict[str, str], name: str) -> int:
    size = _number(header[124:136], "size", repr(name))
    if "size" not in pax:
        return size
    text = pax["size"]
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise BadArchive(f"{name!r} states the size {text[:40]!r}")
    if size not in (0, int(text)):
        raise BadArchive(f"{name!r} states two sizes, {size} and {text}")
    return int(text)


def _number(field: bytes, what: str, where: str) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not all(48 <= digit < 56 for digit in digits):
        raise BadArchive(f"a header states the {what} {bytes(field)!r} ({where})")
    return int(digits, 8) if digits else 0


def _text(field: bytes, where: str) -> str:
    text, _, rest = field.partition(b"\0")
    if any(rest):
        raise BadArchive(f"something is hidden behind the name {text[:100]!r} ({where})")
    return _decoded(text, where)


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise BadArchive(f"the name {text[:100]!r} is no UTF-8 ({where})") from None


def _pax(content: bytes, where: str) -> dict[str, str]:
    """The records ``LENGTH KEY=VALUE\\n``, of which LENGTH counts all of its record."""
    records: dict[str, str] = {}
    while content:
        length_text, blank, _ = content[:20].partition(b" ")
        length = int(length_text) if blank and length_text.isdigit() and len(length_text) < 10 else 0
        record, content = content[len(length_text) + 1 : length], content[length:]
        key_text, equals, value = record[:-1].partition(b"=")
        if not equals or record[-1:] != b"\n" or len(length_text) + 1 + len(record) != length:
            raise BadArchive(f"a pax header is damaged ({where})")
        key = _decoded(key_text, where)
        if key in _PAX_IGNORED or key.startswith(_PAX_IGNORED_PREFIXES):
            continue
        if key not in _PAX_USED:
            raise BadArchive(f"a pax header states {key[:60]!r}, which is not unpacked here ({where})")
        if key in records:
            raise BadArchive(f"a pax header states its {key} twice ({where})")
        records[key] = _decoded(value, where)
    return records
