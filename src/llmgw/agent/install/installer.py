"""The engines of this node: from wishes in the desired state to programs that were seen to work."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from llmgw.agent.fetch.threads import Stop, in_thread
from llmgw.agent.install.keeper import Keeper
from llmgw.agent.install.named import NamedKeeper
from llmgw.agent.install.packages import OsPackages
from llmgw.agent.install.places import Installation, Places
from llmgw.agent.install.program import Program, simulator
from llmgw.agent.install.recipes import Recipes
from llmgw.agent.install.running import runs_from
from llmgw.agent.install.version import Rooms, VersionKeeper
from llmgw.agent.tasks import begin
from llmgw.cluster.catalog import BuildKind, EngineName, EngineSpec
from llmgw.cluster.model import EngineOnNode, EngineState, Inventory

log = structlog.get_logger()

Key = tuple[str, str]
"""An engine's name and version."""
Report = Callable[[tuple[EngineOnNode, ...]], None]
"""Hears all that can be said of engines, whenever a part of it has changed."""

SWEEP_AGAIN_S = 30.0
SUPERSEDED_S = 600.0
"""How long a version stays that was installed again from elsewhere: a shard may be about to start from it."""


class Installer:
    """Call from one event loop only, and keep ``run`` running. Versions of an engine lie side by side."""

    def __init__(
        self,
        *,
        engines_dir: Path,
        cache_dir: Path,
        named: Mapping[EngineName, Path],
        inventory: Callable[[], Inventory],
        report: Report,
        builds: Mapping[EngineName, BuildKind] | None = None,
        user: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``named`` are programs that the agent's file names, ``builds`` the builds that it asks for.

        ``user`` is whom engines run as, and are proved as; None: as the agent.
        """
        self._places = Places(engines_dir, cache_dir)
        self._recipes = Recipes(self._places.downloads, OsPackages(cache_dir), inventory, builds or {})
        self._user = user
        self._report = report
        self._sim = simulator()
        self._named = {
            name: NamedKeeper(name, path, self._recipes, self._places.proofs, self._changed)
            for name, path in named.items()
        }
        self._versions: dict[Key, VersionKeeper] = {}
        self._installing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[Keeper, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()
        self._wanted: dict[Key, EngineSpec] = {}
        self._stay: frozenset[Key] | None = None
        """Versions that are not to be removed. None: nobody has said yet."""
        self._asked = asyncio.Event()
        self._left_behind = False
        """Something is to be removed and could not be yet."""
        self._beginning = asyncio.Lock()
        self._begun = False

    # -- what can be asked

    @property
    def states(self) -> tuple[EngineOnNode, ...]:
        """By name and version; of engines that the agent's file names one each."""
        sim = EngineOnNode(name="sim", version=self._sim.version, state=EngineState.INSTALLED)
        said = [keeper.state for keeper in (*self._named.values(), *self._versions.values())]
        return tuple(sorted((sim, *filter(None, said)), key=lambda engine: (engine.name, engine.version)))

    def program(self, name: str, version: str = "") -> Program | None:
        """What a shard is started with, if it was seen to work here; None else. Nothing on PATH ever counts.

        Without a version: of those that work, one that is wanted rather than one that is merely there.
        """
        if name == "sim":
            return self._sim
        if name in self._named:
            return self._named[name].program
        if version:
            keeper = self._versions.get((name, version))
            return keeper.program if keeper is not None else None
        working = [key for key, keeper in self._versions.items() if key[0] == name and keeper.program is not None]
        best = max(working, key=lambda key: (key in self._wanted, key), default=None)
        return self._versions[best].program if best is not None else None

    def state(self, name: str, version: str = "") -> EngineOnNode | None:
        """What is said of that version; of a named program whatever version is asked for."""
        said = [engine for engine in self.states if engine.name == name]
        fitting = [engine for engine in said if engine.named or not version or engine.version == version]
        return next((engine for engine in fitting if engine.usable), fitting[0] if fitting else None)

    # -- what is to be there

    def take(
        self, wanted: Sequence[EngineSpec], kept: Sequence[EngineSpec] = (), in_use: frozenset[Key] = frozenset()
    ) -> None:
        """``wanted`` is had and kept; ``kept`` stays where it is. All else goes, but for what is in use.

        ``in_use``: versions that shards of this node were or will be started with; of an empty version, all.
        """
        self._wanted = {(spec.name, spec.version): spec for spec in reversed(wanted) if spec.name != "sim"}
        self._stay = frozenset({*self._wanted, *((spec.name, spec.version) for spec in kept), *in_use})
        self._asked.set()

    async def run(self) -> None:
        """Does what was asked for until cancelled. What was begun by then is given up, and begun anew by the next."""
        await self._begin()
        try:
            for named in self._named.values():
                self._start(named, named.keep())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_AGAIN_S if self._left_behind else None):
                        await self._asked.wait()
                self._asked.clear()
                try:
                    self._follow()
                    self._left_behind = not await self._sweep()
                except Exception:
                    log.exception("a fault of the agent's own; what is installed stays as it is")
                    self._left_behind = True
        finally:
            tasks = [*self._tasks.values(), *self._ending, *self._probes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ensure(self, spec: EngineSpec) -> EngineState:
        """Makes one attempt at having this version, and returns where it ended. Failures are said, never raised."""
        await self._begin()
        if spec.name == "sim":
            return EngineState.INSTALLED
        if spec.name in self._named:
            return await self._named[spec.name].ensure()
        keeper = self._version(spec.name, spec.version)
        keeper.wanted = spec
        return await keeper.ensure()

    async def _begin(self) -> None:
        """Before anything else is done, once: what was cut short leaves nothing."""
        async with self._beginning:
            if self._begun:
                return
            try:
                await in_thread(lambda _: self._places.clean_all())
            except OSError as error:
                log.warning("what an earlier agent left of engines can't be removed", reason=str(error))
            user = self._user()
            try:
                await in_thread(lambda _: self._places.own_proofs(user))
            except (OSError, KeyError) as error:
                log.warning("engines are proved as the agent's user, not as their own", user=user, reason=str(error))
            self._begun = True

    def _follow(self) -> None:
        for name, named in self._named.items():
            named.want(frozenset(version for engine, version in self._wanted if engine == name))
        wanted = {key: spec for key, spec in self._wanted.items() if key[0] not in self._named}
        for key, keeper in self._versions.items():
            if keeper in self._tasks and wanted.get(key) != keeper.wanted:
                self._stop(keeper)
        for spec in wanted.values():
            keeper = self._version(spec.name, spec.version)
            if keeper not in self._tasks:
                keeper.wanted = spec
                self._start(keeper, keeper.keep())

    def _start(self, keeper: Keeper, life: Coroutine[None, None, None]) -> None:
        self._tasks[keeper] = begin(life, f"{keeper.name} {keeper.version}")

    def _stop(self, keeper: Keeper) -> None:
        task = self._tasks.pop(keeper)
        task.cancel()
        self._end(task)

    def _end(self, task: asyncio.Task[None]) -> None:
        """It is awaited by the next sweep, or by the end of all."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _version(self, name: EngineName, version: str) -> VersionKeeper:
        key = (name, version)
        if key not in self._versions:
            rooms = Rooms(self._places, self._recipes, self._installing[name], self._changed)
            self._versions[key] = VersionKeeper(name, version, rooms)
        return self._versions[key]

    # -- what is there

    async def probe(self) -> None:
        """Takes up what earlier agents have installed, and proves again all that is there."""
        await self._begin()
        for named in self._named.values():
            await named.probe()
        installed = await asyncio.to_thread(self._places.installations)
        by_version: defaultdict[tuple[EngineName, str], list[Installation]] = defaultdict(list)
        for each in installed:
            by_version[each.spec.name, each.spec.version].append(each)
        for key, keeper in self._versions.items():
            if key not in by_version and keeper.program is not None and not keeper.seen_to:
                keeper.lose(f"its folder under {self._places.of(*key).parent} is gone")
        for (name, number), found in by_version.items():
            if name not in self._named:
                await self._version(name, number).probe(found)
        for version in self._versions.values():
            if version in self._tasks and version.wanted and not version.suits(version.wanted):
                version.try_again()
        if self._stay is not None:
            self._asked.set()

    async def _sweep(self) -> bool:
        """Removes what nobody wants: versions, and what was fetched for them. False: something is left for later."""
        if self._ending:
            await asyncio.wait([*self._ending])
        done = True
        left: set[Key] = set()
        for found in await asyncio.to_thread(self._places.installations):
            key: Key = (found.spec.name, found.spec.version)
            superseded = key in left and time.time() - found.installed_at > SUPERSEDED_S
            if not self._stays(key) or superseded:
                if await self._remove(found):
                    continue
                done = False
            left.add(key)
            self._prove_what_was_left(found)
        for gone in [key for key in self._versions if key not in left and key not in self._wanted]:
            del self._versions[gone]
            self._changed()
        await self._drop_downloads()
        return done

    def _prove_what_was_left(self, found: Installation) -> None:
        """Its install was called off in the midst of its proof: it stays, and nobody else sees to it before long."""
        keeper = self._versions.get((found.spec.name, found.spec.version))
        if keeper is None or keeper in self._tasks or keeper.seen_to or keeper.program is not None:
            return
        if keeper.state is not None and keeper.state.state is not EngineState.FAILED:
            probe = begin(keeper.probe([found]), f"proof of {found.folder.name}")
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _drop_downloads(self) -> None:
        """Parts of files stay for as long as an attempt may go on from them."""
        needed = {keeper.name for keeper in self._tasks if keeper.pending}
        for engine in await asyncio.to_thread(self._places.downloaded):
            if engine not in needed:
                await asyncio.to_thread(self._places.drop_downloads, engine)

    def _stays(self, key: Key) -> bool:
        return self._stay is None or key in self._stay or (key[0], "") in self._stay

    async def _remove(self, found: Installation) -> bool:
        """False: it stays for now."""

        def remove(stopped: Stop) -> bool:
            with self._places.lock(found.spec.name) as lock:
                if not lock.acquire():
                    return False
                if runs_from(found.folder) is not None:
                    return False
                self._places.remove(found)
            log.info("a version of an engine that nobody wants was removed", folder=str(found.folder))
            return True

        try:
            return await in_thread(remove)
        except OSError as error:
            log.warning("a version of an engine can't be removed", folder=str(found.folder), reason=str(error))
            return False

    def _changed(self) -> None:
        self._report(self.states)
