"""``llmgw ctl engine-check`` against the engines that agents have installed before in this run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines_real.figures import Figures

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("engine", "pattern"),
    [("vllm", "vllm/0.32.0-*/bin/vllm"), ("sglang", "sglang/*/bin/python")],
)
def test_all_flags_are_there(engine: str, pattern: str, engines_dir: Path, figures: Figures) -> None:
    found = sorted(engines_dir.glob(pattern))
    if not found:
        pytest.skip(f"{pattern} is not installed: run the tests before this one, too")
    argv = [sys.executable, "-m", "llmgw", "ctl", "engine-check", engine, "--bin", str(found[0])]
    with figures.timed(f"engine-check of {found[0].relative_to(engines_dir).parts[1]}"):
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
