"""A node as a network namespace of this machine: its own address on a bridge, its own hostname, its own processes.

Everything that runs on it lies in one PID namespace, so that a power failure is what it is: all gone at once, and not a
packet of farewell, since the cable is cut first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

INIT = """
import os, signal, socket, sys
socket.sethostname(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
print("up", flush=True)
while True:
    signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
"""PID 1 of a machine: takes up orphans and buries them."""


def sh(*command: str) -> str:
    """What the command printed; fails with its words."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr or ended.stdout}"
    return ended.stdout


@dataclass
class Switch:
    """The bridge that machines are plugged into. The tests themselves are on it, as ``address``."""

    name: str
    subnet: str
    """The first three numbers of its addresses."""

    @classmethod
    def make(cls) -> Switch:
        number = os.getpid()
        switch = cls(f"lgw{number % 1_000_000}", f"10.{100 + number // 250 % 100}.{number % 250}")
        sh("ip", "link", "add", switch.name, "type", "bridge")
        sh("ip", "addr", "add", f"{switch.address}/24", "dev", switch.name)
        sh("ip", "link", "set", switch.name, "up")
        return switch

    @property
    def address(self) -> str:
        return f"{self.subnet}.254"

    def remove(self) -> None:
        sh("ip", "link", "del", self.name)


@dataclass
class Machine:
    name: str
    address: str
    switch: Switch
    folder: Path
    """Its disk: what is here survives its power."""
    _init: subprocess.Popen[bytes] | None = None
    _pid_one: int = 0
    _rules: set[str] = field(default_factory=set)

    @classmethod
    def make(cls, name: str, number: int, switch: Switch, folder: Path) -> Machine:
        machine = cls(name, f"{switch.subnet}.{number}", switch, folder)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        sh("ip", "netns", "add", machine.netns)
        sh("ip", "link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", machine.netns)
        sh("ip", "link", "set", machine.port, "master", switch.name, "up")
        for arguments in (
            ("addr", "add", f"{machine.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            sh("ip", "-n", machine.netns, *arguments)
        machine.power_on()
        return machine

    @property
    def netns(self) -> str:
        return f"{self.switch.name}-{self.name}"

    @property
    def port(self) -> str:
        """The switch's end of its cable."""
        return f"{self.switch.name[3:]}p{self.address.rpartition('.')[2]}"

    @property
    def powered(self) -> bool:
        return self._init is not None

    # -- power

    def power_on(self) -> None:
        assert self._init is None, f"{self.name} is on"
        inside = ("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
        with (self.folder / "console.log").open("ab") as console:
            self._init = subprocess.Popen(
                ["ip", "netns", "exec", self.netns, *inside, sys.executable, "-c", INIT, self.name],
                stdout=subprocess.PIPE,
                stderr=console,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"up\n"
        self._pid_one = children(self._init.pid)[0]
        sh("ip", "link", "set", self.port, "up")

    def power_off(self) -> None:
        """The cable first: nobody is told."""
        sh("ip", "link", "set", self.port, "down")
        self._kill()

    def _kill(self) -> None:
        if self._init is None:
            return
        os.kill(self._pid_one, signal.SIGKILL)
        self._init.wait(20)
        assert self._init.stdout is not None
        self._init.stdout.close()
        self._init = None

    def remove(self) -> None:
        self._kill()
        subprocess.run(["ip", "netns", "del", self.netns], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.port], capture_output=True, check=False)

    # -- processes

    def command(self, *command: str) -> Sequence[str]:
        """The command as it is typed on this machine to run on that one."""
        return ("nsenter", "--target", str(self._pid_one), "--net", "--uts", "--pid", "--mount", "--", *command)

    def run(self, *command: str) -> str:
        return sh(*self.command(*command))

    def pids(self) -> list[int]:
        """Of all that runs on it, as this machine numbers them; without its PID 1."""
        found = sh("ip", "netns", "pids", self.netns).split()
        assert self._init is not None
        return [int(pid) for pid in found if int(pid) not in (self._pid_one, self._init.pid)]

    def listening(self) -> set[int]:
        """TCP ports that something on it listens at."""
        lines = self.run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        rows = [line.split() for line in lines if ":" in line and not line.lstrip().startswith("sl")]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}

    # -- its network

    def cut(self, *others: str) -> None:
        """Packets from and to these addresses vanish; without any, all do. Connections notice nothing else."""
        self._filter([f"ip saddr {other} drop" for other in others] or ["drop"], "input")
        self._filter([f"ip daddr {other} drop" for other in others] or ["drop"], "output")

    def lose(self, percent: int) -> None:
        """So many of a hundred packets that arrive are lost."""
        self._filter([f"numgen random mod 100 < {percent} drop"], "input")

    def heal(self) -> None:
        if self._rules:
            self._nft("delete table inet lab")
            self._rules.clear()

    def _filter(self, rules: Sequence[str], hook: str) -> None:
        self._nft("add table inet lab")
        self._nft(f"add chain inet lab {hook} {{ type filter hook {hook} priority 0; }}")
        self._nft(
            f"add rule inet lab {hook} iifname lo accept"
            if hook == "input"
            else f"add rule inet lab {hook} oifname lo accept"
        )
        for rule in rules:
            self._nft(f"add rule inet lab {hook} {rule}")
        self._rules.add(hook)

    def _nft(self, statement: str) -> None:
        sh("ip", "netns", "exec", self.netns, "nft", statement)


def children(pid: int, within_s: float = 10.0) -> list[int]:
    """Of a process that is about to have some."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            raise AssertionError(f"process {pid} has ended") from None
        if found:
            return [int(child) for child in found]
    raise AssertionError(f"process {pid} has no children")
