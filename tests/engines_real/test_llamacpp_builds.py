"""Builds of llama.cpp that this release was not checked against, from the index: each is an engine where it runs.

Those two were built for processors with AVX-512 and AMX. Elsewhere they say their version and their help like any
other, and die of SIGILL while they load a model.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState
from tests.agent.install.node import Engines
from tests.cluster.engine import llama
from tests.cluster.test_upgrade import Load, run_on
from tests.engines_real.cluster import RealLab, eventually
from tests.engines_real.figures import Figures

__all__ = ["llama"]

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


def test_from_one_build_to_another_under_load(
    build: Callable[[str, str], RealLab], llama: tuple[Path, Path], figures: Figures
) -> None:
    """Both from the index; no request fails."""
    if _lacking():
        pytest.skip(f"the newer build needs {', '.join(_lacking())} of this processor")
    models = (
        f"models:\n  - name: tiny\n    source: file://{llama[1]}\n    replicas: 2\n"
        "    profiles: [{engine: llamacpp, memory: 64MiB, context: 256, parallel: 2, args: ['-t', '1']}]\n"
    )
    lab = build(models, "{llamacpp: {version: b10068, source: index}}")
    lab.server()
    lab.agent("node01")
    eventually(lambda: run_on(lab, "b10068"), "both serve on the first build", 300)
    with Load(lab, lab.key()) as load:
        eventually(lambda: load.answered > 20, "requests are answered", 60)
        began = time.monotonic()
        lab.write(models, "{llamacpp: {version: b10092, source: index}}")
        lab.reload()
        eventually(lambda: run_on(lab, "b10092"), "both were rolled over", 600)
        figures.add("llama.cpp from b10068 to b10092, two replicas", f"{time.monotonic() - began:.1f} s")
        before = load.answered
        eventually(lambda: load.answered > before + 20, "requests are answered by the new one", 60)
    assert load.failed == []
    figures.add("requests meanwhile, none failed", str(load.answered))
