"""A real llama-server, installed once for all tests of this folder by the installer itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmgw.agent.install import Program
from llmgw.cluster.model import EngineOnNode, EngineState
from llmgw.engines.builds import DEFAULT_ENGINES, LLAMACPP_B10068_X86_64, fits

from .machine import THIS_MACHINE
from .node import Engines


@dataclass(frozen=True)
class Installed:
    engines_dir: Path
    cache_dir: Path
    said: tuple[EngineOnNode, ...]
    program: Program

    @property
    def binary(self) -> Path:
        return Path(self.program.argv[0])


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if why := fits(LLAMACPP_B10068_X86_64, THIS_MACHINE):
        pytest.skip(f"this machine can't run the engine: {why}")
    engines = Engines(tmp_path_factory.mktemp("engines"))
    state = asyncio.run(engines.installer.ensure(DEFAULT_ENGINES[0]))
    if state is not EngineState.INSTALLED and "index" in engines.words:
        pytest.skip(f"the package index does not answer here: {engines.words}")
    program = engines.installer.program("llamacpp")
    assert program is not None, engines.words
    return Installed(engines.engines_dir, engines.cache_dir, tuple(engines.said), program)
