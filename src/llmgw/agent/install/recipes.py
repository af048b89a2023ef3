"""Which recipe there is for what the cluster's file asks for, on this very machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llmgw.agent.fetch import contents
from llmgw.agent.fetch.threads import Stop
from llmgw.agent.install import archive_recipe, environment, intact, python_recipe
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.heal import Healer
from llmgw.agent.install.packages import OsPackages
from llmgw.agent.install.places import Installation
from llmgw.agent.install.program import Program
from llmgw.agent.install.recipe import Recipe, RecipeFailed, Say
from llmgw.cluster.catalog import BuildKind, EngineName, EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.registry import EngineNotRun, engine
from llmgw.engines.releases import has_cuda

PYTHON = ("vllm", "sglang")
"""Engines that are Python packages, each version in an environment of its own."""


class Recipes:
    def __init__(
        self,
        downloads: Callable[[str], Path],
        packages: OsPackages,
        inventory: Callable[[], Inventory],
        builds: Mapping[EngineName, BuildKind],
    ) -> None:
        """``builds``: which of a version's builds the agent's own file asks for."""
        self._downloads = downloads
        self._healer = Healer(packages)
        self._inventory = inventory
        self._builds = builds

    def build(self, spec: EngineSpec) -> BuildKind:
        """The build that is wanted here, as far as that can be said without asking anybody."""
        return self._stated(spec) or ("cuda" if has_cuda(self._inventory()) else "cpu")

    def suits(self, installation: Installation, spec: EngineSpec) -> bool:
        """Whether what was installed is what ``spec`` asks for on this machine as it is now.

        A build with CUDA stays where the driver or the GPUs can't be seen now: they come back.
        """
        if installation.spec != spec:
            return False
        if stated := self._stated(spec):
            return installation.build == stated
        return installation.build == "cuda" or not has_cuda(self._inventory())

    def _stated(self, spec: EngineSpec) -> BuildKind | None:
        return self._builds.get(spec.name) or spec.build

    async def resolve(self, spec: EngineSpec, say: Say) -> Recipe:
        """Asks the source of ``spec`` where it has to. Raises RecipeFailed, FetchFailed, NoRoom, OSError."""
        try:
            engine(spec.name)
        except EngineNotRun as error:
            raise RecipeFailed(str(error)) from None
        downloads, inventory = self._downloads(spec.name), self._inventory()
        if spec.name in PYTHON:
            return await python_recipe.resolve(spec, inventory, downloads, say, build=self._builds.get(spec.name))
        return await archive_recipe.resolve(spec, inventory, downloads, say, build=self._builds.get(spec.name))

    async def prove(self, spec: EngineSpec, folder: Path, scratch: Path, say: Say) -> Program:
        """Sees what was installed for ``spec`` run, in ``folder``. Raises NotProved, OSError."""
        if spec.name in PYTHON:
            return await environment.prove_environment(spec.name, spec.version, folder, scratch, self._inventory(), say)
        return await archive_recipe.prove_archive(spec.name, spec.version, folder, scratch, self._inventory())

    async def prove_named(self, name: str, program: Path, scratch: Path, say: Say) -> Program:
        """Sees a program run that was not installed by llmgw. Raises NotProved, OSError."""
        if name in PYTHON:
            return await environment.prove_named(name, program, scratch, self._inventory(), say)
        return await archive_recipe.prove_program(name, program, scratch, self._inventory())

    async def mend(self, failure: NotProved, say: Say) -> bool:
        """Installs the OS packages whose lack ``failure`` shows. False: it shows none. Raises NotProved."""
        return await self._healer.mend(failure, say)

    def damage(self, folder: Path, stopped: Stop) -> str | None:
        """What of an installation is no longer as it was installed, in words; None where nothing is. For a thread."""
        return intact.damage(folder, stopped) if folder.parent.name in PYTHON else contents.damage(folder, stopped)
