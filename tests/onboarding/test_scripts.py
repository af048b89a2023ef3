"""What runs on nodes by POSIX's shell holds to it: who has another `sh` than this machine gets the same."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from llmgw.onboarding import scripts

SCRIPTS = {name: text for name, text in vars(scripts).items() if name.isupper() and not name.startswith("_")}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_clean(name: str) -> None:
    done = subprocess.run(["shellcheck", "-s", "sh", "-"], input=SCRIPTS[name], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_there_are_some() -> None:
    assert {"LOOK", "FETCH", "COPY", "WRITE", "TRUST", "ENGINE", "STATE"} <= set(SCRIPTS)
