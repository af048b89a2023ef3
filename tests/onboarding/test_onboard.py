"""Machines that become nodes over real ssh, and those that can't."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from llmgw.onboarding import scripts
from llmgw.pki.authority import Authority
from tests.cluster.lab import Lab, eventually
from tests.onboarding.nodes import NO_RELEASE, USER, Fresh, as_version, fresh

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: containers"),
    pytest.mark.timeout(240),
]

CHECKOUT = Path(__file__).parents[2]
FILES = {
    "etc/llmgw": (0o755, "directory"),
    "etc/llmgw/agent.yaml": (0o644, "file"),
    "etc/systemd/system/llmgw-agent.service": (0o644, "file"),
    "usr/local/bin/llmgw": (0o755, "file"),
    "usr/local/share/ca-certificates/llmgw-ca.crt": (0o644, "file"),
}
LINKS = {"ca.pem": 0o644, "agent.pem": 0o644, "agent-key.pem": 0o600}
"""Below /etc/llmgw, and the mode of what each leads to."""
TEE = """\
#!/bin/bash
# What goes over ssh, both ways, beside what is done.
tee -a "$WIRE" | {ssh} "$@" | tee -a "$WIRE"
exit "${{PIPESTATUS[1]}}"
"""


@dataclass
class Site:
    """A control plane here, and a machine that is to be one of its nodes."""

    lab: Lab
    fresh: Fresh
    binary: Path

    def command(self, *more: str, node: str = "node01", server: str | None = None, wait: str = "20") -> list[str]:
        command = [sys.executable, "-m", "llmgw", "node", "onboard", "--node", node, "--addr", self.fresh.address]
        command += ["--server", server or self.server, "--pki", str(self.lab.root / "pki"), "--wait", wait]
        return [*command, "--binary", str(self.binary), *self.fresh.login, *more]

    def run(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        stated = self.environment() | (env or {})
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=stated, stdin=subprocess.DEVNULL
        )

    def environment(self) -> dict[str, str]:
        context = self.lab.context()
        return os.environ | {"LLMGW_SERVER": context.server, "LLMGW_TOKEN": context.token}

    def onboard(self, *more: str, **options: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.command(*more, **options))

    def refused(self, *more: str, **options: str) -> str:
        """What it says at its end, of a machine that did not become a node: the words, and the command to look with."""
        done = self.onboard(*more, **options)
        assert done.returncode == 1, done.stdout
        assert "\nlook with: " in done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """One that runs meanwhile, in a process group of its own."""
        with subprocess.Popen(
            self.command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self.environment(),
            start_new_session=True,
        ) as process:
            yield process

    def another_binary(self) -> None:
        """The same llmgw in other bytes: it is not there yet."""
        self.binary.write_text(as_version(NO_RELEASE, f"# {secrets.token_hex(8)}"))

    def half_made(self) -> list[Path]:
        return [*self.there("usr/local/bin").glob(".llmgw*"), *self.there("etc/llmgw").glob("*.partial")]

    @property
    def server(self) -> str:
        return f"https://{self.fresh.here}:{self.lab.ports['agents']}"

    def listed(self) -> list[str]:
        return [node["id"] for node in self.lab.get("nodes") if node["connected"]]

    def there(self, path: str) -> Path:
        return self.fresh.root / path

    def tree(self) -> dict[str, str]:
        """What onboarding made there, by its content; the identity apart."""
        paths = [self.there(path) for path, (_, kind) in FILES.items() if kind == "file"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def call(self, *command: str) -> None:
        done = self.fresh.node.call(*command)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with fresh("node01") as machine:
        lab = Lab.make(agents_host="0.0.0.0")
        pki = lab.root / "pki"
        Authority.load(pki).issue_server([machine.here], pki, "head", renew=True)
        text = lab.server_file.read_text()
        lab.server_file.write_text(text.replace("https://127.0.0.1", f"https://{machine.here}"))
        binary = lab.root / "llmgw"
        binary.write_text(as_version(NO_RELEASE))
        binary.chmod(0o755)
        try:
            lab.server()
            yield Site(lab, machine, binary)
        finally:
            lab.close()


# -- what is wrong with a machine is said before anything is made there: none of these has left anything when a machine
# becomes a node below


def test_a_user_without_sudo(site: Site) -> None:
    file = site.there(f"etc/sudoers.d/{USER}")
    text = file.read_text()
    file.unlink()
    try:
        said = site.refused()
    finally:
        file.write_text(text)
        file.chmod(0o440)
    assert f"{USER} can't become root on {site.fresh.address}: sudo: a password is required" in said
    assert f"`{USER} ALL=(ALL) NOPASSWD:ALL`" in said


def test_a_clock_that_is_wrong(site: Site) -> None:
    """The clock is the kernel's, which both share: the program that tells it is not."""
    date = site.there("usr/local/sbin/date")
    date.write_text('#!/bin/sh\necho $(($(/bin/date "$@") + 600))\n')
    date.chmod(0o755)
    try:
        said = site.refused()
    finally:
        date.unlink()
    assert re.search(rf"the clock of {site.fresh.address} is (599|60[01]) s ahead of this machine's", said)
    assert "timedatectl set-ntp true" in said


