"""A Proxmox for a test, and what is made on it."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import llmgw
from llmgw.onboarding.course import Step, run_course
from llmgw.onboarding.image import Image
from llmgw.onboarding.machine import Machine
from llmgw.onboarding.provision import Plan, Provisioning
from llmgw.onboarding.proxmox import Patience, Proxmox
from llmgw.onboarding.proxmox_api import Api as Client
from llmgw.onboarding.proxmox_qm import Qm
from llmgw.pki.authority import Authority
from tests.onboarding.answering_machine import Machines
from tests.onboarding.proxmox.api import Api, serving
from tests.onboarding.proxmox.host import GIB, Host, install_programs, qcow2

ROOT = Path(__file__).parents[2]
SOURCES = Path(llmgw.__file__).parents[1]
TOKEN_ID, SECRET = "llmgw@pve!ci", "5f3a3c1e-0000-4000-8000-1a2b3c4d5e6f"
TOKENS = {TOKEN_ID: {"secret": SECRET}}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKeepThisKeyForTheTestsAndForNothingElse00 op+er & co@desk=1"
QUICK = Patience(tries=6, pause_s=0.02, longest_pause_s=0.05)


class Heard:
    """A course as it was shown."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.said: list[str] = []
        self.ended: list[tuple[str, str]] = []

    def begin(self, number: int, of: int, name: str) -> None:
        self.begun.append(name)

    def say(self, words: str) -> None:
        self.said.append(words)

    def end(self, name: str, seconds: float, outcome: str) -> None:
        self.ended.append((name, outcome))


@dataclass
class Site:
    """A host with machines that answer on ``port`` of the loopback, and a place for files."""

    host: Host
    machines: Machines
    folder: Path
    port: int
    api: Api
    heard: Heard = field(default_factory=Heard)

    @property
    def image(self) -> Path:
        return self.folder / "images/debian-12-genericcloud-amd64.qcow2"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "home/.ssh/known_hosts"

    def machine(self, **changes: Any) -> Machine:
        # Named by a number of its own: the address is this machine's, where its sshd listens.
        given: dict[str, Any] = {
            "name": "llmgw-node04",
            "vmid": 144,
            "address": ipaddress.IPv4Interface("127.0.0.1/24"),
            "gateway": ipaddress.IPv4Address("127.0.0.254"),
        }
        return Machine(**{**given, **changes})

    def provisioning(
        self, proxmox: Proxmox, *, image: Image | None = None, wait_s: float = 15.0, **changes: Any
    ) -> Provisioning:
        plan = Plan(
            machine=self.machine(**changes),
            keys=(KEY,),
            image=image or Image(path=self.image),
            known_hosts=self.known_hosts,
            wait_s=wait_s,
            port=self.port,
        )
        return Provisioning(plan, proxmox)

    async def run(self, made: Provisioning, proxmox: Proxmox) -> None:
        self.heard = Heard()
        async with proxmox:
            await run_course(made.steps(), self.heard)

    def qm(self) -> Qm:
        return Qm(images=self.folder / "cache", sysfs=self.folder / "sys", patience=QUICK)


def site(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Site:
    host = Host.install(folder / "pve", **{"tokens": TOKENS, **settings})
    install_programs(host, folder / "bin", sys.executable, ROOT)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "images").mkdir()
    (folder / "images/debian-12-genericcloud-amd64.qcow2").write_bytes(qcow2(2 * GIB))
    port = free_port()
    machines = Machines(host, port, sys.executable, ROOT)
    return Site(host, machines, folder, port, Api(host, folder / "images"))


@asynccontextmanager
async def over_api(at: Site, *, token: str = f"{TOKEN_ID}={SECRET}", **given: Any) -> AsyncIterator[Client]:
    """A client of the site's API, not yet opened; the API serves as long as this lasts."""
    pki = at.folder / "pki"
    if not pki.exists():
        Authority.create(pki, "proxmox").issue_server(["127.0.0.1"], pki)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.pem", pki / "server-key.pem")
    async with serving(at.api, context) as url:
        yield Client(url, token, **{"ca": pki / "ca.pem", "patience": QUICK, **given})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def names(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]
