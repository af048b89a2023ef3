"""A machine as one gets it: booted, with an address, a name, sshd, and a user who has sudo; nothing of llmgw in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent.booted import Node, booted

USER = "admin"
NO_RELEASE = "v0.0.0+1.checkout"
NEEDED = {
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "sudo": "sudo",
    "update-ca-certificates": "ca-certificates",
}


@dataclass
class Fresh:
    """``key`` and ``known_hosts`` are this test's own; ``here`` is this machine's address on the way to it."""

    node: Node
    name: str
    address: str
    here: str
    key: Path
    known_hosts: Path

    @property
    def root(self) -> Path:
        return self.node.root

    @property
    def login(self) -> list[str]:
        """How a command of llmgw is told to get in."""
        options = (f"IdentityFile={self.key}", f"UserKnownHostsFile={self.known_hosts}", "IdentitiesOnly=yes")
        return ["--ssh-user", USER, *(word for option in options for word in ("--ssh-option", option))]

    def start_sshd(self) -> None:
        # Before the first nobody but root is let in.
        started = self.node.call("systemctl", "start", "systemd-user-sessions", "ssh")
        assert started.returncode == 0, started.stderr

    def stop_sshd(self) -> None:
        self.node.run("systemctl", "stop", "ssh")

    def host_key(self) -> None:
        """Another host key, as after an installation from nothing."""
        _make_key(self.root / "etc/ssh/ssh_host_ed25519_key", again=True)
        self.node.run("systemctl", "restart", "ssh")


@contextmanager
def fresh(name: str, furnish: Callable[[Path], None] = lambda root: None, *, sshd: bool = True) -> Iterator[Fresh]:
    """Boots one. ``furnish`` changes its root before. Skips the test where this machine can't."""
    missing = [package for tool, package in NEEDED.items() if not _has(tool)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'containers'}")
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="llmgw-node-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        key = folder / "key"
        _make_key(key)
        here, address, namespace = stack.enter_context(_network())

        def furnished(root: Path) -> None:
            _furnish(root, name, key.with_suffix(".pub").read_text())
            furnish(root)

        node = stack.enter_context(booted(folder, furnished, network=namespace))
        found = Fresh(node, name, address, here, key, folder / "known_hosts")
        if sshd:
            found.start_sshd()
        yield found


def as_version(version: str, head: str = "") -> str:
    """A program that is this checkout, which lies in the machine, too. Its own version changes with each commit."""
    says = f'if [ "$1" = --version ]; then echo llmgw {version}; exit; fi'
    return f'#!/bin/sh\n{head}\n{says}\nexec {sys.executable} -m llmgw "$@"\n'


def _furnish(root: Path, name: str, public: str) -> None:
    (root / "etc/hostname").write_text(f"{name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    for file in (root / "etc/ssh").glob("ssh_host_*"):
        file.unlink()
    _make_key(root / "etc/ssh/ssh_host_ed25519_key")
    for there in ("etc/llmgw", "var/lib/llmgw-agent", "usr/local/lib/llmgw"):
        shutil.rmtree(root / there, ignore_errors=True)
    (root / "usr/local/bin/llmgw").unlink(missing_ok=True)
    subprocess.run(["chroot", root, "useradd", "-m", "-s", "/bin/bash", USER], check=True, capture_output=True)
    sudoers = root / "etc/sudoers.d"
    sudoers.mkdir(exist_ok=True)
    (sudoers / USER).write_text(f"{USER} ALL=(ALL) NOPASSWD:ALL\n")
    (sudoers / USER).chmod(0o440)
    ssh = root / "home" / USER / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "authorized_keys").write_text(public)
    subprocess.run(["chroot", root, "chown", "-R", f"{USER}:", f"/home/{USER}/.ssh"], check=True)


@contextmanager
def _network() -> Iterator[tuple[str, str, Path]]:
    """Two ends of a wire: this machine's address, the node's, and the node's network namespace."""
    for number in range(os.getpid() % 4000, os.getpid() % 4000 + 200):
        name = f"lgo{number}"
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0:
            break
    else:
        raise AssertionError("no name for a network namespace is free")
    prefix = f"10.79.{number // 64 % 256}"
    low = number % 64 * 4
    here, there = f"{prefix}.{low + 1}", f"{prefix}.{low + 2}"
    try:
        for command in (
            f"link add {name} type veth peer name host0 netns {name}",
            f"address add {here}/30 dev {name}",
            f"link set {name} up",
            f"-n {name} address add {there}/30 dev host0",
            f"-n {name} link set host0 up",
            f"-n {name} link set lo up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield here, there, Path("/run/netns") / name
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=True)


def _make_key(path: Path, *, again: bool = False) -> None:
    if again:
        path.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def _has(tool: str) -> bool:
    return shutil.which(tool) is not None or Path("/usr/sbin", tool).exists()
