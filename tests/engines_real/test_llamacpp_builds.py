"""Builds of llama.cpp that this release was not checked against, from the index: each is an engine where it runs.

Those two were built for processors with AVX-512 and AMX. Elsewhere they say their version and their help like any
other, and die of SIGILL while they load a model.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState
from tests.agent.install.node import Engines

NEEDED = ("avx512f", "avx512_bf16", "amx_tile")


def _lacking() -> list[str]:
    words = Path("/proc/cpuinfo").read_text().split()
    return [flag for flag in NEEDED if flag not in words]


@pytest.mark.parametrize("version", ["b10092", "b10434"])
async def test_a_build_for_another_processor_is_found_out_by_one_token(version: str, tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    spec = EngineSpec(name="llamacpp", version=version, source="index")
    state = await engines.installer.ensure(spec)
    if not _lacking():
        assert state is EngineState.INSTALLED, engines.words
        return
    assert state is EngineState.FAILED
    assert "loading a tiny model was killed by SIGILL: this processor lacks instructions" in engines.words
    assert engines.installer.program("llamacpp", version) is None
    # It is whole, and says its version: neither shows anything.
    (folder,) = engines.folders()
    (binary,) = (engines.engines_dir / "llamacpp" / folder).rglob("llama-server")
    subprocess.run([binary, "--version"], check=True, capture_output=True)  # noqa: ASYNC221
