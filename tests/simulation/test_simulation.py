"""A fixed set of seeds, the same on every machine: each a cluster's life with faults, and its healing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .run import Outcome, quiet, report, simulate

ROOT = Path(__file__).parents[2]
CHUNKS, SEEDS = 8, 20


@pytest.fixture(autouse=True)
def _without_logs() -> None:
    quiet()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_invariants_hold_and_the_wished_state_is_reached(chunk: int) -> None:
    for seed in range(1 + chunk * SEEDS, 1 + (chunk + 1) * SEEDS):
        outcome = simulate(seed)
        assert not outcome.rule, report(outcome)


def test_a_seed_is_the_same_story_again_in_another_process() -> None:
    def told(seed: str) -> str:
        command = [sys.executable, "-m", "tests.simulation", "--seed", "5", "--steps", "400", "--story"]
        done = subprocess.run(
            command, cwd=ROOT, env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, check=True
        )
        return "\n".join(line for line in done.stdout.splitlines() if " s" not in line)

    assert told("1") == told("2")


def test_a_failing_seed_tells_its_story_and_how_to_run_it_again() -> None:
    outcome = Outcome(7, 1000, rule="1", words="[1] two engines share a GPU", story=["    1.000 n1         power off"])
    words = report(outcome)
    assert words.splitlines()[0].endswith("power off")
    assert words.splitlines()[-1] == "again: python -m tests.simulation --seed 7 --steps 1000"