@pytest.mark.parametrize("folder", ["/usr/local", "/var/lib"])
def test_a_full_disk(site: Site, folder: str) -> None:
    site.call("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    try:
        said = site.refused()
    finally:
        site.call("umount", folder)
    assert f"{folder} of {site.fresh.address} has 0 MiB free, and " in said
    assert "are needed: nothing was written" in said
    assert f"df -h {folder}" in said


def test_a_build_for_another_architecture(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "llmgw"
    other.write_text(as_version(NO_RELEASE, "# linux-arm64"))
    other.chmod(0o755)
    said = site.refused("--binary", str(other))
    assert f"{site.fresh.address} is x86_64, and {other} is for aarch64" in said


def test_an_address_that_the_certificate_of_the_server_lacks(site: Site) -> None:
    said = site.refused(server=f"https://127.0.0.1:{site.lab.ports['agents']}")
    assert "127.0.0.1" in said
    assert site.fresh.here in said, "what the certificate does name is said"


def test_a_copy_that_is_cut_off(site: Site) -> None:
    """Less room than the look at it found, since something else wrote meanwhile: nothing half is in place."""
    done = subprocess.run(
        site.fresh.node.inside("sh", "-c", scripts.COPY, "llmgw", "0" * 64),
        input=b"half",
        capture_output=True,
    )
    assert done.returncode == 1
    assert b"it was not installed" in done.stderr
    assert not list(site.there("usr/local/bin").glob("*llmgw*"))


def test_a_disk_that_fills_while_it_is_copied(site: Site, tmp_path: Path) -> None:
    """The look at it found room."""
    content = os.urandom(4 << 20)
    site.call("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/usr/local")
    try:
        done = subprocess.run(
            site.fresh.node.inside("sh", "-c", scripts.COPY, "llmgw", hashlib.sha256(content).hexdigest()),
            input=content,
            capture_output=True,
        )
        assert b"No space left on device" in done.stderr
        assert done.returncode == 1
        assert site.fresh.node.run("find", "/usr/local/bin", "-mindepth", "1") == ""
    finally:
        site.call("umount", "/usr/local")


def test_nothing_was_left_by_any_of_them(site: Site) -> None:
    assert not site.there("etc/llmgw").exists()
    assert not site.there("var/lib/llmgw-agent").exists()
    assert site.lab.get("nodes") == []


# -- a machine becomes a node


def test_a_machine_becomes_a_node_while_its_sshd_starts_anew(site: Site, tmp_path: Path) -> None:
    """/tmp forbids to run anything, sshd refuses for the first seconds, and its key is not known."""
    site.fresh.stop_sshd()
    _forbid_running_in_tmp(site)
    later = threading.Timer(6.0, site.fresh.start_sshd)
    later.start()
    wire, shim = tmp_path / "wire", tmp_path / "bin" / "ssh"
    shim.parent.mkdir()
    shim.write_text(TEE.format(ssh="/usr/bin/ssh"))
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    try:
        done = site.run(site.command(), {"PATH": path, "WIRE": str(wire)})
    finally:
        later.join()
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert site.listed() == ["node01"]
    assert f"is no release: {site.binary} is copied" in done.stdout
    assert len(site.fresh.known_hosts.read_text().splitlines()) == 1
    for name, (mode, kind) in FILES.items():
        found = site.there(name).lstat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, 0, 0), name
        assert stat.S_ISDIR(found.st_mode) == (kind == "directory")
    for name, mode in LINKS.items():
        assert site.there(f"etc/llmgw/{name}").is_symlink()
        said = site.fresh.node.run("stat", "-Lc", "%a %u %g", f"/etc/llmgw/{name}")
        assert said.split() == [f"{mode:o}", "0", "0"], name
    assert sorted(path.name for path in site.there("etc/llmgw").iterdir()) == sorted([*LINKS, "agent.yaml"])
    # Where there is Java, its own store of roots is made by it when the machine's changes.
    left = set(site.fresh.node.run("ls", "/tmp", "--ignore=systemd-private-*", "--ignore=hsperfdata_root").split())
    assert left <= set(CHECKOUT.parts), "something is left in /tmp"
    # The key is in no byte that went over the wire, and not where the authority is.
    key = site.fresh.node.run("cat", "/etc/llmgw/agent-key.pem").split("-----")[2].split()
    assert len(key) > 1
    crossed = wire.read_bytes()
    assert b"BEGIN CERTIFICATE REQUEST" in crossed
    assert b"BEGIN CERTIFICATE-----" in crossed
    assert b"PRIVATE KEY" not in crossed
    for place in (crossed, *(path.read_bytes() for path in (site.lab.root / "pki").rglob("*") if path.is_file())):
        assert not any(line.encode() in place for line in key)


def test_a_second_run_changes_nothing_but_the_certificate(site: Site) -> None:
    before, serial = site.tree(), site.there("var/lib/llmgw-agent/identity/current").readlink()
    (certificate,) = site.lab.get("certificates", node="node01")

    def both() -> dict[str, str] | None:
        found = {each["serial"]: each["state"] for each in site.lab.get("certificates", node="node01")}
        return found if len(found) == 2 else None

    done = site.onboard()
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.tree() == before
    assert done.stdout.count("it is there already") == 1
    assert "it says that already" in done.stdout
    assert site.there("var/lib/llmgw-agent/identity/current").readlink() != serial
    # The one before stays admitted until it is revoked: that is a decision of its own.
    states = eventually(both, "the agent takes the new one up")
    assert states[certificate["serial"]] == "current"


def test_what_the_operator_says_is_written_and_a_named_engine_is_tried(site: Site) -> None:
    broken = site.there("opt/llama-server")
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    done = site.onboard("--mgmt-addr", site.fresh.address, "--llamacpp-bin", "/opt/llama-server")
    assert done.returncode == 0, done.stdout + done.stderr
    text = site.there("etc/llmgw/agent.yaml").read_text()
    assert f'mgmt_addr: "{site.fresh.address}"' in text
    assert 'engines:\n  llamacpp: {bin: "/opt/llama-server"}' in text
    assert "node_id" not in text, "the host name says it"
    assert "warning: llamacpp: /opt/llama-server does not run" in done.stderr
    assert "ldd /opt/llama-server" in done.stderr
    assert "named by you, and not installed by the agent: llamacpp" in done.stdout


def test_what_the_agent_refuses_is_said_in_its_words_and_mended_by_another_run(site: Site) -> None:
    said = site.refused("--fabric", "ib-b")
    assert "the service does not run: fabric ib-b names the adapter mlx5_0, which is not under" in said
    assert site.onboard().returncode == 0
    assert site.listed() == ["node01"]


@contextmanager
def serving(folder: Path, host: str) -> Iterator[tuple[str, list[str]]]:
    """The folder by HTTP; what was asked for is in the list."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer((host, 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_release_is_fetched_by_the_node_itself_and_checked(site: Site, tmp_path: Path) -> None:
    name = "llmgw-v9.8.7-linux-amd64"
    release = tmp_path / "v9.8.7" / name
    release.parent.mkdir()
    release.write_text(as_version("v9.8.7"))
    release.chmod(0o755)
    checksums = release.with_name("checksums.txt")
    before = site.there("usr/local/bin/llmgw").read_bytes()
    with serving(tmp_path, site.fresh.here) as (url, asked):

        def fetch() -> str:
            done = site.fresh.node.call("sh", "-c", scripts.FETCH, "llmgw", f"{url}/v9.8.7", name)
            assert bool(done.returncode) is bool(done.stderr)
            return (done.stdout + done.stderr).splitlines()[-1]

        assert fetch() == f"{url}/v9.8.7/checksums.txt can't be had"
        checksums.write_text(f"{'0' * 64}  llmgw-v9.8.7-linux-arm64\n")
        assert fetch() == f"{url}/v9.8.7/checksums.txt does not name {name}"
        checksums.write_text(f"{'0' * 64}  {name}\n")
        found = hashlib.sha256(release.read_bytes()).hexdigest()
        said = f"{url}/v9.8.7/{name} has sha256 {found}, and checksums.txt beside it says {'0' * 64}"
        assert fetch() == f"{said}: it was not installed"
        assert site.there("usr/local/bin/llmgw").read_bytes() == before
        checksums.write_text(f"{found} *{name}\n")
        done = site.onboard("--binary", str(release), "--releases", url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert site.there("usr/local/bin/llmgw").read_bytes() == release.read_bytes()
        asked.clear()
        assert fetch() == "unchanged"
        assert asked == ["/v9.8.7/checksums.txt"]
    assert not list(site.there("usr/local/bin").glob(".llmgw*"))


def test_two_that_onboard_one_machine_at_once(site: Site) -> None:
    """One makes it a node. So does the other, unless the key had its certificate by then: it says so."""
    site.another_binary()
    with site.started() as one, site.started() as other:
        said = {process: process.communicate(timeout=120)[0] for process in (one, other)}
    failed = [text for process, text in said.items() if process.returncode]
    assert len(failed) < 2, "\n".join(failed)
    assert all("no key waits for a certificate" in text and "it has one by now" in text for text in failed), failed
    assert site.listed() == ["node01"]
    assert site.there("usr/local/bin/llmgw").read_bytes() == site.binary.read_bytes()
    assert site.half_made() == []


def test_who_waits_for_another_in_vain_is_told_so(site: Site) -> None:
    """It does not wait for ever for one whose end never comes."""
    brief = scripts.COPY.replace("flock -w 60", "flock -w 0")
    assert brief != scripts.COPY
    with subprocess.Popen(
        site.fresh.node.inside("flock", "/run/llmgw-onboarding.lock", "sh", "-c", "echo held; cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = site.fresh.node.call("sh", "-c", brief, "llmgw", "0" * 64)
        holder.communicate()
    assert done.returncode == 1
    assert done.stderr.startswith("another onboarding is at work there")


@pytest.mark.parametrize("step", ["Install llmgw", "Have the node's key signed", "Install and start the service"])
def test_one_that_is_killed_half_way_is_healed_by_the_next(site: Site, step: str) -> None:
    site.another_binary()
    with site.started() as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if step in line), None)
        os.killpg(process.pid, signal.SIGKILL)
    assert line is not None
    eventually(lambda: site.half_made() == [], "what was half made is gone")
    eventually(lambda: site.listed() == ["node01"], "what served there goes on")
    done = site.onboard()
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.listed() == ["node01"]
    assert site.there("usr/local/bin/llmgw").read_bytes() == site.binary.read_bytes()


def test_a_file_that_somebody_else_wrote_is_kept_beside_the_new_one(site: Site) -> None:
    file = site.there("etc/llmgw/agent.yaml")
    theirs = file.read_text().replace("Written by", "Looked after by")
    file.write_text(theirs)
    done = site.onboard()
    assert done.returncode == 0, done.stderr
    assert "is kept as /etc/llmgw/agent.yaml.replaced" in done.stdout
    assert site.there("etc/llmgw/agent.yaml.replaced").read_text() == theirs


def test_a_name_that_is_not_the_host_s_is_written_down(site: Site) -> None:
    done = site.onboard(node="node02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its host name is node01, not node02" in done.stdout
    assert 'node_id: "node02"' in site.there("etc/llmgw/agent.yaml").read_text()
    assert site.listed() == ["node02"]


def test_a_host_key_that_has_changed(site: Site) -> None:
    site.fresh.host_key()
    said = site.refused()
    assert f"{site.fresh.address} shows another host key than the one that is known of it" in said
    assert "Nothing was sent to it" in said
    assert f"`ssh-keygen -R {site.fresh.address}` forgets the old key" in said


def test_a_machine_that_does_not_answer(site: Site) -> None:
    site.fresh.stop_sshd()
    said = site.refused(wait="1")
    assert f"cannot reach {USER}@{site.fresh.address} over ssh after 1s: " in said
    assert "Connection refused" in said


def _forbid_running_in_tmp(site: Site) -> None:
    """Where this checkout lies in /tmp, the one below it is let be."""
    site.call("mkdir", "-p", "/run/checkout")
    site.call("mount", "--bind", str(CHECKOUT), "/run/checkout")
    site.call("mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "tmpfs", "/tmp")
    if CHECKOUT.is_relative_to("/tmp"):
        site.call("mkdir", "-p", str(CHECKOUT))
        site.call("mount", "--bind", "/run/checkout", str(CHECKOUT))
