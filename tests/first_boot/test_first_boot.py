"""The data of a first boot, taken by the cloud-init of Debian 12 on a machine that boots."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from llmgw.onboarding.cloud_init import Seed, seed_of
from llmgw.onboarding.host_key import HostKey, new_host_key
from llmgw.onboarding.machine import machine
from llmgw.onboarding.making import new_mac
from tests.first_boot.conftest import ASKED_FOR

PACKAGES = "systemd,systemd-sysv,dbus,openssh-server,sudo,iproute2,ca-certificates,procps,cloud-init,netplan.io"
NAME, HERE, THERE = "llmgw-node04", "10.79.255.1", "10.79.255.2"
STALE_ID = "1" * 32
BOOT_S = 120.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="needs root: containers")]


@dataclass
class Booting:
    """An image that was booted before: it has host keys and a machine id of its own."""

    folder: Path
    namespace: str
    host_key: HostKey = field(default_factory=new_host_key)
    mac: str = field(default_factory=new_mac)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def seed_folder(self) -> Path:
        return self.root / "var/lib/cloud/seed/nocloud"

    def seed(self) -> Seed:
        plan = machine(name=NAME, ip=f"{THERE}/30", vmid=144, dns=HERE)
        public = (self.folder / "key.pub").read_text().strip()
        return seed_of(plan, (public,), plan.dns, self.mac, self.host_key)

    def ssh(self, command: str) -> subprocess.CompletedProcess[str]:
        known = self.folder / "known_hosts"
        known.write_text(f"{THERE} {self.host_key.public}\n")
        settings = {
            "BatchMode": "yes",
            "IdentityFile": str(self.folder / "key"),
            "UserKnownHostsFile": str(known),
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": "2",
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return subprocess.run(
            ["ssh", "-F", "none", *options, f"llmgw@{THERE}", command],
            capture_output=True,
            text=True,
            timeout=BOOT_S,
            stdin=subprocess.DEVNULL,
        )

    def run(self, command: str) -> str:
        done = self.ssh(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    @contextmanager
    def up(self) -> Iterator[float]:
        """Boots it; the seconds until its user is let in."""
        command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={self.root}"]
        command += [f"--machine={self.namespace}", f"--network-namespace-path=/run/netns/{self.namespace}"]
        command += ["--resolv-conf=off", "--timezone=off", "--console=read-only", "--boot"]
        began = time.monotonic()
        with (self.folder / "console").open("ab") as console:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
            try:
                while (tried := self.ssh("true")).returncode != 0:
                    assert process.poll() is None, (self.folder / "console").read_text("utf-8", "replace")[-2000:]
                    assert time.monotonic() < began + BOOT_S, tried.stderr
                    time.sleep(0.2)
                yield time.monotonic() - began
            finally:
                process.terminate()
                process.wait()


@pytest.fixture(scope="module")
def tree() -> Path:
    folder = Path(os.environ[ASKED_FOR]).absolute()
    if not (folder / "usr/bin/cloud-init").exists():
        made = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)]
        subprocess.run(made, check=True)
    return folder


@pytest.fixture
def booting(tree: Path, tmp_path: Path) -> Iterator[Booting]:
    it = Booting(tmp_path, f"lgb{os.getpid() % 100000}")
    for name in ("root", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tree},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, it.root], check=True)
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
        with _wire(it.namespace):
            yield it
    finally:
        subprocess.run(["umount", it.root], check=True)


@contextmanager
def _wire(name: str) -> Iterator[None]:
    try:
        for command in (
            f"netns add {name}",
            f"link add {name} type veth peer name host0 netns {name}",
            f"address add {HERE}/30 dev {name}",
            f"link set {name} up",
            f"-n {name} address add {THERE}/30 dev host0",
            f"-n {name} link set host0 up",
            f"-n {name} link set lo up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=True)


def test_what_comes_of_it_and_stays(booting: Booting) -> None:
    seed = booting.seed()
    booting.seed_folder.mkdir(parents=True)
    for name, data in seed.files().items():
        if name != "network-config":
            (booting.seed_folder / name).write_bytes(data)
    # A container's end of a wire is no card that cloud-init would set up: its address is there already.
    (booting.root / "etc/cloud/cloud.cfg.d/98-test.cfg").write_text("network: {config: disabled}\n")
    (booting.root / "etc/machine-id").write_text(f"{STALE_ID}\n")
    assert (booting.root / "etc/ssh/ssh_host_rsa_key").exists(), "an image that was booted before has host keys"

    with booting.up() as seconds:
        assert "status: done" in booting.run("cloud-init status --wait --long")
        print(f"\nlet in after {seconds:.1f} s")
        assert booting.run("hostname") == NAME
        assert booting.run("sudo -n id -un") == "root"
        assert booting.run("sudo cloud-init schema --system 2>&1").endswith("Valid cloud-config: system userdata")
        assert booting.run("sudo grep -cE 'WARNING|ERROR' /var/log/cloud-init.log || true") == "0"
        # Its own address is what its name means, and no loopback.
        assert booting.run(f"getent ahostsv4 {NAME} | head -1").split()[0] == THERE
        machine_id = booting.run("cat /etc/machine-id")
        assert re.fullmatch(r"[0-9a-f]{32}", machine_id)
        assert machine_id != STALE_ID
        # What is logged from now on is found by who looks.
        assert "told the journal" in booting.run(
            "logger -t onboarding 'told the journal'; sudo journalctl --sync; sudo journalctl --no-pager -t onboarding"
        )
        refused = booting.run("sudo sshd -T 2>/dev/null | grep -E '^(passwordauthentication|permitrootlogin)' || true")
        assert "passwordauthentication no" in refused
    host_keys = sorted(path.name for path in (booting.root / "etc/ssh").glob("ssh_host_*"))
    assert host_keys == ["ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"]
    private = booting.root / "etc/ssh/ssh_host_ed25519_key"
    assert private.read_text() == booting.host_key.private
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    home = booting.root / "home/llmgw/.ssh/authorized_keys"
    assert home.read_text().strip() == (booting.folder / "key.pub").read_text().strip()

    # The data of the first boot is taken away, as provisioning does: nothing of it is undone by the next boot.
    shutil.rmtree(booting.seed_folder)
    with booting.up():
        assert booting.run("hostname") == NAME
        assert booting.run("cat /etc/machine-id") == machine_id
        assert booting.run("sudo -n id -un") == "root"
        booting.run("cloud-init status --wait || true")
    assert sorted(path.name for path in (booting.root / "etc/ssh").glob("ssh_host_*")) == host_keys
    assert private.read_text() == booting.host_key.private


@pytest.mark.parametrize("renderer", ["netplan", "eni", "networkd"])
def test_its_network_as_cloud_init_renders_it(booting: Booting, renderer: str) -> None:
    (booting.root / "root/network-config").write_text(booting.seed().network_config)
    command = ["chroot", booting.root, "cloud-init", "devel", "net-convert", "-p", "/root/network-config", "-k", "yaml"]
    command += ["-d", "/root/rendered", "-D", "debian", "-O", renderer, "-m", f"eth0,{booting.mac.lower()}"]
    subprocess.run(command, check=True, capture_output=True)
    files = {path.name: path.read_text() for path in (booting.root / "root/rendered").rglob("*") if path.is_file()}
    text = "\n".join(files.values())
    assert f"{THERE}/30" in text
    assert booting.mac.lower() in text
    if renderer == "netplan":
        (card,) = yaml.safe_load(next(iter(files.values())))["network"]["ethernets"].values()
        assert card["addresses"] == [f"{THERE}/30"]
        assert card["gateway4"] == HERE
        assert card["nameservers"] == {"addresses": [HERE]}
        assert card["match"] == {"macaddress": booting.mac.lower()}
