"""Starts ``child.py``, and ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

CHILD = Path(__file__).with_name("child.py")


@contextmanager
def child(scene: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), scene, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def on_a_file_system_of_its_own(scene: str, directory: Path, options: str) -> list[str]:
    """Lines that the child prints, with a tmpfs on ``directory`` that nobody else sees and that ends with it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to mount a file system of its own")
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && exec "$3" "$4" "$5" "$2/llmgw.db"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", options, directory, sys.executable, CHILD, scene],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"can't mount here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
