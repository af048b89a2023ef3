"""From a token to a node that stays one: joined, renewed, recovered and killed as real processes do it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmgw.agent.identity import IdentityStore, Pair
from llmgw.pki.authority import Authority
from llmgw.pki.issuer import issue_issuer
from tests.cluster.lab import ENGINE_PORTS, SIM, Lab, Proc, alive, eventually
from tests.cluster.streams import ask

NODES = "nodes: {suspect_after: 4s, lost_after: 8s}\n"


def issuing_lab(lifetime_s: float) -> Lab:
    """A control plane that issues by itself, with certificates that live no longer than that."""
    lab = Lab.make(SIM, extra=NODES)
    pki = lab.root / "pki"
    if not (pki / "issuer.pem").exists():
        issue_issuer(Authority.load(pki), pki)
    log = lab.root / "server.log"
    arguments = ("-m", "tests.cluster.short_lived", str(lab.server_file), str(lifetime_s))
    with log.open("ab") as output:
        popen = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, start_new_session=True)
    server = Proc("server", popen, log)
    lab.procs.append(server)
    eventually(lambda: lab._answers(server), "the control plane answers", 40)
    return lab


def command(lab: Lab, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    context = lab.context()
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LLMGW_SERVER": context.server, "LLMGW_TOKEN": context.token},
        check=False,
    )


def token_for(lab: Lab, node: str, *options: str) -> str:
    made = command(lab, "ctl", "node", "token", node, *options)
    assert made.returncode == 0, made.stderr
    return next(word for word in made.stdout.split() if word.startswith("llmgw-join-1."))


@dataclass
class Machine:
    """A machine that has nothing yet, and what it becomes."""

    lab: Lab
    node: str

    @property
    def folder(self) -> Path:
        return self.lab.root / self.node

    @property
    def file(self) -> Path:
        return self.folder / "etc" / "agent.yaml"

    @property
    def pair(self) -> Pair:
        pair = IdentityStore(self.folder / "work" / "identity").current()
        assert pair is not None
        return pair

    def join(self, token: str) -> subprocess.CompletedProcess[str]:
        where = ("--config", str(self.file), "--work-dir", str(self.folder / "work"))
        return command(self.lab, "agent", "join", "--token-file", "-", *where, given=token)

    def settle_in(self) -> None:
        """What a test needs beside what joining wrote: folders of its own, and haste."""
        with self.file.open("a") as file:
            file.write(
                f"ports: {ENGINE_PORTS}\nreconnect_base: 200ms\nreconnect_max: 1s\nheartbeat_interval: 500ms\n"
                f"weights_dir: {self.folder}/weights\nengines_dir: {self.folder}/engines\n"
            )

    def start(self) -> Proc:
        return self.lab.run(f"agent-{self.node}", "agent", "--config", str(self.file))

    def connected(self) -> bool:
        return any(each["id"] == self.node and each["connected"] for each in self.lab.get("nodes"))


def become_a_node(lab: Lab, node: str) -> Machine:
    machine = Machine(lab, node)
    joined = machine.join(token_for(lab, node))
    assert joined.returncode == 0, joined.stderr
    machine.settle_in()
    return machine


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lab]:
    """Whose certificates outlive the tests."""
    lab = issuing_lab(3600)
    yield lab
    lab.close()


@pytest.fixture
def labs() -> Iterator[list[Lab]]:
    """Those that a test has made, to be closed."""
    made: list[Lab] = []
    yield made
    for lab in made:
        lab.close()


def test_a_node_that_joined_by_token_is_renewed_under_a_running_engine(labs: list[Lab]) -> None:
    lab = issuing_lab(12)
    labs.append(lab)
    machine = become_a_node(lab, "n1")
    first = machine.pair
    machine.start()
    before, key = lab.ready(), lab.key()
    serials = {first.serial}

    def renewed_thrice() -> bool:
        serials.add(machine.pair.serial)
        assert ask(lab, key).status_code == 200
        return len(serials) >= 4

    eventually(renewed_thrice, "it was renewed three times", 90, every_s=0.2)
    eventually(machine.connected, "it is connected with the newest", 20)
    after = lab.ready()
    assert (after["generation"], after["pids"], after["restarts"]) == (1, before["pids"], 0)
    assert {event["kind"] for event in lab.events()} & {"node.suspect", "node.lost", "certificate.copied"} == set()
    assert first.not_after < datetime.now(UTC), "the one it joined with is long over"


def test_a_node_that_was_off_for_longer_than_its_certificate_comes_back(labs: list[Lab]) -> None:
    lab = issuing_lab(8)
    labs.append(lab)
    machine = become_a_node(lab, "n1")
    agent = machine.start()
    before = lab.ready()
    agent.terminate()
    last = machine.pair
    eventually(lambda: datetime.now(UTC) > last.not_after, "its certificate has expired", 20)
    machine.start()
    eventually(lambda: lab.events("certificate.recovered"), "it proved its key", 60)
    eventually(machine.connected, "it is back", 60)
    after = lab.ready()
    assert (after["generation"], after["pids"], after["restarts"]) == (1, before["pids"], 0)
    assert machine.pair.serial != last.serial


def test_a_node_that_was_removed_is_told_so_and_joins_anew_in_its_old_folder(labs: list[Lab]) -> None:
    lab = issuing_lab(3600)
    labs.append(lab)
    machine = become_a_node(lab, "n1")
    agent = machine.start()
    before, key = lab.ready(), lab.key()
    agent.terminate()
    eventually(lambda: [node["state"] for node in lab.get("nodes")] == ["lost"], "it is lost", 60)
    with lab.admin() as client:
        client.delete("nodes/n1")
    old = machine.pair.serial
    agent = machine.start()

    def said() -> list[str]:
        lines = agent.output().splitlines()
        return [line for line in lines if 'event="not connected"' in line and "its node was removed" in line]

    words = eventually(said, "its log says that it was removed", 60)[0]
    assert f"certificate {old} of n1 was revoked" in words
    assert "`llmgw ctl node token n1 --replace` and `llmgw agent join` let a machine in by that name again" in words
    assert lab.get("nodes") == []
    joined = machine.join(token_for(lab, "n1", "--replace"))
    assert joined.returncode == 0, joined.stderr
    assert "where it runs already it takes the certificate up by itself" in joined.stdout
    eventually(machine.connected, "it is back, and nobody has restarted it", 60)
    assert agent.popen.poll() is None
    assert len(said()) == 1, "said once, however often it was turned away"
    after = lab.ready()
    assert after["id"] != before["id"]
    eventually(lambda: not any(map(alive, before["pids"])), "what nobody wants any more ends", 30)
    assert ask(lab, key).status_code == 200


def test_a_node_that_lost_its_only_key_is_told_how_to_get_another(lasting: Lab) -> None:
    lab = lasting
    machine = become_a_node(lab, "n4")
    agent = machine.start()
    eventually(machine.connected, "it is connected", 60)
    agent.terminate()
    key = machine.pair.folder / "key.pem"
    key.unlink()
    refused = machine.start()
    assert refused.popen.wait(60) == 1
    words = refused.output().splitlines()[-1]
    named = machine.folder / "etc" / "agent-key.pem"
    assert words.startswith(f"the key {named} leads to {key}, which does not exist")
    assert "`llmgw ctl node token n4 --replace` and then `llmgw agent join` here" in words
    joined = machine.join(token_for(lab, "n4", "--replace"))
    assert joined.returncode == 0, joined.stderr
    machine.start()
    eventually(machine.connected, "it is back", 60)


def test_kills_at_any_moment_of_a_renewal_lock_no_node_out(lasting: Lab) -> None:
    lab = lasting
    machine = become_a_node(lab, "n1")
    rng = random.Random(3)
    issued = len(lab.events("certificate.issued"))
    for _ in range(4):
        agent = machine.start()
        eventually(machine.connected, "it is connected", 60)
        with lab.admin() as client:
            client.post("certificates/n1/renew")
        # A renewal takes some hundredths of a second: before, amid or after it.
        threading.Event().wait(rng.uniform(0.0, 0.15))
        agent.kill()
        eventually(lambda: not machine.connected(), "it is gone", 30)
    machine.start()
    eventually(machine.connected, "it is connected after all", 60)
    assert len(lab.events("certificate.issued")) > issued
    assert lab.events("certificate.copied") == []


def test_a_token_lets_one_machine_in(lasting: Lab) -> None:
    lab = lasting
    token = token_for(lab, "n2", "--label", "rack=a1")
    machine, other = Machine(lab, "n2"), Machine(lab, "n2-copy")
    first = machine.join(token)
    assert first.returncode == 0, first.stderr
    assert "rack" in machine.file.read_text()
    again = machine.join(token)
    assert again.returncode == 0, again.stderr
    second = other.join(token)
    assert second.returncode == 1
    assert "was used" in second.stderr
    assert not other.file.exists()
    assert token not in first.stdout + first.stderr + second.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another machine-id is bound over this machine's, which takes root")
def test_of_two_machines_from_one_disk_image_the_second_is_refused_and_the_first_undisturbed(lasting: Lab) -> None:
    """The second has all of the first one's disk, in the same places; only its machine-id is its own."""
    lab = lasting
    machine = become_a_node(lab, "n3")
    image = lab.root / "image-of-n3"
    shutil.copytree(machine.folder, image, symlinks=True)
    machine.start()
    eventually(machine.connected, "the first is connected", 60)
    own_id = lab.root / "machine-id-of-the-second"
    own_id.write_text(f"{random.Random(5).getrandbits(128):032x}\n")
    binds = f"mount --bind {own_id} /etc/machine-id && mount --bind {image} {machine.folder}"
    log = lab.root / "agent-n3-again.log"
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{binds} && exec "$@"', "sh"]
    argv += [sys.executable, "-m", "llmgw", "agent", "--config", str(machine.file)]
    with log.open("ab") as output:
        popen = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
    second = Proc("agent-n3-again", popen, log)
    lab.procs.append(second)

    def of_n3() -> list[dict[str, Any]]:
        return [each for each in lab.events("peer.refused") if each["subject"] == "n3"]

    event = eventually(of_n3, "the second is refused", 60)[-1]
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", event["words"]))) == 2
    assert "llmgw ctl node token NAME" in event["words"]
    eventually(lambda: "is connected already, from another machine at 127.0.0.1:" in second.output(), "it is told", 30)
    assert "`llmgw agent join` here" in second.output()
    assert machine.connected()
    assert lab.events("certificate.copied") == []
    assert "n3" not in {each["subject"] for each in lab.events("node.suspect")}
    second.kill()
