"""Whether an environment still is what was installed: by the records that its packages keep of their files."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch.disk import CHUNK_BYTES, Stopped
from llmgw.agent.fetch.threads import Stop
from llmgw.agent.install import uv_cache


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    sha256: str
    """As records have it: base64 for URLs, unpadded."""


def damage(environment: Path, stopped: Stop) -> str | None:
    """What is missing or changed, in words; None where nothing is. Reads all of it: meant for a thread.

    Packages that are damaged are forgotten by uv's cache, since files are one and the same in both. Raises Stopped.
    """
    damaged: list[Path] = []
    for file in _files(environment):
        if stopped():
            raise Stopped
        if not _whole(file, stopped):
            damaged.append(file.path)
    if not damaged:
        return None
    cache = uv_cache.of(environment.parent.parent)
    if cache.is_dir():
        with uv_cache.lock(cache) as lock:
            if lock.acquire():
                uv_cache.forget(cache, damaged, environment)
    first = damaged[0].relative_to(environment)
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return f"{first}{more} {'is' if len(damaged) == 1 else 'are'} missing or changed in {environment}"


def _files(environment: Path) -> Iterator[_File]:
    for record in sorted(environment.glob("lib/python3*/site-packages/*.dist-info/RECORD")):
        site = record.parent.parent
        with record.open(encoding="utf-8", newline="") as lines:
            for name, digest, *_ in csv.reader(lines):
                kind, _, value = digest.partition("=")
                if kind == "sha256":
                    yield _File(Path(*_resolved(site / name)), value)


def _resolved(path: Path) -> list[str]:
    """Without ``..``, and without following links: scripts are recorded as ``../../../bin/vllm``."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def _whole(file: _File, stopped: Stop) -> bool:
    digest = hashlib.sha256()
    try:
        with file.path.open("rb", buffering=0) as content:
            while piece := content.read(CHUNK_BYTES):
                if stopped():
                    raise Stopped
                digest.update(piece)
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() == file.sha256
