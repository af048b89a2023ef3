"""A real llama-server, installed once for all tests of this folder by the installer itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmgw.agent.install import Installer, Program
from llmgw.cluster.model import EngineOnNode, EngineState
from llmgw.engines.builds import DEFAULT_ENGINES, LLAMACPP_B10068_X86_64, fits
from tests.agent.fetch.loopback import index

from .machine import THIS_MACHINE

__all__ = ["index"]


@dataclass(frozen=True)
class Installed:
    engines_dir: Path
    cache_dir: Path
    said: tuple[EngineOnNode, ...]
    program: Program


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if why := fits(LLAMACPP_B10068_X86_64, THIS_MACHINE):
        pytest.skip(f"this machine can't run the engine: {why}")
    folder = tmp_path_factory.mktemp("engines")
    said: list[EngineOnNode] = []

    async def install() -> Program | None:
        installer = Installer(
            engines_dir=folder / "engines",
            cache_dir=folder / "cache",
            named={},
            inventory=lambda: THIS_MACHINE,
            report=lambda engines: said.extend(engine for engine in engines if engine.name != "sim"),
        )
        state = await installer.ensure(DEFAULT_ENGINES[0])
        if state is not EngineState.INSTALLED and "index" in said[-1].words:
            pytest.skip(f"the package index does not answer here: {said[-1].words}")
        return installer.program("llamacpp")

    program = asyncio.run(install())
    assert program is not None, said[-1].words
    return Installed(folder / "engines", folder / "cache", tuple(said), program)
