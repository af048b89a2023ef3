"""`llmgw-provision-node` as a program: its options, what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmgw.cli.app import app
from tests.onboarding.provisioning import KEY, Site, site

OPTIONS = [
    *("--vmid", "--name", "--ip", "--gateway", "--dns", "--cores", "--memory", "--disk", "--storage", "--bridge"),
    *("--vlan", "--image", "--image-sha256", "--cpu", "--ssh-user", "--ssh-keys", "--gpu", "--api", "--api-token"),
]
ONBOARDING = [
    *("--server", "--fabric", "--mgmt-addr", "--mgmt-if", "--llamacpp-bin", "--vllm-bin", "--sglang-python"),
    *("--nvidia-smi", "--ib-root", "--pki", "--binary", "--releases", "--ssh-port", "--ssh-option", "--wait"),
    *("--provision-only", "--onboard-only"),
]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = site(tmp_path, monkeypatch)
    (tmp_path / "home/.ssh").mkdir(parents=True)
    (tmp_path / "home/.ssh/authorized_keys").write_text(f"{KEY}\n")
    yield made
    made.machines.end()


def command(at: Site, *more: str) -> list[str]:
    # An address of a network for documentation: nobody answers there.
    base = [sys.executable, "-m", "llmgw", "node", "provision", "--name", "llmgw-node04", "--ip", "192.0.2.144/24"]
    return [*base, "--image", str(at.image), "--wait", "0", *more]


def run(at: Site, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(at, *more), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(("verb", "options"), [("provision", OPTIONS), ("add", OPTIONS + ONBOARDING)])
def test_every_option_is_in_the_help_and_in_the_docs(verb: str, options: list[str]) -> None:
    shown = CliRunner().invoke(app, ["node", verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    docs = (Path(__file__).parents[2] / "docs/node-onboarding.md").read_text()
    for option in options:
        assert re.search(rf"{option}\b", shown), option
        assert f"`{option}" in docs, option


def test_what_is_missing_or_wrong_prints_usage_and_touches_nothing(at: Site) -> None:
    for wrong in (
        ["--ip", "192.0.2.44/24"],
        ["--gateway", "10.0.0.1"],
        ["--api", "https://pve1:8006"],
        ["--api-node", "pve1"],
        ["--image", "/nowhere.qcow2"],
        ["--ssh-keys", "/nowhere"],
    ):
        done = CliRunner().invoke(app, command(at, *wrong)[3:])
        assert done.exit_code == 2, done.output
    assert at.host.log() == []


def test_a_machine_that_may_be_slow_is_warned_of(at: Site) -> None:
    done = run(at, "--cpu", "kvm64", "--dry-run")
    assert done.returncode == 0
    assert "warning: --cpu kvm64" in done.stderr
    assert "[3/8] Create VM 144" in done.stdout
    assert at.host.log() == []


def test_a_failure_says_which_step_what_was_seen_and_where_to_look(at: Site) -> None:
    done = run(at, "--storage", "ceph")
    assert done.returncode == 1
    assert "error: Look at what there is for VM 144: the storage ceph is not there" in done.stderr
    assert "look with: pvesm status --content images" in done.stderr


def test_without_proxmox_it_says_what_it_needs(at: Site) -> None:
    for program in ("qm", "pvesh", "pvesm"):
        (at.folder / "bin" / program).unlink()
    done = run(at)
    assert done.returncode == 1
    assert "there is no qm on this machine: run it on the Proxmox host, or name its REST API" in done.stderr


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_a_run_that_is_ended_takes_back_what_it_made(at: Site, ending: signal.Signals) -> None:
    at.host.will_fail("disk", "lock", times=999)
    process = await asyncio.create_subprocess_exec(
        *command(at), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"locked by somebody else" not in (line := await process.stdout.readline()):
            assert line, "it ended before"
        assert 144 in at.host.vms()
        process.send_signal(ending)
        out, _ = await process.communicate()
    assert process.returncode == 128 + ending
    assert b"taken back: Create VM 144" in out
    assert at.host.vms() == {}
