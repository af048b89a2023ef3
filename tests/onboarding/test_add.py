"""From nothing to a registered node by one command: the Proxmox stands in, the machine and its ssh are real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from llmgw.pki.authority import Authority
from tests.cluster.lab import Lab
from tests.onboarding.nodes import NO_RELEASE, Fresh, as_version, fresh
from tests.onboarding.provisioning import ROOT
from tests.onboarding.proxmox import schema
from tests.onboarding.proxmox.host import GIB, Host, install_programs, qcow2
from tests.onboarding.proxmox.iso import read_iso

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: containers"),
    pytest.mark.timeout(240),
]
NAME = "llmgw-node05"


@dataclass
class Site:
    """A Proxmox whose one machine, once started, is a container that has read its CD."""

    lab: Lab
    fresh: Fresh
    host: Host
    folder: Path

    def command(self, *more: str) -> list[str]:
        command = [sys.executable, "-m", "llmgw", "node", "add", "--name", NAME, "--ip", f"{self.fresh.address}/30"]
        command += ["--vmid", "145", "--server", f"https://{self.fresh.here}:{self.lab.ports['agents']}"]
        command += ["--pki", str(self.lab.root / "pki"), "--binary", str(self.folder / "llmgw"), "--wait", "30"]
        command += ["--image", str(self.folder / "debian.qcow2"), "--ssh-keys", str(self.fresh.key.with_suffix(".pub"))]
        for option in ("IdentityFile=" + str(self.fresh.key), f"UserKnownHostsFile={self.fresh.known_hosts}"):
            command += ["--ssh-option", option]
        return [*command, *more]

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        context = self.lab.context()
        stated = {
            "LLMGW_SERVER": context.server,
            "LLMGW_TOKEN": context.token,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }
        return subprocess.run(
            self.command(*more),
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | stated,
            stdin=subprocess.DEVNULL,
        )

    def listed(self) -> list[str]:
        return [node["id"] for node in self.lab.get("nodes") if node["connected"]]


def _take(host: Host, machine: Fresh) -> None:
    """What cloud-init does with the data, for what matters here: the host key, the user, the keys, sudo."""
    volume, _ = schema.drive(host.vms()[145]["scsi1"])
    _, files = read_iso(host.path(volume).read_bytes())
    data = yaml.safe_load(files["user-data"])
    for file in (machine.root / "etc/ssh").glob("ssh_host_*"):
        file.unlink()
    key = machine.root / "etc/ssh/ssh_host_ed25519_key"
    key.write_text(data["ssh_keys"]["ed25519_private"])
    key.chmod(0o600)
    (user,) = data["users"]
    home = f"/home/{user['name']}"
    sudoers = machine.root / "etc/sudoers.d" / user["name"]
    sudoers.write_text(f"{user['name']} {user['sudo']}\n")
    sudoers.chmod(0o440)
    (machine.root / "tmp/keys").write_text("\n".join(user["ssh_authorized_keys"]) + "\n")
    script = f"useradd -m -s {user['shell']} {user['name']} && install -d -m 700 -o {user['name']} {home}/.ssh && "
    script += f"install -m 600 -o {user['name']} /tmp/keys {home}/.ssh/authorized_keys"
    done = machine.node.call("sh", "-c", script)
    assert done.returncode == 0, done.stderr
    machine.start_sshd()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with fresh(NAME, sshd=False) as machine:
        lab = Lab.make(agents_host="0.0.0.0")
        folder = lab.root / "proxmox"
        folder.mkdir()
        host = Host.install(folder / "pve")
        install_programs(host, folder / "bin", sys.executable, ROOT)
        (folder / "debian.qcow2").write_bytes(qcow2(2 * GIB))
        pki = lab.root / "pki"
        Authority.load(pki).issue_server([machine.here], pki, "head", renew=True)
        text = lab.server_file.read_text()
        lab.server_file.write_text(text.replace("https://127.0.0.1", f"https://{machine.here}"))
        binary = folder / "llmgw"
        binary.write_text(as_version(NO_RELEASE))
        binary.chmod(0o755)
        started, hook = folder / "started", host.folder / "hooks/start"
        os.mkfifo(started)
        hook.write_text(f'#!/bin/sh\necho "$1" >{started}\n')
        hook.chmod(0o755)

        def boot() -> None:
            # Ends by itself once a machine was started, or with an empty line at the end of the test.
            if started.read_text().strip():
                _take(host, machine)

        booting = threading.Thread(target=boot)
        booting.start()
        try:
            lab.server()
            yield Site(lab, machine, host, folder)
        finally:
            if booting.is_alive():
                started.write_text("\n")
            booting.join(10)
            lab.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_what_can_not_become_a_node_is_not_made(site: Site) -> None:
    """What the second half needs is looked at before the first begins."""
    done = site.run("--pki", str(site.folder))
    assert done.returncode == 1
    assert "no authority in" in done.stderr
    assert site.run("--fabric", "a", "--fabric", "b").returncode == 2
    assert site.run("--provision-only", "--onboard-only").returncode == 2
    assert site.host.log() == []


def test_a_dry_run_touches_nothing(site: Site) -> None:
    done = site.run("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "Create VM 145" in done.stdout
    assert "See the node registered" in done.stdout
    assert site.host.log() == []


def test_from_nothing_to_a_registered_node(site: Site) -> None:
    done = site.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.listed() == [NAME]
    assert re.search(rf"node {NAME} is registered, [0-9.]+ s in all", done.stdout)
    assert f"VM 145 is {NAME} at {site.fresh.address}" in done.stdout
    assert len(re.findall(r"^      done, [0-9.]+ s$", done.stdout, re.M)) == len(re.findall(r"^\[", done.stdout, re.M))
    # Nothing was trusted on first use: the key that is known is the one that was made before the machine.
    made = site.fresh.root / "etc/ssh/ssh_host_ed25519_key"
    public = subprocess.run(["ssh-keygen", "-y", "-f", made], capture_output=True, text=True, check=True).stdout
    known = site.fresh.known_hosts.read_text().splitlines()
    assert known[0] == f"{site.fresh.address},{NAME} {' '.join(public.split()[:2])}"
    assert known == [line for line in known if line.startswith(f"{site.fresh.address},{NAME} ssh-ed25519 ")]
    assert site.host.isos() == []


def test_a_second_run_makes_no_second_machine(site: Site) -> None:
    done = site.run()
    assert done.returncode == 1
    assert (
        f"VM 145 exists already ({NAME}, on pve1), and to adopt a machine is no decision for a program" in done.stderr
    )
    assert site.listed() == [NAME]


def test_onboarding_alone_may_be_run_again(site: Site) -> None:
    before = len(site.host.log())
    done = site.run("--onboard-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.listed() == [NAME]
    assert len(site.host.log()) == before
