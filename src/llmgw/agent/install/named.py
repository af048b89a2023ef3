"""A program that the agent's file names: proved like any other, and nothing is installed beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.keeper import FAILURES, Keeper, in_words
from llmgw.agent.install.recipes import Recipes
from llmgw.cluster.catalog import EngineName
from llmgw.cluster.model import EngineState
from llmgw.config.agent import PROGRAM_KEYS

UNKNOWN = "unknown"


class NamedKeeper(Keeper):
    """It stands in for every version that is asked for."""

    def __init__(
        self, name: EngineName, program: Path, recipes: Recipes, scratch: Path, changed: Callable[[], None]
    ) -> None:
        super().__init__(name, UNKNOWN, changed, named=True)
        self.wanted: frozenset[str] = frozenset()
        """Versions that the cluster asks for."""
        self._path = program
        self._key = f"{PROGRAM_KEYS[name]} in the agent's file names {program}"
        self._recipes = recipes
        self._scratch = scratch

    async def probe(self) -> None:
        """Proves it again. Shown only where it does not work, or had not been seen to."""
        if self.seen_to:
            return
        async with self._busy:
            try:
                await self._prove()
            except FAILURES as failure:
                self.lose(in_words(failure))

    def want(self, versions: frozenset[str]) -> None:
        if versions != self.wanted:
            self.wanted = versions
            if self.program is not None:
                self._say(EngineState.INSTALLED, self._words())

    async def _have(self) -> None:
        """Installs OS packages that it lacks: they are the system's, whoever brought the program."""
        while self.program is None:
            try:
                await self._prove()
            except NotProved as failure:
                if not await self._recipes.mend(failure, self._progress):
                    raise

    async def _prove(self) -> None:
        self._progress(EngineState.PROVING, f"seeing whether {self._path} works here")
        try:
            program = await self._recipes.prove_named(self.name, self._path, self._scratch, self._progress)
        except NotProved as error:
            raise NotProved(f"{self._key}, which does not work: {error}", error.missing) from None
        self.program, self.version = program, program.version
        self._say(EngineState.INSTALLED, self._words())

    def _words(self) -> str:
        others = sorted(self.wanted - {self.version})
        return f"{self._key}; the cluster asks for {' and '.join(others)}" if others else self._key
