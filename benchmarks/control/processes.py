"""The processes of one run: a real ``llmgw server`` on one core, the crowd of agents on another, and their files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from crowd import agent_id
from readings import pin

from llmgw.client import AdminClient, AdminError, Context
from llmgw.pki.authority import Authority
from llmgw.process.identity import Identity, send_signal

HERE = Path(__file__).parent
CLUSTER = "bench"
MODEL = "bench-sim"
IDLE = f"  - {{name: {MODEL}, replicas: 0, profiles: [{{engine: sim, memory: 32MiB}}]}}\n"
"""Models as in the server's file: one that nobody wants yet."""


def make_pki(directory: Path, agents: int) -> None:
    """An authority, a server's certificate, and one certificate for each agent."""
    authority = Authority.create(directory, cluster=CLUSTER)
    authority.issue_server(["127.0.0.1", "localhost"], directory, "head")
    for number in range(agents):
        authority.issue_client(agent_id(number), directory)


def quick_directory() -> Path:
    """For certificates: in memory where there is such a place, since each file is synced to the disk otherwise."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="llmgw-bench-pki-", dir=memory if os.access(memory, os.W_OK) else None))


def free_ports(*names: str) -> dict[str, int]:
    """A port for each name. All are held at once while they are looked for: one that was let go may come again."""
    with ExitStack() as held:
        probes = {name: held.enter_context(socket.socket()) for name in names}
        for probe in probes.values():
            probe.bind(("127.0.0.1", 0))
        return {name: int(probe.getsockname()[1]) for name, probe in probes.items()}


class Server:
    """A control plane with an empty store, answering. ``cores``: the first is its own, the other its gateway's."""

    def __init__(self, pki: Path, *, cores: tuple[int, int] | None = None, models: str = IDLE) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="llmgw-bench-"))
        self.ports = free_ports("gateway", "admin", "agents", "metrics")
        self._log = (self.root / "server.log").open("wb")
        self._popen: subprocess.Popen[bytes] | None = None
        self.pki = pki
        self._cores = cores
        self._models = models

    def start(self, argv: tuple[str, ...] = (sys.executable, "-m", "llmgw")) -> None:
        config = self.root / "server.yaml"
        config.write_text(self._config())
        cores = self._cores
        self._popen = subprocess.Popen(
            [*argv, "server", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=cores and (lambda: os.sched_setaffinity(0, {cores[0]})),
        )
        deadline = time.monotonic() + 60
        while not self._settled():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the control plane does not come up:\n{self.log()}")
            time.sleep(0.1)
        if cores is not None:
            for identity in self._outliving():
                pin(identity.pid, cores[1])

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports['agents']}/v1/stream"

    def admin(self) -> AdminClient:
        token = (self.root / "state" / "admin-token").read_text().strip()
        return AdminClient(Context(f"http://127.0.0.1:{self.ports['admin']}", token), timeout_s=60)

    def log(self) -> str:
        return (self.root / "server.log").read_text(errors="replace")[-4000:]

    def stop(self, *, keep: bool = False) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(20)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        for identity in self._outliving():
            send_signal(identity, signal.SIGKILL)
        self._log.close()
        if not keep:
            shutil.rmtree(self.root)

    def _settled(self) -> bool:
        try:
            with self.admin() as client:
                return bool(client.get("status")["gateways"])
        except (AdminError, OSError):
            return False

    def _outliving(self) -> list[Identity]:
        """The gateway that the control plane keeps beside it, engines if there are any, and each one's reaper."""
        found = []
        for record in self.root.rglob("record.json"):
            told = json.loads(record.read_text())
            found += [Identity.from_json(told[who]) for who in ("reaper", "program")]
        return found

    def _config(self) -> str:
        listen = "".join(f"  {name}: 127.0.0.1:{port}\n" for name, port in self.ports.items())
        return (
            f"cluster: {CLUSTER}\nlisten:\n{listen}"
            f'advertise: ["https://127.0.0.1:{self.ports["agents"]}"]\n'
            f"tls: {{ca: {self.pki}/ca.pem, cert: {self.pki}/server.pem, key: {self.pki}/server-key.pem}}\n"
            f"store: sqlite:///{self.root}/state/llmgw.db\nengines: {{}}\nmodels:\n{self._models}"
        )


class Crowd:
    """N agents in a process of their own."""

    def __init__(self, agents: int, pki: Path, url: str, *, within_s: float, core: int) -> None:
        argv = (sys.executable, str(HERE / "crowd.py"))
        self._popen = subprocess.Popen(
            [*argv, "--agents", str(agents), "--pki", str(pki), "--url", url, "--within", str(within_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        self._read()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def connect(self) -> None:
        self._write("connect")

    def report(self) -> dict[str, Any]:
        """What the registrations took, once all have been welcomed."""
        return self._read()

    def last_report(self) -> dict[str, Any]:
        """The same at the end, with all that broke meanwhile. Disconnects everyone."""
        self._write("end")
        told = self._read()
        self._popen.communicate()
        return told

    def stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.communicate()

    def _write(self, line: str) -> None:
        stdin = self._popen.stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def _read(self) -> dict[str, Any]:
        stdout: IO[bytes] | None = self._popen.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the agents' process ended with status {self._popen.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told
