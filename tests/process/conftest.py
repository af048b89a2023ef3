from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from llmgw.process.detached import BASE_PATH, DetachedSpec, new_nonce
from llmgw.process.identity import holders

DEADLINE_S = 15.0
Found = TypeVar("Found")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, users, control groups")


def eventually(look: Callable[[], Found], what: str = "it") -> Found:
    """Look until there is something to see; fails after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.005)
    return found


class Programs:
    """Makes specs below a folder of the test's own, and leaves no process of them behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nonces: list[str] = []

    def spec(self, *argv: str, **more: Any) -> DetachedSpec:
        nonce = new_nonce()
        self.nonces.append(nonce)
        base = self.folder / nonce[:8]
        fields: dict[str, Any] = {
            "argv": argv,
            "env": {"PATH": BASE_PATH},
            "cwd": "/",
            "log_path": str(base / "log" / "output.log"),
            "record_dir": str(base / "record"),
            "nonce": nonce,
        }
        return DetachedSpec(**{**fields, **more})

    def shell(self, script: str, **more: Any) -> DetachedSpec:
        return self.spec("/bin/sh", "-c", script, **more)

    def python(self, script: str, **more: Any) -> DetachedSpec:
        return self.spec(sys.executable, "-I", "-S", "-u", "-c", script, **more)

    def clear(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for nonce in self.nonces:
            while left := holders(nonce):
                for process in left:
                    os.kill(process.pid, signal.SIGKILL)
                assert time.monotonic() < deadline, f"still there: {left}"
                time.sleep(0.01)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.clear()


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env=environment or None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk)
    yield disk
    run("umount", "--lazy", disk)
