from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASKED_FOR = "LLMGW_TEST_RELEASE"

collect_ignore_glob = [] if os.environ.get(ASKED_FOR) else ["test_built.py"]


@pytest.fixture(scope="session")
def built() -> Iterator[Path]:
    """The folder of a release: the one that ``LLMGW_TEST_RELEASE=FOLDER`` names, or one that is built now."""
    named = os.environ[ASKED_FOR]
    if named.startswith("/"):
        yield Path(named)
        return
    out = Path(tempfile.mkdtemp(prefix="llmgw-release-", dir="/var/tmp"))
    subprocess.run([sys.executable, "-m", "deploy.release", "build", "--out", out], cwd=ROOT, check=True)
    yield next(out.iterdir())
    shutil.rmtree(out)


@pytest.fixture(scope="session", params=["bookworm", "jammy"])
def bare(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A system as it is before anything is installed: no Python, nothing of llmgw."""
    tree = Path(tempfile.mkdtemp(prefix="llmgw-bare-", dir="/var/tmp"))
    command = ["mmdebstrap", "--quiet", "--variant=essential", "--include=apt", request.param, str(tree)]
    if request.param == "jammy":
        # Nothing of it is kept, and its keys are not on every machine.
        command.append("deb [trusted=yes] http://archive.ubuntu.com/ubuntu jammy main")
    subprocess.run(command, check=True)
    assert not list(tree.glob("usr/bin/python*"))
    yield tree
    shutil.rmtree(tree)
