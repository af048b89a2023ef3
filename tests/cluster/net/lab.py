"""A cluster of machines on a network of their own: a control plane on one, agents on the others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.client import Context
from llmgw.pki.authority import Authority
from tests.cluster.lab import Lab, Proc, eventually
from tests.cluster.net.hardware import write_adapters, write_gpus
from tests.cluster.net.machine import Machine, Switch, children

PORTS = {"gateway": 8080, "admin": 8081, "agents": 7443, "metrics": 9464}

TWO_NODES = """\
models:
  - name: wide
    profiles:
      - {engine: sim, nodes: 2, gpus_per_node: 4, sim: {token_interval: 5ms}}
"""


@dataclass
class Inside(Proc):
    """A process on a machine. ``popen`` is what let it in; signals go to the process itself."""

    machine: Machine | None = None
    inner: int = 0

    @property
    def pid(self) -> int:
        return self.inner

    def signal(self, number: int) -> None:
        os.kill(self.inner, number)

    def kill(self) -> None:
        self.signal(9)
        self.popen.wait(20)

    def terminate(self, within_s: float = 20.0) -> int:
        self.signal(15)
        return self.popen.wait(within_s)


@dataclass
class NetLab(Lab):
    switch: Switch | None = None
    machines: dict[str, Machine] = field(default_factory=dict)

    @classmethod
    def build(cls, models: str = TWO_NODES, *, extra: str = "") -> NetLab:
        """The switch and the head; ``node`` adds more."""
        root = Path(tempfile.mkdtemp(prefix="llmgw-net-"))
        root.chmod(0o755)
        lab = cls(root, dict(PORTS), switch=Switch.make())
        assert lab.switch is not None
        head = lab._add("head", 1)
        authority = Authority.create(root / "pki", cluster="lab")
        authority.issue_server([head.address, lab.switch.address, "localhost"], root / "pki", "head")
        lab.write_server(models, extra)
        return lab

    @property
    def head(self) -> Machine:
        return self.machines["head"]

    def _add(self, name: str, number: int) -> Machine:
        assert self.switch is not None
        machine = Machine.make(name, number, self.switch, self.root / name)
        self.machines[name] = machine
        return machine

    def node(
        self, name: str, *, gpus: int = 8, fabric: str | None = None, extra: str = "", server: str | None = None
    ) -> Machine:
        """A machine with GPUs and, with a fabric, two adapters on it; its agent is not started."""
        machine = self._add(name, 10 + len(self.machines))
        smi = write_gpus(machine.folder, name, gpus) if gpus else ""
        ib_root = write_adapters(machine.folder, len(self.machines), 2 if fabric else 0)
        ib_root.mkdir(exist_ok=True)
        fabrics = f"fabrics: [{{name: {fabric}, hcas: [mlx5_0, mlx5_1]}}]\n" if fabric else ""
        discovery = f"discovery: {{nvidia_smi: '{smi}', ib_root: {ib_root}, prefer_nvml: false}}\n"
        self.write_agent(name, fabrics + discovery + extra, server or f"https://{self.head.address}:7443")
        return machine

    # -- files

    def write_server(self, models: str, extra: str = "") -> None:
        pki, head = self.root / "pki", self.head.address
        self.server_file.write_text(
            f"cluster: lab\nlisten:\n  gateway: {head}:8080\n  admin: {head}:8081\n  agents: {head}:7443\n"
            f"  metrics: 127.0.0.1:9464\n"
            f'advertise: ["https://{head}:7443"]\n'
            f"tls: {{ca: {pki}/ca.pem, cert: {pki}/server.pem, key: {pki}/server-key.pem}}\n"
            f"store: sqlite:///{self.root}/state/llmgw.db\nengines: {{}}\n{extra}{models}"
        )

    def without_models(self) -> str:
        """Takes the models out of the server's file for as long as nodes come in, since the first would get all
        replicas; ``with_models`` takes what this returns."""
        wanted = self.server_file.read_text()
        self.server_file.write_text(wanted.partition("models:")[0] + "models: []\n")
        return wanted

    def with_models(self, wanted: str) -> None:
        """Once all nodes are in, and have said which engines they have."""
        nodes = len(self.machines) - 1
        eventually(lambda: [node["state"] for node in self.get("nodes")] == ["ready"] * nodes, "all nodes are in", 60)
        self.server_file.write_text(wanted)
        with self.admin() as client:
            client.post("reload")

    def write_agent(self, name: str, extra: str, server: str) -> None:
        """No name and no address in it: what a node can find out, it does."""
        folder = self.machines[name].folder
        Authority.load(self.root / "pki").issue_client(name, folder)
        (folder / "agent.yaml").write_text(
            f"server: {server}\n"
            f"tls: {{ca: {folder}/ca.pem, cert: {folder}/{name}.pem, key: {folder}/{name}-key.pem}}\n"
            f"reconnect_base: 200ms\nreconnect_max: 1s\n"
            f"weights_dir: {folder}/weights\nengines_dir: {folder}/engines\n"
            f"supervisor: {{work_dir: {folder}/work, stop_timeout: 5s, health_interval: 500ms}}\n{extra}"
        )

    # -- processes

    def run_on(self, machine: Machine, name: str, *arguments: str) -> Inside:
        log = self.root / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                machine.command(sys.executable, "-m", "llmgw", *arguments),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        proc = Inside(name, popen, log, machine, children(popen.pid)[0])
        self.procs.append(proc)
        return proc

    def run(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> Proc:
        assert not env
        return self.run_on(self.head, name, *arguments)

    def agent(self, node: str, extra: str = "") -> Inside:
        assert not extra
        machine = self.machines[node]
        return self.run_on(machine, f"agent-{node}", "agent", "--config", str(machine.folder / "agent.yaml"))

    # -- how it is reached from outside

    def context(self) -> Context:
        token = (self.root / "state" / "admin-token").read_text().strip()
        return Context(f"https://{self.head.address}:8081", token, str(self.root / "pki" / "ca.pem"))

    @property
    def endpoint(self) -> str:
        return f"http://{self.head.address}:8080/v1"

    def close(self) -> None:
        for machine in self.machines.values():
            machine.remove()
        for proc in self.procs:
            proc.popen.wait(20)
        if self.switch is not None:
            self.switch.remove()
