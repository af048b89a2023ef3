"""The agent as a service, on a machine where systemd runs: from its installation until nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from llmgw.agent.service import UNIT, UNIT_FILE, unit
from tests.agent.booted import Node, booted
from tests.cluster.lab import Lab, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: containers")

BINARY = Path("/usr/local/bin/llmgw")
FOR_SERVICES_ALONE = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID", "JOURNAL_STREAM"}
NOT_OURS = ("var/log/", "var/lib/systemd/", "run/", "tmp/systemd-private", "etc/machine-id", "etc/tmpfiles.d")
USERS = ("etc/passwd", "etc/shadow", "etc/group", "etc/gshadow", "etc/subuid", "etc/subgid", "etc/.pwd.lock")


class Service:
    """The node, and its service as `systemctl show` tells it."""

    def __init__(self, node: Node, lab: Lab, config: Path) -> None:
        self.node = node
        self.lab = lab
        self.config = config

    def show(self, name: str) -> str:
        return self.node.run("systemctl", "show", UNIT, f"--property={name}", "--value").strip()

    def pid(self) -> int:
        return int(self.show("MainPID") or 0)

    def llmgw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.node.call(str(BINARY), *arguments)

    def install(self, *more: str) -> list[str]:
        done = self.llmgw("agent", "install", "--config", str(self.config), *more)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def says(self, words: str) -> None:
        eventually(lambda: words in self.show("StatusText"), f"status {words!r}; now {self.show('StatusText')!r}")

    def has_another_pid_than(self, pid: int) -> None:
        eventually(lambda: self.pid() not in (0, pid) and self.show("ActiveState") == "active", "another agent runs")

    def lab_shard(self) -> str:
        (folder,) = (self.work_dir / "processes").iterdir()
        return unquote(folder.name)

    def engine(self) -> int:
        """The pid of the one engine, within the node."""
        (record,) = eventually(lambda: list(self.work_dir.glob("processes/*/*/record/record.json")), "an engine")
        return int(json.loads(record.read_text())["program"]["pid"])

    @property
    def work_dir(self) -> Path:
        return self.node.root / self.lab.root.relative_to("/") / "n1/work"

    def engines(self) -> list[str]:
        said = self.node.run("systemctl", "list-units", "--plain", "--no-legend", "--state=active", "llmgw-shard-*")
        return [line.split()[0] for line in said.splitlines()]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    lab = Lab.make()
    config = lab.agent_file("n1")

    def furnish(root: Path) -> None:
        binary = root / BINARY.relative_to("/")
        binary.unlink(missing_ok=True)
        binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmgw "$@"\n')
        binary.chmod(0o755)

    try:
        with booted(tmp_path_factory.mktemp("service"), furnish) as node:
            yield Service(node, lab, config)
    finally:
        shutil.rmtree(lab.root)


@pytest.mark.timeout(300)  # some twenty programs are started, one after the other
def test_a_life(service: Service) -> None:
    before = changed(service.node)

    # What would not start changes nothing; what does not start says why, and is mended by the same command.
    text = service.config.read_text()
    file = service.node.root / service.config.relative_to("/")
    file.write_text(text.replace("server:", "sever:"))
    refused = service.llmgw("agent", "install", "--config", str(service.config))
    assert refused.returncode == 1
    assert "nothing was changed" in refused.stderr
    assert "sever" in refused.stderr
    assert not (service.node.root / UNIT_FILE.relative_to("/")).exists()
    file.write_text(text.replace("n1-key.pem", "lost.pem"))
    failed = service.llmgw("agent", "install", "--config", str(service.config))
    assert failed.returncode == 1
    assert f"wrote {UNIT_FILE}" in failed.stderr
    assert "lost.pem" in failed.stderr
    service.node.run("systemctl", "stop", UNIT)  # it is tried again and again, and would be up before it is asked to be
    file.write_text(text)

    # Started, although there is no control plane.
    said = service.install()
    assert said[0].startswith("started the agent; runs /usr/local/bin/llmgw (llmgw v"), said
    written = service.node.root / UNIT_FILE.relative_to("/")
    assert written.read_text() == unit(BINARY, service.config)
    assert stat.S_IMODE(written.stat().st_mode) == 0o644
    assert service.show("ActiveState") == "active"
    assert service.show("UnitFileState") == "enabled"
    service.says("no control plane reached for ")

    start = ["systemd-run", "--quiet", "--unit=head", "--property=KillMode=process"]
    service.node.run(*start, str(BINARY), "server", "--config", str(service.lab.server_file))
    service.says(f"connected to https://127.0.0.1:{service.lab.ports['agents']}; 1 shard")
    eventually(lambda: len(service.engines()) == 1, "the engine's unit")
    engine = service.engine()
    environment = service.node.run("cat", f"/proc/{engine}/environ").split("\0")
    assert not FOR_SERVICES_ALONE & {variable.partition("=")[0] for variable in environment}
    assert any(variable.startswith("LLMGW_NONCE=") for variable in environment)

    # Again: nothing to do. Anew: the engine goes on, and is adopted.
    pid = service.pid()
    (again,) = service.install()
    assert again.startswith(f"{UNIT} runs since before ({BINARY}, llmgw v")
    assert again.endswith(f", pid {pid}); nothing had changed")
    assert service.pid() == pid
    drop_in = service.node.root / f"etc/systemd/system/{UNIT}.d/quick.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=3\nRestartSec=100ms\n")
    assert service.install()[0].startswith(
        "started the agent anew (its engines went on): a drop-in of its unit had changed; "
    )
    assert service.pid() not in (0, pid)
    adopted(service, engine)

    # A frozen agent is killed, and its successor adopts.
    pid = eventually(service.pid, "it runs")
    service.node.run("kill", f"-{signal.SIGSTOP.value}", str(pid))
    service.has_another_pid_than(pid)
    journal = service.node.run("journalctl", f"--unit={UNIT}", "--output=cat", "--no-pager")
    assert "Watchdog timeout" in journal
    assert "Thread 0x" in journal  # where its threads stood
    adopted(service, engine)

    # It is not taken away under its engines.
    kept = service.llmgw("agent", "uninstall")
    assert kept.returncode == 1
    assert "nothing was changed: 1 engine runs here" in kept.stderr
    assert f"pid {engine}, {service.engines()[0]}" in kept.stderr
    assert service.show("ActiveState") == "active"

    # It is taken away without them, and put back, by a command that looks for the same file.
    left = service.llmgw("agent", "uninstall", "--leave-engines")
    assert left.returncode == 0, left.stderr
    assert (
        f"still running: {service.lab_shard()} (pid {engine}, {service.engines()[0]}); systemctl stop " in left.stdout
    )
    assert service.install()[:2] == [f"wrote {UNIT_FILE}", f"enabled {UNIT}: it starts with the machine"]
    adopted(service, engine)

    gone = service.llmgw("agent", "uninstall", "--stop-engines")
    assert gone.returncode == 0, gone.stderr
    assert service.engines() == []
    assert service.node.call("test", "-e", f"/proc/{engine}").returncode == 1
    assert service.show("LoadState") == "not-found"
    said = gone.stdout.splitlines()
    assert said[:2] == [f"stopped {UNIT}", f"disabled it, and removed {UNIT_FILE}"]
    told = [line.split()[0].rstrip(":") for line in said if line.startswith("  /")]
    assert str(service.config) in told
    drop_in.unlink()
    drop_in.parent.rmdir()
    remains = changed(service.node) - before
    covered = tuple(path.lstrip("/") for path in (*told, str(service.lab.root), *USERS))
    assert "the user llmgw-engine" in gone.stdout
    assert [path for path in sorted(remains) if not path.startswith(covered)] == []


AS_ROOT = r"""
set -e
mkdir -p /root/p/DEBIAN /root/p/usr/bin
printf 'Package: x-su\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n' >/root/p/DEBIAN/control
cp /bin/true /root/p/usr/bin/x-su; chmod 4755 /root/p/usr/bin/x-su
printf '#!/bin/sh\nset -e\nuseradd --system x-user\nldconfig\nrunuser -u x-user -- true\n' >/root/p/DEBIAN/postinst
chmod 755 /root/p/DEBIAN/postinst
dpkg-deb --build /root/p /root/p.deb >/dev/null; dpkg --install /root/p.deb >/dev/null; echo package
test -u /usr/bin/x-su; apt-get remove --yes x-su >/dev/null; echo removed
unshare --mount mount -t tmpfs none /mnt; echo mounted
python3 -c 'import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)'; echo netlink
systemd-run --wait --pipe --quiet sh -c 'grep NoNewPrivs /proc/self/status'
"""
"""What an agent does, or has done, in its own unit: as package managers, trials of engines, packet filters and units
need it."""


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
def test_hardening_leaves_the_agent_what_it_needs(service: Service) -> None:
    not_here = ("Exec", "Type=", "Notify", "Restart", "Watchdog", "StateDirectory", "Timeout", "KillMode", "Limit")
    lines = unit(BINARY, service.config).split("[Service]\n")[1].split("[Install]")[0].splitlines()
    settings = [line for line in lines if line and not line.startswith(("#", *not_here)) and "=" in line]
    assert "NoNewPrivileges=yes" in settings
    properties = [f"--property={line}" for line in settings]
    done = service.node.call("systemd-run", "--wait", "--pipe", "--quiet", *properties, "sh", "-c", AS_ROOT)
    said = done.stdout.splitlines()
    assert said[:-1] == ["package", "removed", "mounted", "netlink"], done.stderr
    assert said[-1].split() == ["NoNewPrivs:", "0"]  # units that it starts inherit nothing


def adopted(service: Service, engine: int) -> None:
    service.says("connected to https://127.0.0.1")
    service.says("; 1 shard")
    assert service.engine() == engine
    assert service.node.call("test", "-e", f"/proc/{engine}").returncode == 0


def changed(node: Node) -> set[str]:
    """Files of the node that are not those of the machine below it, caches of compiled Python aside."""
    found = {str(path.relative_to(node.upper)) for path in node.upper.rglob("*") if not path.is_dir()}
    return {path for path in found if not path.startswith(NOT_OURS) and "__pycache__" not in path}
