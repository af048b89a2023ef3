"""Where engines lie: ``ENGINES_DIR/ENGINE/VERSION-BUILD-SHA256``, which appears in one step, whole.

A folder that an agent has installed holds a record of what was asked for. Folders without one are a stranger's: they
are neither used nor touched. Everything here waits for the disk: call it from a thread.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmgw.agent.fetch.disk import Lock, require_room, sync_folder, write_durably
from llmgw.agent.install import uv_cache
from llmgw.agent.install.trial import own
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.version import VERSION

RECORD = ".llmgw.json"
_PARTIAL = ".partial-"
_DOWNLOAD = "download-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Written into a folder before it gets its name."""

    spec: EngineSpec
    build: BuildKind
    """What was asked for on this machine when it was installed."""
    installed_at: float
    installed_by: str
    """The version of llmgw."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What an agent has installed whole, in this run or in an earlier one."""

    folder: Path
    spec: EngineSpec
    build: BuildKind
    installed_at: float


_RECORD = TypeAdapter(Record)


class Places:
    def __init__(self, engines_dir: Path, cache_dir: Path) -> None:
        self._engines_dir = engines_dir
        self._cache_dir = cache_dir

    def of(self, engine: str, folder: str) -> Path:
        return self._engines_dir / engine / folder

    def downloads(self, engine: str) -> Path:
        """What was fetched, or a part of it, until it is installed. This agent's alone."""
        return self._cache_dir / f"{_DOWNLOAD}{engine}"

    def downloaded(self) -> list[str]:
        """Engines of which something lies there."""
        return [path.name.removeprefix(_DOWNLOAD) for path in self._cache_dir.glob(f"{_DOWNLOAD}*")]

    @property
    def proofs(self) -> Path:
        """Where engines run while they are proved. This agent's alone."""
        return self._cache_dir / "proofs"

    def lock(self, engine: str) -> Lock:
        """Between the agents that share these folders: held by the one that installs or removes."""
        return Lock(self._engines_dir / engine / ".lock")

    # -- what is there

    def installations(self) -> tuple[Installation, ...]:
        """All of them, the newest of each version first."""
        found = [each for folder in self._folders() if (each := _read(folder))]
        return tuple(sorted(found, key=lambda each: (each.spec.name, each.spec.version, -each.installed_at)))

    def _folders(self) -> list[Path]:
        return [
            folder
            for folder in self._engines_dir.glob("*/*")
            if _PARTIAL not in folder.name and folder.is_dir() and not folder.is_symlink()
        ]

    # -- how it comes there, and goes

    def begin(self, engine: str, folder: str, needed_bytes: int) -> Path:
        """An empty folder to be filled. Only under the lock. Raises NoRoom, OSError."""
        self.clean(engine)
        place = self.of(engine, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        require_room(place.parent, needed_bytes)
        partial = place.with_name(f"{folder}{_PARTIAL}{os.getpid()}")
        partial.mkdir(mode=0o755)
        partial.chmod(0o755)  # whatever the umask: the engine's user reads here
        return partial

    def finish(self, partial: Path, spec: EngineSpec, build: BuildKind) -> Installation:
        """Gives the filled folder its name, in one step. What had that name before goes."""
        place = partial.with_name(partial.name.partition(_PARTIAL)[0])
        record = Record(spec=spec, build=build, installed_at=time.time(), installed_by=VERSION)
        _write(partial, record)
        before = _set_aside(place) if place.exists() else None
        partial.rename(place)
        sync_folder(place.parent)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return _installation(place, record)

    def take_over(self, found: Installation, spec: EngineSpec, build: BuildKind) -> Installation:
        """Something else was asked for, and it lies here already: that is written down, and nothing is fetched."""
        record = Record(spec=spec, build=build, installed_at=found.installed_at, installed_by=VERSION)
        _write(found.folder, record)
        return _installation(found.folder, record)

    def at(self, engine: str, folder: str) -> Installation | None:
        return _read(self.of(engine, folder))

    def remove(self, installation: Installation) -> None:
        """Takes the name away first, so that it vouches for nothing. Only under the lock."""
        if installation.folder.exists():
            shutil.rmtree(_set_aside(installation.folder), ignore_errors=True)
            uv_cache.tidy(self._engines_dir)

    def clean(self, engine: str) -> None:
        """Removes what installations that were cut short have left. Only under the lock."""
        for path in (self._engines_dir / engine).glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def clean_all(self) -> None:
        """The same for every engine that nobody is installing now, and for proofs. Only before the first of them."""
        shutil.rmtree(self.proofs, ignore_errors=True)
        for engine in {path.parent.name for path in self._engines_dir.glob(f"*/*{_PARTIAL}*")}:
            with self.lock(engine) as lock:
                if lock.acquire():
                    self.clean(engine)

    def own_proofs(self, user: str | None) -> None:
        """From now on programs are proved as ``user``; None: as the agent. Raises OSError, KeyError."""
        own(self.proofs, user)

    def drop_downloads(self, engine: str) -> None:
        shutil.rmtree(self.downloads(engine), ignore_errors=True)


def _set_aside(place: Path) -> Path:
    doomed = place.with_name(f"{place.name}{_PARTIAL}{os.getpid()}-old")
    place.rename(doomed)
    return doomed


def _write(folder: Path, record: Record) -> None:
    write_durably(folder / RECORD, _RECORD.dump_json(record))


def _read(folder: Path) -> Installation | None:
    try:
        record = _RECORD.validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError):
        return None
    if record.spec.name != folder.parent.name or not folder.name.startswith(f"{record.spec.version}-"):
        return None
    return _installation(folder, record)


def _installation(folder: Path, record: Record) -> Installation:
    return Installation(folder, record.spec, record.build, record.installed_at)
