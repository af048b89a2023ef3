"""The simulated engine as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

KEY = "sim-key"


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    url: str


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a simulator with the given flags and waits until it listens."""
    running: list[subprocess.Popen[str]] = []

    def run(*flags: str, key: str = KEY) -> Running:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmgw.simulator", "--port", "0", "--model", "m", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "LLMGW_SIM_API_KEY": key},
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"listening on (http://\S+),", line)
        assert found is not None, f"the simulator did not start: {line!r}"
        return Running(process, found[1])

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
