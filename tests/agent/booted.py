"""A machine whose init is systemd: a container booted from an overlay of `/`, so that this checkout lies in it, too."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.lab import eventually

_numbers = itertools.count()


class Node:
    """``root`` is its file system, ``upper`` what was changed in it since it was made."""

    def __init__(self, leader: int, root: Path, upper: Path) -> None:
        self._leader = leader
        self.root = root
        self.upper = upper

    def inside(self, *command: str) -> list[str]:
        """The command line that runs it there."""
        return ["nsenter", "-t", str(self._leader), "-a", *command]

    def call(self, *command: str, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside(*command),
            capture_output=True,
            text=True,
            timeout=within_s,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *command: str) -> str:
        return self.call(*command).stdout


@contextmanager
def booted(
    folder: Path, furnish: Callable[[Path], None] = lambda root: None, *, network: Path | None = None
) -> Iterator[Node]:
    """``furnish`` puts files into its root before it boots; ``network`` is a network namespace to boot in (None: one
    of its own, with nothing in it). Skips the test where this machine can't do it."""
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("needs systemd-nspawn (Debian: apt-get install systemd-container)")
    root, upper, work = (folder / name for name in ("root", "upper", "work"))
    for each in (root, upper, work):
        each.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], capture_output=True).returncode != 0:
        pytest.skip("needs overlay mounts")
    try:
        furnish(root)
        yield from _boot(root, upper, folder / "console.log", network)
    finally:
        subprocess.run(["umount", root], check=True)


def _boot(root: Path, upper: Path, console: Path, network: Path | None) -> Iterator[Node]:
    (root / "etc/machine-id").write_text("")
    # This checkout may lie in /tmp: it must be neither covered by a file system nor cleared away at the boot.
    (root / "etc/tmpfiles.d").mkdir(exist_ok=True)
    (root / "etc/tmpfiles.d/tmp.conf").symlink_to("/dev/null")
    name = f"llmgw-test-{os.getpid()}-{next(_numbers)}"
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={root}", f"--machine={name}"]
    command += [
        f"--network-namespace-path={network}" if network else "--private-network",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=read-only",
        "--boot",
    ]
    with console.open("wb") as output:
        process = subprocess.Popen(
            [*command, "systemd.unit=sockets.target"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "SYSTEMD_NSPAWN_TMPFS_TMP": "0"},
        )
    try:
        yield eventually(lambda: _up(process.pid, root, upper), "the boot")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _up(container: int, root: Path, upper: Path) -> Node | None:
    """Looked up anew each time: the container's first child only makes its second, which becomes init."""
    for child in Path(f"/proc/{container}/task/{container}/children").read_text().split():
        node = Node(int(child), root, upper)
        if node.run("systemctl", "is-system-running").strip() in ("running", "degraded"):
            return node
    return None
