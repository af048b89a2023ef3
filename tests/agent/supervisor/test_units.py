"""Engines in units of their own, on a node whose init is systemd: a container booted from an overlay of `/`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.process import units

from .conftest import eventually, needs_root

SCRIPT = Path(__file__).with_name("in_a_unit.py")


class Node:
    def __init__(self, leader: int) -> None:
        self._leader = leader

    def run(self, *command: str) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), "-a", *command],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def agent(self, part: str) -> list[dict[str, object]]:
        """Run an agent as a service of its own, whose whole control group ends with it."""
        unit = f"--unit=agent-{part}"
        said = self.run("systemd-run", "--wait", "--pipe", "--quiet", unit, sys.executable, "-B", str(SCRIPT), part)
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("needs systemd-nspawn (Debian: apt-get install systemd-container)")
    root, upper, work = (tmp_path / name for name in ("root", "upper", "work"))
    for folder in (root, upper, work):
        folder.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], capture_output=True).returncode != 0:
        pytest.skip("needs overlay mounts")
    try:
        yield from boot(root, tmp_path / "console.log")
    finally:
        subprocess.run(["umount", root], check=True)


def boot(root: Path, console: Path) -> Iterator[Node]:
    (root / "etc/machine-id").write_text("")
    # This checkout may lie in /tmp: it must be neither covered by a file system nor cleared away at the boot.
    (root / "etc/tmpfiles.d").mkdir(exist_ok=True)
    (root / "etc/tmpfiles.d/tmp.conf").symlink_to("/dev/null")
    name = f"llmgw-test-{os.getpid()}"
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={root}", f"--machine={name}"]
    command += ["--private-network", "--resolv-conf=off", "--timezone=off", "--console=read-only", "--boot"]
    with console.open("wb") as output:
        process = subprocess.Popen(
            [*command, "systemd.unit=sockets.target"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "SYSTEMD_NSPAWN_TMPFS_TMP": "0"},
        )
    try:
        node = eventually(lambda: booted(process.pid), "the boot")
        yield node
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def booted(container: int) -> Node | None:
    """Looked up anew each time: the container's first child only makes its second, which becomes init."""
    for child in Path(f"/proc/{container}/task/{container}/children").read_text().split():
        node = Node(int(child))
        if node.run("systemctl", "is-system-running").strip() in ("running", "degraded"):
            return node
    return None


@needs_root
def test_engines_have_units_that_outlive_the_agents(node: Node) -> None:
    (first,) = node.agent("first")
    pids, groups = first["pids"], first["groups"]
    assert isinstance(pids, dict)
    assert isinstance(groups, dict)
    assert first["warnings"] == []
    assert sorted(pids) == ["counting/0", "counting/0/ray", "orphan/0", "stubborn/0"]
    assert "/system.slice/agent-first.service" in str(first["own"])
    for shard_id, group in groups.items():
        assert f"/llmgw.slice/llmgw-shard-{shard_id.replace('/', '-')}-" in group
    assert 0 not in first["users"]  # type: ignore[operator]
    assert len(first["units"]) == 4  # type: ignore[arg-type]  # the one that ended is gone by itself

    adopted, stopped = node.agent("second")
    assert adopted["pids"] == pids
    assert adopted["ended"] == {"crashing/0": [7, ["bye"]]}
    assert stopped == {
        "step": "stopped",
        "orphan": "ended unseen",
        "counting": "SIGTERM",
        "stubborn": "SIGKILL",
        "left": [],
        "output_complete": True,
        "units": [],
    }


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("shard", "smol-abcde/0", "a1b2"), "llmgw-shard-smol-abcde-0-a1b2.service"),
        (("shard", "Ünï/0 ;x", "1"), "llmgw-shard--n-0-x-1.service"),
        (("gateway",), "llmgw-gateway.service"),
    ],
)
def test_units_have_names_that_systemd_takes(parts: tuple[str, ...], name: str) -> None:
    assert units.unit_name(*parts) == name
