"""The unit on the disk, and where it can't be put there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmgw.agent.service import ServiceRefused, systemd, unit, unit_file
from llmgw.cli.app import app

UNIT = unit(Path("/usr/local/bin/llmgw"), Path("/etc/llmgw/agent.yaml"))
OLDER = UNIT.replace("RestartSec=2s", "RestartSec=1s")
STRANGERS = "[Service]\nExecStart=/opt/ours/agent\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "llmgw-agent.service"


def test_it_is_written_and_then_left_alone(path: Path) -> None:
    assert unit_file.put(UNIT, path) == [f"wrote {path}"]
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o644
    assert unit_file.put(UNIT, path) == []
    assert path.stat() == before
    assert os.listdir(path.parent) == [path.name]


def test_an_older_one_of_ours_is_replaced(path: Path) -> None:
    path.write_text(OLDER)
    assert unit_file.put(UNIT, path) == [f"wrote {path}"]
    assert path.read_text() == UNIT
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("linked", [False, True])
def test_a_strangers_is_kept(path: Path, linked: bool) -> None:
    own = path.with_name("theirs.service")
    if linked:
        own.write_text(STRANGERS)
        path.symlink_to(own)
    else:
        path.write_text(STRANGERS)
    kept = path.with_name("llmgw-agent.service.replaced")
    assert unit_file.put(UNIT, path) == [f"the unit that somebody else had put there is at {kept} now", f"wrote {path}"]
    assert path.read_text() == UNIT
    assert not path.is_symlink()
    assert kept.read_text() == STRANGERS


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServiceRefused, match=r"nowhere/x\.service can't be written: No such file"):
        unit_file.put(UNIT, tmp_path / "nowhere/x.service")


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs this machine")
@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_without_systemd_it_is_refused(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmgw", "agent", verb], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: systemd does not run this machine (/run/systemd/system is not there), so there is nothing to {verb}; "
        "have whatever manages services here run `llmgw agent --config FILE`\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to be somebody else")
def test_without_the_right_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "RUNNING", Path("/"))
    os.seteuid(65534)
    try:
        with pytest.raises(ServiceRefused, match="only root can install a service of this machine: sudo llmgw x"):
            systemd.check_here("install", "llmgw x")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("words", ["install --no-start --restart", "uninstall --stop-engines --leave-engines"])
def test_opposites_are_refused(words: str) -> None:
    done = CliRunner().invoke(app, ["agent", *words.split()])
    assert done.exit_code == 2
    assert "opposites" in done.output
