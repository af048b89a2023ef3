"""From an artifact to its files in a folder: fetched, hashed and unpacked at the same time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from llmgw.agent.fetch.archive import LIMITS, Limits, Packing, kind_of
from llmgw.agent.fetch.artifact import Artifact
from llmgw.agent.fetch.disk import megabytes
from llmgw.agent.fetch.download import StartAnew, download
from llmgw.agent.fetch.tree import STAGING
from llmgw.agent.fetch.unpacker import unpack_file, unpacking
from llmgw.cluster.model import EngineState

Say = Callable[[EngineState, str], None]
"""Hears each step: its state, and words that people read."""


async def obtain(
    artifact: Artifact, partial: Path, downloads: Path, say: Say, *, strip: bool = True, limits: Limits = LIMITS
) -> None:
    """Unpacks the artifact into ``partial``, beside what other archives left there, and waits until it is on the disk.

    ``partial`` must be there. ``downloads`` keeps what came of the archive, however this ends: an attempt that fails
    later, at another archive say, need not fetch it again. ``strip`` leaves out the one folder in which all of the
    archive lies. Raises FetchFailed, BadArchive, NoRoom, OSError.
    """
    packing = kind_of(artifact.name)
    told = _Told(artifact.name, say)
    if packing is Packing.ZIP:
        archive = await download(artifact, downloads, told.downloading)
        told.unpacking(0, None)
        await unpack_file(archive, partial, packing, strip=strip, limits=limits, progress=told.unpacking)
    else:
        try:
            await _while_it_comes(artifact, packing, partial, downloads, told, strip, limits)
        except StartAnew as error:
            told.downloading(f"{error}: fetching it anew")
            await asyncio.to_thread(_sweep, partial)
            await _while_it_comes(artifact, packing, partial, downloads, told, strip, limits)


async def _while_it_comes(
    artifact: Artifact, packing: Packing, partial: Path, downloads: Path, told: _Told, strip: bool, limits: Limits
) -> None:
    progress = told.unpacking_too
    async with unpacking(
        packing, partial, name=artifact.name, strip=strip, limits=limits, progress=progress
    ) as unpacker:
        await download(artifact, downloads, told.downloading, sink=unpacker)
        # Until here the unpacker waited for more: nothing of it is in its place before the hash was seen to be right.
        told.came_whole()
        await unpacker.finish()


class _Told:
    """What people are told. Of what is unpacked while it comes, they are told that it comes."""

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._unpacked = 0
        self._whole = False

    def downloading(self, words: str) -> None:
        self._say(EngineState.DOWNLOADING, words)

    def came_whole(self) -> None:
        self._whole = True
        self.unpacking(self._unpacked, None)

    def unpacking_too(self, done: int, total: int | None) -> None:
        self._unpacked = done
        if self._whole:
            self.unpacking(done, total)

    def unpacking(self, done: int, total: int | None) -> None:
        far = megabytes(done) if total is None else f"{megabytes(total)}, {100 * done // max(total, 1)} %"
        self._say(EngineState.UNPACKING, f"unpacking {self._name} ({far})")


def _sweep(partial: Path) -> None:
    """What an unpacker left that was ended."""
    for left in partial.glob(f"{STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
