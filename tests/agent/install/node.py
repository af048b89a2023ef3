"""An installer on a node of its own folders, and what it has said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from llmgw.agent.install import Installer, Program
from llmgw.cluster.catalog import EngineName
from llmgw.cluster.model import EngineOnNode, EngineState, Inventory

from .machine import THIS_MACHINE

DEADLINE_S = 60.0


class Engines:
    def __init__(
        self,
        folder: Path,
        *,
        named: Mapping[EngineName, Path] | None = None,
        machine: Callable[[], Inventory] = lambda: THIS_MACHINE,
    ) -> None:
        self.engines_dir = folder / "engines"
        self.cache_dir = folder / "cache"
        self.said: list[EngineOnNode] = []
        """Everything that was said of engines but the simulated one, each change once."""
        self._last: dict[tuple[str, str], EngineOnNode] = {}
        self._told = asyncio.Event()
        self.installer = Installer(
            engines_dir=self.engines_dir,
            cache_dir=self.cache_dir,
            named=named or {},
            inventory=machine,
            report=self._hear,
        )

    @property
    def words(self) -> str:
        return self.said[-1].words if self.said else ""

    def now(self, version: str = "", name: str = "llamacpp") -> EngineOnNode | None:
        return self.installer.state(name, version)

    def usable(self, version: str) -> bool:
        return (now := self.now(version)) is not None and now.usable

    def program(self, version: str = "") -> Program:
        program = self.installer.program("llamacpp", version)
        assert program is not None, self.installer.states
        return program

    def folders(self) -> list[str]:
        """Of llama.cpp, whole or not."""
        return sorted(path.name for path in (self.engines_dir / "llamacpp").glob("*") if path.is_dir())

    async def until(self, check: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not check():
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}; now {self.installer.states}") from None

    def _hear(self, engines: tuple[EngineOnNode, ...]) -> None:
        for engine in engines:
            if engine.name != "sim" and self._last.get((engine.name, engine.version)) != engine:
                self._last[engine.name, engine.version] = engine
                self.said.append(engine)
        self._told.set()


@asynccontextmanager
async def running(engines: Engines) -> AsyncIterator[Engines]:
    task = asyncio.ensure_future(engines.installer.run())
    try:
        yield engines
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def failed(engines: Engines, version: str) -> bool:
    return (now := engines.now(version)) is not None and now.state is EngineState.FAILED
