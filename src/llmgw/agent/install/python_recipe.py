"""Engines that are Python packages: an environment of its own per version, made by uv from a lock.

uv keeps what it has unpacked in a cache on the same file system, and environments are hard links into it: versions
share the files that they have in common. Environments are relocatable, since their folder gets its name last.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch.child import run
from llmgw.agent.fetch.disk import Lock as FileLock
from llmgw.agent.fetch.disk import megabytes
from llmgw.agent.fetch.threads import Pace, in_thread
from llmgw.agent.install import pip_config, uv_cache
from llmgw.agent.install.locks import lock_for
from llmgw.agent.install.recipe import RecipeFailed, Say
from llmgw.agent.install.uv import STALL_S, UvFailed, run_uv
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import EngineState, Inventory
from llmgw.engines.python_locks import Lock

LOCK = "llmgw.lock"
"""The lock's name in the environment that was made from it."""

LOCKED_AGAIN_S = 2.0
_SYNC_LIMIT_S = 900.0


async def resolve(
    spec: EngineSpec, inventory: Inventory, downloads: Path, say: Say, *, build: BuildKind | None = None
) -> PythonRecipe:
    """``build`` is what this node's own file says. Raises RecipeFailed, FetchFailed, NoRoom, OSError."""
    say(EngineState.RESOLVING, f"looking for the lock of {spec.name} {spec.version} for this machine")
    lock = await lock_for(spec, inventory, downloads, lambda words: say(EngineState.RESOLVING, words), build)
    return PythonRecipe(lock)


@dataclass(frozen=True, slots=True)
class PythonRecipe:
    lock: Lock

    @property
    def engine(self) -> str:
        return self.lock.engine

    @property
    def version(self) -> str:
        return self.lock.version

    @property
    def folder(self) -> str:
        return self.lock.folder

    @property
    def needed_bytes(self) -> int:
        return self.lock.unpacked_bytes

    async def put(self, partial: Path, say: Say) -> None:
        """Fills ``partial``, a folder ``ENGINES_DIR/ENGINE/…`` that is empty. Raises RecipeFailed, OSError."""
        cache = uv_cache.of(partial.parent.parent)
        with uv_cache.lock(cache) as lock:
            await _locked(lock, say)
            try:
                await self._make(partial, cache, say)
            except UvFailed as failure:
                note = f". {self.lock.note}" if self.lock.note else ""
                raise RecipeFailed(f"{self.lock}: {failure}{note}") from None
            await _sync(partial, say)
            await in_thread(lambda stop: uv_cache.sweep(cache, stop))

    async def _make(self, partial: Path, cache: Path, say: Say) -> None:
        what = f"{self.lock.engine} {self.lock.version}"
        say(EngineState.RESOLVING, f"making a Python {self.lock.python} environment for {what}")
        env = {**await pip_config.environment(), "UV_CACHE_DIR": str(cache), "UV_PYTHON_DOWNLOADS": "never"}
        try:
            await run_uv(["venv", "--relocatable", "--python", self._python(), "."], env=env, cwd=partial)
        except UvFailed as failure:
            raise RecipeFailed(
                f"{self.lock} is for Python {self.lock.python}, and there is none on this machine: install it "
                f"(python{self.lock.python} of the distribution will do). uv says: {failure}"
            ) from None
        (partial / LOCK).write_text(self.lock.text, encoding="utf-8")
        arguments = ["pip", "install", "--python", "bin/python", "--no-deps", "--require-hashes"]
        arguments += ["--only-binary", ":all:", "--link-mode", "hardlink", "--compile-bytecode", "--requirement", LOCK]
        await run_uv(arguments, env=env, cwd=partial, progress=_Words(self.lock, say), stall_s=STALL_S)

    def _python(self) -> str:
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        return sys.executable if own == self.lock.python else self.lock.python


class _Words:
    """uv's progress in words. What is in its cache already is never written, and so the percents may jump."""

    def __init__(self, lock: Lock, say: Say) -> None:
        self._lock = lock
        self._say = say
        self._pace = Pace()
        self._stage = ""

    def __call__(self, stage: str, written: int) -> None:
        count = f"{len(self._lock.packages)} packages of {self._lock.engine} {self._lock.version}"
        if stage in ("prepared", "installed"):
            if stage != self._stage:
                doing = "linking" if stage == "prepared" else "compiling the modules of"
                self._say(EngineState.UNPACKING, f"{doing} {count}")
            self._stage = stage
        else:
            percent = min(99, 100 * written // self._lock.unpacked_bytes)
            if self._pace.due(percent):
                size = megabytes(self._lock.unpacked_bytes)
                self._say(EngineState.DOWNLOADING, f"downloading {count} ({size} unpacked, {percent} %)")


async def _locked(lock: FileLock, say: Say) -> None:
    while not lock.acquire():
        say(EngineState.WAITING, "another Python engine is being installed on this node")
        await asyncio.sleep(LOCKED_AGAIN_S)


async def _sync(folder: Path, say: Say) -> None:
    """Waits until all of it is on the disk: thousands of files, most of which are only linked here."""
    say(EngineState.UNPACKING, "writing it to the disk")
    sync = shutil.which("sync")
    if sync is None:
        await in_thread(lambda _: os.sync())
        return
    ended = await run([sync, "--file-system", str(folder)], env={}, limit_s=_SYNC_LIMIT_S)
    if ended.status != 0:
        raise RecipeFailed(f"what lies in {folder.parent} did not come onto the disk: {ended.output.strip()}")
