"""Takes the files out of an archive that a stranger made: tar (plain, gz, xz, zst), zip, wheel.

Regular files, folders, and symbolic links to files beside them; only inside the target, only as much as is allowed.
The target may hold what other archives left there: nothing in it is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from llmgw.agent.fetch import streams, zips
from llmgw.agent.fetch.contents import Contents
from llmgw.agent.fetch.disk import Stopped
from llmgw.agent.fetch.members import LIMITS, BadArchive, Kind, Limits, Member, Names, judged
from llmgw.agent.fetch.streams import Counted, Packing, kind_of
from llmgw.agent.fetch.tar import TarReader
from llmgw.agent.fetch.tree import FILE_MODE, NEW_FILE, Tree

_READ_AHEAD = 32
"""Pieces of the packed archive, of a megabyte at most."""

Progress = Callable[[int, int | None], None]
"""Takes bytes unpacked, and bytes that it will be in all where that is known before."""

__all__ = ["LIMITS", "BadArchive", "Limits", "Packing", "Progress", "extract", "kind_of", "unpack_member"]


def extract(
    packing: Packing,
    stream: BinaryIO,
    target: Path,
    *,
    strip: bool = False,
    limits: Limits = LIMITS,
    progress: Progress = lambda done, total: None,
) -> Contents:
    """Unpacks everything into ``target``, which must be there, and waits until all of it is on the disk.

    ``stream`` is read to its end; a zip's must be a file. ``strip`` leaves out the one folder in which everything
    lies, if there is one. Returns what ``target`` holds then. Raises BadArchive, NoRoom, OSError; what is in
    ``target`` then is of no use.
    """
    with Tree(target) as tree:
        if packing is Packing.ZIP:
            with zips.opened(stream, limits) as reader:
                _Extraction(tree, reader, limits, progress, reader.total_bytes).run()
        else:
            _extract_tar(packing, stream, tree, limits, progress)
        return tree.finish(strip=strip)


def unpack_member(
    wheel: Path,
    name: str,
    target: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    limits: Limits = LIMITS,
) -> None:
    """Takes one file out of a zip or wheel to ``target``, which must not exist, and waits until it is on the disk.

    Meant for a thread. Raises BadArchive, OSError, Stopped; then ``target`` may be there in part.
    """
    with wheel.open("rb") as file, zips.opened(file, limits) as reader:
        found = [judged(member, limits) for member in reader]
        names = Names(limits)
        for member in found:
            (names.take_folder if member.kind is Kind.FOLDER else names.take_file)(member.name)
        files = {member.name: member.size_bytes for member in found if member.kind is Kind.FILE}
        if name not in files:
            large = sorted(files, key=lambda name: -files[name])[:3]
            raise BadArchive(f"it has no file {name!r}; its largest are {', '.join(large)}")
        _write_one(reader.content_of(name), target, stopped, lambda done: progress(done, files[name]))


def _write_one(
    content: Iterable[bytes], target: Path, stopped: Callable[[], bool], written: Callable[[int], None]
) -> None:
    with os.fdopen(os.open(target, NEW_FILE, FILE_MODE), "wb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        for piece in content:
            if stopped():
                raise Stopped
            file.write(piece)
            written(file.tell())
        file.flush()
        os.fsync(file.fileno())


def _extract_tar(packing: Packing, stream: BinaryIO, tree: Tree, limits: Limits, progress: Progress) -> None:
    # Reading, unpacking and writing go on at the same time; whoever sends the archive is not held up by either.
    with streams.ahead(streams.pieces_of(stream), _READ_AHEAD) as arriving:
        counted = Counted(arriving)
        with streams.ahead(streams.unpacked(packing, counted)) as pieces:
            reader = TarReader(_within_ratio(pieces, counted, limits))
            try:
                _Extraction(tree, reader, limits, progress, None).run()
            except streams.Damaged as error:
                raise BadArchive(f"{error}, {reader.where}") from None


def _within_ratio(pieces: Iterable[bytes], packed: Counted, limits: Limits) -> Iterator[bytes]:
    unpacked_bytes = 0
    for piece in pieces:
        yield piece
        # Only now: what was read of it by then is where it went wrong.
        unpacked_bytes += len(piece)
        if unpacked_bytes > limits.ratio_from_bytes + limits.ratio * packed.count:
            raise streams.Damaged(f"it unpacks to more than {limits.ratio} times its size")


class _Reader(Protocol):
    def __iter__(self) -> Iterator[Member]: ...

    def content(self) -> Iterable[bytes | memoryview]: ...


class _Extraction:
    def __init__(
        self, tree: Tree, reader: _Reader, limits: Limits, progress: Progress, total_bytes: int | None
    ) -> None:
        self._tree = tree
        self._reader = reader
        self._limits = limits
        self._progress = progress
        self._total_bytes = total_bytes
        self._names = Names(limits)
        self._claimed_bytes = 0

    def run(self) -> None:
        members = 0
        for member in self._reader:
            members += 1
            if members > self._limits.members:
                raise BadArchive(f"it has more than {self._limits.members} members: {member.name!r} is one too many")
            self._take(judged(member, self._limits))
        if not members:
            raise BadArchive("there is nothing in it")

    def _take(self, member: Member) -> None:
        if member.kind is Kind.FOLDER:
            self._names.take_folder(member.name)
            self._tree.folder(member.name)
            return
        self._names.take_file(member.name)
        if member.kind is Kind.LINK:
            self._tree.link(member.name, member.target)
            return
        self._claimed_bytes += member.size_bytes
        if self._claimed_bytes > self._limits.total_bytes:
            raise BadArchive(f"it unpacks to more than {self._limits.total_bytes} bytes, with {member.name!r}")
        self._tree.file(member.name, member.size_bytes, self._content(), executable=bool(member.mode & 0o111))

    def _content(self) -> Iterator[bytes | memoryview]:
        for piece in self._reader.content():
            yield piece
            self._progress(self._tree.written_bytes, self._total_bytes)
