"""uv's cache beside the environments: what they are linked from, and what is left of those that are gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llmgw.agent.fetch.disk import Lock, Stopped

_ARCHIVES = "archive-v*/*"


def of(engines_dir: Path) -> Path:
    """On the file system of the engines: hard links reach no further."""
    return engines_dir / ".uv-cache"


def lock(cache: Path) -> Lock:
    """Between all that install into ``cache``, and those that sweep it."""
    return Lock(cache / ".llmgw.lock")


def tidy(engines_dir: Path) -> None:
    """Sweeps the cache, where there is one, and where nobody installs into it now: who does sweeps it afterwards."""
    cache = of(engines_dir)
    if cache.is_dir():
        with lock(cache) as held:
            if held.acquire():
                sweep(cache)


def sweep(cache: Path, stopped: Callable[[], bool] = lambda: False) -> int:
    """Removes what no environment is linked to, and returns how many packages those were. Only under the lock.

    uv does not know who uses its cache, and would keep all of it. What is gone is downloaded again where it is wanted.
    """
    gone = 0
    for archive in cache.glob(_ARCHIVES):
        if stopped():
            raise Stopped
        if archive.is_dir() and not _linked(archive):
            shutil.rmtree(archive, ignore_errors=True)
            gone += 1
    _forget_lost(cache)
    return gone


def forget(cache: Path, damaged: Iterable[Path], environment: Path) -> None:
    """Removes the packages that these files of an environment are linked from. Only under the lock."""
    archives = [archive for archive in cache.glob(_ARCHIVES) if archive.is_dir()]
    for path in damaged:
        site = next((parent for parent in path.parents if parent.name == "site-packages"), environment)
        for archive in archives:
            twin = archive / path.relative_to(site)
            if twin.exists() and (not path.exists() or twin.samefile(path)):
                shutil.rmtree(archive, ignore_errors=True)
    _forget_lost(cache)


def _forget_lost(cache: Path) -> None:
    """Wheels that did not come from an index uv takes for unpacked as long as it has a note that they are."""
    for link in cache.glob("wheels-v*/**/*"):
        if link.is_symlink() and not link.exists():
            for note in (".rev", ".http"):
                link.with_name(f"{link.name}{note}").unlink(missing_ok=True)
            link.unlink()


def _linked(archive: Path) -> bool:
    return any(path.lstat().st_nlink > 1 for path in archive.rglob("*") if path.is_file() and not path.is_symlink())
