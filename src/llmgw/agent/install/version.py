"""One version of an engine that llmgw installs: found, or fetched and unpacked; proved; mended where it can be."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from llmgw.agent.fetch.disk import Lock
from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.hint import lies_on_path
from llmgw.agent.install.keeper import FAILURES, Keeper, in_words
from llmgw.agent.install.places import Installation, Places
from llmgw.agent.install.recipe import Recipe
from llmgw.agent.install.recipes import Recipes
from llmgw.cluster.catalog import EngineName, EngineSpec
from llmgw.cluster.model import EngineState

log = structlog.get_logger()

LOCKED_AGAIN_S = 2.0
"""How often it is looked whether another agent has finished."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the versions of an engine share on a node."""

    places: Places
    recipes: Recipes
    installing: asyncio.Lock
    """One of them at a time: two would need the disk and the network of two."""
    changed: Callable[[], None]


class VersionKeeper(Keeper):
    def __init__(self, name: EngineName, version: str, rooms: Rooms) -> None:
        super().__init__(name, version, rooms.changed)
        self.wanted: EngineSpec | None = None
        """What the next attempt is to bring."""
        self._rooms = rooms
        self._installation: Installation | None = None

    async def probe(self, found: Sequence[Installation]) -> None:
        """Proves again what is installed, wanted or not. Shown only where it does not work, or had not been seen to.

        ``found`` is what there is of this version, the newest first: what was proved before counts before others.
        """
        if self.seen_to:
            return
        async with self._busy:
            before = self._installation.folder if self._installation is not None else None
            try:
                await self._prove(next((each for each in found if each.folder == before), found[0]))
            except FAILURES as failure:
                self.lose(in_words(failure))

    async def _have(self) -> None:
        spec = self.wanted
        assert spec is not None
        if self.program is not None and self.suits(spec):
            self._say(EngineState.INSTALLED, "")
            return
        if self.state is None or self.state.state is EngineState.FAILED:
            self._progress(EngineState.WANTED, "")
        here = [each for each in await asyncio.to_thread(self._rooms.places.installations) if self._is_mine(each)]
        mine = next((each for each in here if self._rooms.recipes.suits(each, spec)), None)
        others = [each for each in here if each is not mine]
        try:
            if await self._take_up(mine):
                return
        except FAILURES:
            await self._fall_back(others)
            raise
        await self._fall_back(others)
        if self._rooms.installing.locked():
            self._progress(EngineState.WAITING, f"another version of {self.name} is being installed")
        async with self._rooms.installing:
            await self._install(spec)

    async def _fall_back(self, others: Sequence[Installation]) -> None:
        """What is here from another source, or for the machine as it was: it serves until what is wanted is there."""
        for other in others:
            if self.program is None:
                with suppress(*FAILURES):
                    await self._prove(other)

    def _is_mine(self, found: Installation) -> bool:
        return (found.spec.name, found.spec.version) == (self.name, self.version)

    def suits(self, spec: EngineSpec) -> bool:
        """Whether what was proved last is what ``spec`` asks for on the machine as it is now."""
        return self._installation is not None and self._rooms.recipes.suits(self._installation, spec)

    async def _take_up(self, found: Installation | None) -> bool:
        """Proves what is installed already. False: it is not there, or was damaged, and must be installed anew."""
        if found is None:
            return False
        try:
            await self._prove_or_mend(found)
        except NotProved:
            damage = await in_thread(lambda stop: self._rooms.recipes.damage(found.folder, stop))
            if damage is None:
                raise
            log.warning("an engine is installed anew", engine=self.name, version=self.version, reason=damage)
            return False
        return True

    async def _install(self, spec: EngineSpec) -> None:
        recipe = await self._rooms.recipes.resolve(spec, self._progress)
        with self._rooms.places.lock(self.name) as lock:
            place = self._rooms.places.of(self.name, recipe.folder)
            await self._locked(lock, place.parent)
            if await self._take_up(await in_thread(lambda _: self._at(recipe, spec))):
                return
            installation = await self._fill(recipe, spec)
        await self._prove_or_mend(installation)

    def _at(self, recipe: Recipe, spec: EngineSpec) -> Installation | None:
        """What lies in the recipe's place already, written down as what ``spec`` asks for. Waits for the disk."""
        here = self._rooms.places.at(self.name, recipe.folder)
        return here and self._rooms.places.take_over(here, spec, self._rooms.recipes.build(spec))

    async def _locked(self, lock: Lock, folder: Path) -> None:
        while not lock.acquire():
            self._progress(EngineState.WAITING, f"another agent is installing under {folder}")
            await asyncio.sleep(LOCKED_AGAIN_S)

    async def _fill(self, recipe: Recipe, spec: EngineSpec) -> Installation:
        places, build = self._rooms.places, self._rooms.recipes.build(spec)
        partial = await in_thread(lambda _: places.begin(self.name, recipe.folder, recipe.needed_bytes))
        try:
            await recipe.put(partial, self._progress)
            # Waited for even when called off: nothing may be removed below a folder that gets its name.
            installation = await in_thread(lambda _: places.finish(partial, spec, build))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            raise
        return installation

    async def _prove_or_mend(self, installation: Installation) -> None:
        """Installs OS packages that it lacks. Raises NotProved, OSError."""
        while True:
            try:
                return await self._prove(installation)
            except NotProved as failure:
                if not await self._rooms.recipes.mend(failure, self._progress):
                    raise

    async def _prove(self, installation: Installation) -> None:
        """Raises NotProved, OSError."""
        self._progress(EngineState.PROVING, "seeing whether it works here")
        recipes, scratch = self._rooms.recipes, self._rooms.places.proofs
        self.program = await recipes.prove(installation.spec, installation.folder, scratch, self._progress)
        self._installation = installation
        self._say(EngineState.INSTALLED, "")

    def _fail(self, why: str, then: str) -> None:
        hint = lies_on_path(self.name)
        super()._fail(f"{why}. {hint}" if hint else why, then)
