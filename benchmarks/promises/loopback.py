"""The cluster that is measured: a control plane, a gateway, and agents on loopback that run simulated engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmgw.agent.exposure import find_nft
from llmgw.client import AdminClient

sys.path.append(str(Path(__file__).parents[1] / "control"))

from processes import Server, agent_id, make_pki, quick_directory

POLL_S = 0.002
GIVE_UP_S = 120.0
WIDE_NODES, NARROW_NODE = (0, 1), 2
FIRST_PORT, PORTS_EACH = 14_000, 400
"""Not where agents begin by themselves, and no two alike: they have one address. A replica has a hundred."""
MODELS = """\
  - {name: wide, replicas: 0, profiles: [{engine: sim, nodes: 2, memory: 32MiB, sim: {token_interval: 5ms}}]}
  - {name: narrow, replicas: 0, profiles: [{engine: sim, memory: 32MiB, sim: {token_interval: 5ms},
     node_selector: {runs: narrow}}]}
"""
"""Replicas over two nodes go to those with adapters, the others to the node with the label: the rest have none."""


def until(check: Callable[[], bool], what: str, every_s: float = POLL_S) -> None:
    """Returns once ``check`` is true. Raises RuntimeError with ``what`` where that takes too long."""
    deadline = time.monotonic() + GIVE_UP_S
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {GIVE_UP_S:g} s: {what}")
        time.sleep(every_s)


class LoopbackCluster(Server):
    def __init__(self, pki: Path) -> None:
        super().__init__(pki, models=MODELS)
        self.root.chmod(0o755)  # as root, engines run as a user of their own
        self.agents: list[subprocess.Popen[bytes]] = []
        self.client: AdminClient

    def start_all(self, nodes: int) -> None:
        """Returns once every node is ready."""
        self.start()
        self.client = self.admin()
        for number in range(nodes):
            self._start_agent(number)
        until(lambda: self.client.get("status")["nodes"].get("ready") == nodes, f"{nodes} nodes are ready", every_s=0.1)

    def scale(self, model: str, replicas: int) -> list[dict[str, Any]]:
        """New replicas of the model, ready, once the gateway has been told. Those before, and what they failed, are
        gone: none waits longer for its next start because of an earlier run."""
        self._scale(model, 0)
        return self._scale(model, replicas)

    def _scale(self, model: str, count: int) -> list[dict[str, Any]]:
        self.client.put(f"models/{model}/scale", {"replicas": count})
        until(lambda: self._settled_at(model, count), f"{count} replicas of {model} are ready", every_s=0.05)
        return self._replicas(model)

    def _settled_at(self, model: str, count: int) -> bool:
        status = self.client.get("status")
        told = all(gateway["table_acked"] == status["table_version"] for gateway in status["gateways"])
        return told and [each["state"] for each in self._replicas(model)] == ["ready"] * count

    def _replicas(self, model: str) -> list[dict[str, Any]]:
        return [each for each in self.client.get("replicas") if each["model"] == model]

    def routed(self, replica: str) -> bool:
        """Whether the gateway's table has it: the copy that it writes right after it has taken a table up."""
        return replica in (self.root / "state" / "routes.json").read_text()

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.ports['gateway']}/v1"

    def key(self) -> str:
        return str(self.client.post("keys", {"name": "bench"})["key"])

    def _start_agent(self, number: int) -> None:
        id, first = agent_id(number), FIRST_PORT + number * PORTS_EACH
        folder = self.root / id
        folder.mkdir()
        extra = f"labels: {{runs: {'narrow' if number == NARROW_NODE else 'nothing'}}}\n"
        if number in WIDE_NODES:
            _write_adapter(folder / "infiniband" / "mlx5_0", number)
            extra += f"fabrics: [{{name: ib-a, hcas: [mlx5_0]}}]\ndiscovery: {{ib_root: {folder}/infiniband}}\n"
        (folder / "agent.yaml").write_text(
            f"server: https://127.0.0.1:{self.ports['agents']}\nnode_id: {id}\n"
            f"tls: {{ca: {self.pki}/ca.pem, cert: {self.pki}/{id}.pem, key: {self.pki}/{id}-key.pem}}\n"
            f"ports: {first}-{first + PORTS_EACH - 1}\nweights_dir: {folder}/weights\nengines_dir: {folder}/engines\n"
            f"supervisor: {{work_dir: {folder}/work}}\n{extra}"
        )
        with (folder / "agent.log").open("wb") as log:
            argv = [sys.executable, "-m", "llmgw", "agent", "--config", str(folder / "agent.yaml")]
            self.agents.append(
                subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def stop(self, *, keep: bool = False) -> None:
        """Agents first, in order, so that nothing is being started; then what outlives them."""
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        super().stop(keep=keep)
        if (nft := find_nft()) and os.geteuid() == 0:
            for number in range(len(self.agents)):
                table = f"llmgw-{agent_id(number)}"
                subprocess.run([nft, "delete", "table", "inet", table], capture_output=True, check=False)


@contextmanager
def certificates(count: int) -> Iterator[Path]:
    """A folder with a server's, and with those of ``count`` nodes."""
    place = quick_directory()
    try:
        make_pki(place / "pki", count)
        yield place / "pki"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_adapter(folder: Path, number: int) -> None:
    """An InfiniBand adapter with an active port, as the kernel shows it."""
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    files = {f"ports/1/{name}": text for name, text in port.items()}
    files |= {"ports/1/gids/0": f"fe80:0000:0000:0000:b83f:d203:0000:{number:04x}", "node_type": "1: CA"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
