"""Engines' ports answer gateways and the other ranks of their replica, and nobody else on the network."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cluster.lab import eventually
from tests.cluster.net.lab import TWO_NODES, NetLab
from tests.cluster.net.machine import Machine
from tests.cluster.streams import ask

NODES = ("node01", "node02", "node03")


def dial(machine: Machine, address: str, port: int) -> str:
    """Empty once connected; else what the machine that dials sees of it."""
    words = f"exec 3<>/dev/tcp/{address}/{port}"
    ended = subprocess.run(machine.command("timeout", "5", "bash", "-c", words), capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stderr.strip().rpartition(": ")[2] or "no answer"


def refused(address: str, port: int) -> None:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return
    raise AssertionError(f"a stranger reached {address}:{port}")


def test_strangers_do_not_get_through(build: Callable[..., NetLab]) -> None:
    lab = build(TWO_NODES)
    for name in NODES:
        lab.node(name, fabric="ib-a")
    wanted = lab.without_models()
    lab.server()
    agents = {name: lab.agent(name) for name in NODES}
    lab.with_models(wanted)
    replica, key = lab.ready("wide"), lab.key()
    leader, worker = (lab.machines[place["node"]] for place in replica["placements"])
    (outsider,) = (lab.machines[name] for name in NODES if lab.machines[name] not in (leader, worker))
    address, _, text = replica["endpoint"].rpartition(":")
    port = int(text)
    meeting = int(replica["dist_init"].rpartition(":")[2])
    assert {port, meeting} <= leader.listening()

    def guarded() -> None:
        assert ask(lab, key, model="wide").status_code == 200
        assert dial(lab.head, address, port) == ""
        assert dial(worker, address, meeting) == ""
        assert dial(outsider, address, port) == "Connection refused"
        assert dial(outsider, address, meeting) == "Connection refused"
        refused(address, port)

    guarded()
    agent = agents[leader.name]
    agent.kill()
    guarded()
    agents[leader.name] = lab.agent(leader.name)
    leader.run("nft", "delete", "table", "inet", f"llmgw-{leader.name}")
    eventually(lambda: f"llmgw-{leader.name}" in leader.run("nft", "list", "tables"), "it guards its ports again")
    eventually(lambda: [node["state"] for node in lab.get("nodes")] == ["ready"] * 3, "its agent is back")
    guarded()
    assert all(not node["inventory"]["warnings"] for node in lab.get("nodes")), "nobody says that engines are open"


def test_no_key_stands_in_a_command_line(build: Callable[..., NetLab]) -> None:
    lab = build(TWO_NODES)
    for name in NODES[:2]:
        lab.node(name, fabric="ib-a")
    lab.server()
    for name in NODES[:2]:
        lab.agent(name)
    replica = lab.ready("wide")
    leader = lab.machines[replica["placements"][0]["node"]]
    (remembered,) = (leader.folder / "work" / "wanted").glob("*.json")
    key = remembered.read_text().partition('"api_key":"')[2].partition('"')[0]
    assert len(key) > 20
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in leader.pids()]
    assert any("llmgw.simulator" in line for line in lines)
    assert not [line for line in lines if key in line]
