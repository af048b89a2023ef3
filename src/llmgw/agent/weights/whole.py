"""Is a model all there, before an engine is given it: files that others have put there may have been left half-way.

Contents are not hashed; what is missing, cut short or a placeholder is seen by names, sizes and headers alone.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from llmgw.agent.weights import gguf, safetensors

_AGAIN = "copy or download it again"
_LFS = b"version https://git-lfs"
_ZIP = b"PK\x03\x04"
_SHARD = re.compile(r"(?P<name>.+-)(?P<number>\d{5})-of-(?P<count>\d{5,6})(?P<suffix>\.\w+)")
_MAX_INDEX_BYTES = 100_000_000
_NAMED_AT_MOST = 3

_SAFETENSORS_INDEX, _PYTORCH_INDEX = ".safetensors.index.json", ".bin.index.json"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
# What training leaves beside the weights; vLLM passes over them as well.
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}

_Stamp = tuple[int, ...]


def complaint(path: Path) -> str | None:
    """Why this can't be the weights of a model, in words; None where nothing speaks against it.

    ``path`` is a file (of a split model: one of its files), or the folder of a model. Reads headers of up to 100 MB.
    """
    return Verdicts().complaint(path)


class Verdicts:
    """``complaint()``, at the price of a stat per file for a model that has not changed since. From any thread.

    One verdict is kept for each path that was asked about.
    """

    def __init__(self) -> None:
        self._looks: dict[Path, tuple[_Look, str | None]] = {}

    def complaint(self, path: Path) -> str | None:
        known = self._looks.get(path)
        try:
            if known is not None and known[0].holds():
                return known[1]
            look = _Look()
            words = look.at(path)
        except OSError as error:
            # Not kept: why a file can't be read may lie in a folder above it, or in a server far away.
            return _unreadable(path, error)
        self._looks[path] = look, words
        return words


class _NotWhole(Exception):
    """In words."""


@dataclass(slots=True)
class _Look:
    """One look at a model. All methods raise OSError, and those that return no words _NotWhole."""

    stamps: dict[Path, _Stamp | None] = field(default_factory=dict)
    """Of all that it depended on, each from before it was read; None: it was not there."""
    listings: dict[Path, list[str]] = field(default_factory=dict)
    """Of folders: their times may miss a file that comes within the same tick of the clock."""

    def holds(self) -> bool:
        """Whether another look would see the same."""
        alike = all(_stamp(_found(path)) == stamp for path, stamp in self.stamps.items())
        return alike and all(_names(folder) == names for folder, names in self.listings.items())

    def at(self, path: Path) -> str | None:
        try:
            found = self._stat(path)
            if found is None:
                raise _NotWhole(f"{path} is not on this node")
            if stat.S_ISDIR(found.st_mode):
                self._folder(path)
            else:
                self._files(self._with_shards([path]))
        except _NotWhole as error:
            return str(error)
        return None

    def _stat(self, path: Path) -> os.stat_result | None:
        found = _found(path)
        self.stamps[path] = _stamp(found)
        return found

    def _folder(self, folder: Path) -> None:
        names = self.listings[folder] = _names(folder)
        if "config.json" not in names:
            raise _NotWhole(f"{folder} is a directory; name the file in it")
        # Safetensors come first: they are what engines take where there are both.
        indexes = [name for suffix in (_SAFETENSORS_INDEX, _PYTORCH_INDEX) for name in names if name.endswith(suffix)]
        indexed = {index: self._named(folder, index) for index in indexes}
        # People fetch one format of several, and the indexes of the others come along: those say nothing.
        begun = {index: files for index, files in indexed.items() if any(map(self._stat, files))}
        loose: list[Path] = []
        if not any(index.endswith(_SAFETENSORS_INDEX) for index in indexes):
            loose = [folder / name for name in names if name.endswith(".safetensors")]
        if loose or any(index.endswith(_SAFETENSORS_INDEX) for index in begun):
            begun = {index: files for index, files in begun.items() if index.endswith(_SAFETENSORS_INDEX)}
        if not begun and not loose:
            begun = dict(islice(indexed.items(), 1))
        if not begun and not loose:
            loose = [folder / name for name in names if name.endswith(_OTHER_WEIGHTS) and name not in _NO_WEIGHTS]
        if not begun and not loose:
            suffixes = ", ".join((".safetensors", *_OTHER_WEIGHTS))
            raise _NotWhole(f"{folder} has a config.json, but no weights ({suffixes}): {_AGAIN}")
        for index, files in begun.items():
            self._require(files, f"{folder / index} names")
            self._files(files)
        self._files(self._with_shards(loose))

    def _named(self, folder: Path, index: str) -> list[Path]:
        """The files that an index names, each once."""
        place = folder / index
        found = self._stat(place)
        if found is None or found.st_size > _MAX_INDEX_BYTES:
            raise _NotWhole(f"{place} is no index of a model: it is larger than {_MAX_INDEX_BYTES} bytes, or gone")
        content = place.read_bytes()
        if content.startswith(_LFS):
            raise _NotWhole(_pointer(place))
        try:
            names = list(dict.fromkeys(json.loads(content)["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            names = []
        if not names:
            raise _NotWhole(f"{place} is no index of a model: expected JSON with a weight_map of file names; {_AGAIN}")
        for name in names:
            if not _is_inside(name):
                raise _NotWhole(f"{place} names {name!r}, which is no file of its folder; {_AGAIN}")
        return [folder / name for name in names]

    def _with_shards(self, files: Iterable[Path]) -> Iterable[Path]:
        """Each once, and the other shards that its name tells of."""
        known: dict[Path, None] = {}
        for file in files:
            if file not in known:
                self._require(_shards(file), f"{file} tells of")
                known |= dict.fromkeys(_shards(file))
        return known

    def _require(self, files: Iterable[Path], who_says: str) -> None:
        absent = (file.name for file in files if self._stat(file) is None)
        missing = list(islice(absent, _NAMED_AT_MOST + 1))
        if missing:
            more = " and more" if len(missing) > _NAMED_AT_MOST else ""
            named = ", ".join(missing[:_NAMED_AT_MOST])
            raise _NotWhole(f"the model is not whole: {who_says} {named}{more}, which is not there: {_AGAIN}")

    def _files(self, files: Iterable[Path]) -> None:
        for file in files:
            self._file(file)

    def _file(self, path: Path) -> None:
        found = self._stat(path)
        if found is None or not stat.S_ISREG(found.st_mode):
            raise _NotWhole(f"{path} is no regular file")
        if found.st_size == 0:
            raise _NotWhole(f"{path} is empty: {_AGAIN}")
        with path.open("rb") as file:
            head = file.read(len(_LFS))
            if head == _LFS:
                raise _NotWhole(_pointer(path))
            if path.suffix == ".gguf" and not head.startswith(gguf.MAGIC):
                raise _NotWhole(
                    f"{path} is no GGUF file: it begins with {head[:4]!r}, and GGUF files begin with {gguf.MAGIC!r}"
                )
            if fault := _fault(path.suffix, head, file, found.st_size):
                raise _NotWhole(f"{path} {fault}; {_AGAIN}")


def _fault(suffix: str, head: bytes, file: BinaryIO, size: int) -> str | None:
    if head.startswith(gguf.MAGIC):
        return gguf.fault(file, size)
    if suffix == ".safetensors":
        return safetensors.fault(file, size)
    if head.startswith(_ZIP) and not _ends_like_a_zip(file):
        return f"is cut short: it has {size} bytes, and the list of contents that ends a zip archive is missing"
    return None


def _ends_like_a_zip(file: BinaryIO) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        return False


def _is_inside(name: object) -> bool:
    """Whether an index may name it: a path below the folder."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _shards(path: Path) -> Iterator[Path]:
    """All files of a split model, from the name of one: ``NAME-00001-of-00003.gguf``."""
    found = _SHARD.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        yield path
        return
    for number in range(1, int(found["count"]) + 1):
        yield path.with_name(f"{found['name']}{number:05}-of-{found['count']}{found['suffix']}")


def _names(folder: Path) -> list[str]:
    """Without what is hidden, as engines look at it."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # no name that a file could have
        return None


def _stamp(found: os.stat_result | None) -> _Stamp | None:
    if found is None:
        return None
    if stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino
    # The time of the last change of the inode too: those who copy set the other one back.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _pointer(path: Path) -> str:
    return f"{path} is a pointer of Git LFS, not the file itself: get the file with git lfs pull"


def _unreadable(path: Path, error: OSError) -> str:
    where = error.filename or path
    if isinstance(error, PermissionError):
        return f"{where} can't be read by the agent: look at the permissions of the file and of the folders above it"
    return f"{where} can't be read: {error.strerror or error}"
