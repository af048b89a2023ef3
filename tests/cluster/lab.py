"""A cluster of real processes on loopback: what the tests here drive, kill and start again.

The directory is made beside /tmp's root and readable for all, so that engines can run as their own user.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmgw.client import AdminClient, AdminError, Context
from llmgw.pki.authority import Authority

T = TypeVar("T")

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST = 22000 + _WORKER % 4 * 2000 + os.getppid() % 2 * 1000
ENGINE_PORTS = f"{_FIRST}-{_FIRST + 999}"
"""Of this run's own, and not where agents begin by themselves: a port that another engine holds would count as a
restart."""

SIM = """\
models:
  - name: sim
    aliases: [default]
    profiles:
      - engine: sim
        memory: 32MiB
        sim: {token_interval: 5ms}
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, all different: they are held together while they are chosen."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    return free_ports(1)[0]


def eventually(check: Callable[[], T | bool | None], what: str, within_s: float = 30.0, *, every_s: float = 0.05) -> T:
    """What ``check`` returns once it is true; fails with ``what`` and the last answer when it is not in time."""
    deadline = time.monotonic() + within_s
    tick = threading.Event()
    while True:
        found = check()
        if found:
            return found  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last: {found!r})")
        tick.wait(every_s)


@dataclass
class Proc:
    """A process with its output in a file."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self, within_s: float = 20.0) -> int:
        self.popen.terminate()
        return self.popen.wait(within_s)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Lab:
    root: Path
    ports: dict[str, int] = field(default_factory=dict)
    procs: list[Proc] = field(default_factory=list)
    agents_host: str = "127.0.0.1"

    @classmethod
    def make(cls, models: str = SIM, *, extra: str = "", agents_host: str = "127.0.0.1") -> Lab:
        root = Path(tempfile.mkdtemp(prefix="llmgw-lab-"))
        root.chmod(0o755)
        ports = dict(zip(("gateway", "admin", "agents", "metrics"), free_ports(4), strict=True))
        lab = cls(root, ports, agents_host=agents_host)
        authority = Authority.create(root / "pki", cluster="lab")
        authority.issue_server(["127.0.0.1", "localhost"], root / "pki", "head")
        lab.write_server(models, extra)
        return lab

    # -- files

    @property
    def server_file(self) -> Path:
        return self.root / "server.yaml"

    def write_server(self, models: str, extra: str = "") -> None:
        pki = self.root / "pki"
        self.server_file.write_text(
            f"cluster: lab\nlisten:\n  gateway: 127.0.0.1:{self.ports['gateway']}\n"
            f"  admin: 127.0.0.1:{self.ports['admin']}\n  agents: {self.agents_host}:{self.ports['agents']}\n"
            f"  metrics: 127.0.0.1:{self.ports['metrics']}\n"
            f'advertise: ["https://127.0.0.1:{self.ports["agents"]}"]\n'
            f"tls: {{ca: {pki}/ca.pem, cert: {pki}/server.pem, key: {pki}/server-key.pem}}\n"
            f"store: sqlite:///{self.root}/state/llmgw.db\nengines: {{}}\n{extra}{models}"
        )

    def agent_file(self, node: str, extra: str = "") -> Path:
        folder = self.root / node
        folder.mkdir(exist_ok=True)
        if not (folder / f"{node}.pem").exists():
            Authority.load(self.root / "pki").issue_client(node, folder)
        path = folder / "agent.yaml"
        path.write_text(
            f"server: https://127.0.0.1:{self.ports['agents']}\n"
            f"tls: {{ca: {folder}/ca.pem, cert: {folder}/{node}.pem, key: {folder}/{node}-key.pem}}\n"
            f"node_id: {node}\nports: {ENGINE_PORTS}\nreconnect_base: 200ms\nreconnect_max: 1s\n"
            f"weights_dir: {folder}/weights\nengines_dir: {folder}/engines\n"
            f"supervisor: {{work_dir: {folder}/work, stop_timeout: 5s, health_interval: 500ms}}\n{extra}"
        )
        return path

    # -- processes

    def run(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> Proc:
        log = self.root / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "llmgw", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        proc = Proc(name, popen, log)
        self.procs.append(proc)
        return proc

    def server(self) -> Proc:
        """A control plane, up and answering."""
        proc = self.run("server", "server", "--config", str(self.server_file))
        eventually(lambda: self._answers(proc), "the control plane answers", 40)
        return proc

    def agent(self, node: str, extra: str = "") -> Proc:
        return self.run(f"agent-{node}", "agent", "--config", str(self.agent_file(node, extra)))

    def _answers(self, proc: Proc) -> bool:
        assert proc.popen.poll() is None, f"the control plane ended:\n{proc.output()}"
        try:
            return bool(self.get("status"))
        except (AdminError, OSError):
            return False

    # -- the admin API and the gateway

    def context(self) -> Context:
        token = (self.root / "state" / "admin-token").read_text().strip()
        return Context(f"http://127.0.0.1:{self.ports['admin']}", token)

    def admin(self) -> AdminClient:
        return AdminClient(self.context(), timeout_s=10)

    def get(self, path: str, **params: Any) -> Any:
        with self.admin() as client:
            return client.get(path, **params)

    def key(self, name: str = "test") -> str:
        """A client's key that every gateway knows."""
        with self.admin() as client:
            key = str(client.post("keys", {"name": name})["key"])
        eventually(self._told, "gateways know of the key")
        return key

    def _told(self) -> bool:
        status = self.get("status")
        return bool(status["gateways"]) and all(
            gateway["table_acked"] == status["table_version"] for gateway in status["gateways"]
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['gateway']}/v1"

    def replica(self, model: str = "sim") -> dict[str, Any]:
        """One of the model's replicas: a ready one, if there is any."""
        found = [replica for replica in self.get("replicas") if replica["model"] == model]
        return min(found, key=lambda replica: str(replica["state"]) != "ready", default={})

    def ready(self, model: str = "sim", within_s: float = 60.0, *, every_s: float = 0.05) -> dict[str, Any]:
        """The model's one replica, once it is ready and every gateway has been told."""

        def check() -> dict[str, Any] | None:
            replica = self.replica(model)
            return replica if replica.get("state") == "ready" and self._told() else None

        try:
            return eventually(check, f"{model} is ready", within_s, every_s=every_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.get('replicas'), indent=1)}\n{self.logs()}") from None

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = self.get("events", limit=1000)
        return [event for event in found if kind is None or event["kind"] == kind]

    def gateway_pid(self) -> int:
        for record in (self.root / "state" / "gateway-process").glob("*/record.json"):
            pid = int(json.loads(record.read_text())["program"]["pid"])
            if alive(pid):
                return pid
        raise AssertionError("no gateway runs")

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in self._log_files())

    def _log_files(self) -> list[Path]:
        return sorted([*self.root.glob("*.log"), *(self.root / "state").glob("*.log")])

    # -- the end

    def close(self) -> None:
        """Ends everything that was started, engines and gateway included."""
        for proc in self.procs:
            if proc.popen.poll() is None:
                proc.kill()
        end_all(self.root)


def end_all(root: Path) -> None:
    """Ends what agents and others have started below ``root`` to outlive them."""

    def is_empty() -> bool:
        """Whoever was about to start something when it was killed left a reaper, and no record yet."""
        for record in root.rglob("record.json"):
            for who in ("reaper", "program"):
                _end(json.loads(record.read_text())[who])
        return not any(b"reaper.py\0" + bytes(root) in argv for argv in _command_lines())

    eventually(is_empty, f"nothing runs in {root} any more", 20)


def _command_lines() -> Iterator[bytes]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield file.read_bytes()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _end(who: dict[str, Any]) -> None:
    """With all of its group: a real engine is several processes, and nobody is left to clear up after it."""
    from llmgw.process.identity import Identity
    from llmgw.process.identity import alive as runs

    identity = Identity.from_json(who)
    if runs(identity):
        with suppress(ProcessLookupError):
            os.killpg(identity.pid, signal.SIGKILL)
