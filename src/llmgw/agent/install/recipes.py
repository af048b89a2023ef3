"""Which recipe there is for what the cluster's file asks for, on this very machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmgw.agent.fetch.threads import Stop
from llmgw.agent.fetch.wheel import damage
from llmgw.agent.install import archive_recipe
from llmgw.agent.install.program import Program
from llmgw.agent.install.prove import NotProved
from llmgw.agent.install.recipe import Recipe, RecipeFailed, Say
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.registry import EngineNotRun, engine


class Recipes:
    def __init__(self, downloads: Callable[[str], Path], inventory: Callable[[], Inventory]) -> None:
        self._downloads = downloads
        self._inventory = inventory

    async def resolve(self, spec: EngineSpec, say: Say) -> Recipe:
        """Asks the source of ``spec`` where it has to. Raises RecipeFailed, FetchFailed."""
        try:
            engine(spec.name)
        except EngineNotRun as error:
            raise RecipeFailed(str(error)) from None
        return await archive_recipe.resolve(spec, self._inventory(), self._downloads(spec.name), say)

    async def prove(self, spec: EngineSpec, folder: Path, scratch: Path, say: Say) -> Program:
        """Sees what was installed for ``spec`` run, in ``folder``. Raises NotProved."""
        return await archive_recipe.prove_archive(spec.name, spec.version, folder, scratch, say)

    async def prove_named(self, name: str, program: Path, scratch: Path, say: Say) -> Program:
        """Sees a program run that was not installed by llmgw. Raises NotProved."""
        return await archive_recipe.prove_program(name, program, (program.resolve().parent,), scratch)

    async def mend(self, failure: NotProved, say: Say) -> bool:
        """Installs what the machine lacks, where that is why. False: nothing was done."""
        return False

    def damage(self, folder: Path, stopped: Stop) -> str | None:
        """What of an installation is no longer as it was installed, in words; None where nothing is. For a thread."""
        return damage(folder, stopped)
