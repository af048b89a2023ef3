"""Processes that stand still and do not end (a paused machine, a debugger, a disk that hangs): nothing is closed, and
nothing answers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx2

from tests.cluster.lab import SIM, Lab, Proc, eventually
from tests.cluster.streams import ask, start_streams

SUSPECT_S, LOST_S = 1.0, 5.0
QUICK = f"nodes: {{suspect_after: {SUSPECT_S:g}s, lost_after: {LOST_S:g}s}}\n"
SIMULATED = SIM.replace("5ms", "25ms")
TOKENS = 400
"""At 25 ms each they come for longer than anybody stands still here."""
BEATS = "heartbeat_interval: 500ms\n"


class Pair:
    """Two nodes, each with a replica."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.server = lab.server()
        self.agents: dict[str, Proc] = {}
        for number in (1, 2):
            name = f"n{number}"
            self.agents[name] = lab.agent(name, f"{BEATS}mgmt_addr: 127.0.0.{number}\n")
            eventually(lambda name=name: self.nodes().get(name) == "ready", f"{name} is ready", 40)
        lab.ready()  # its place is taken: the other goes to the other node
        with lab.admin() as client:
            client.put("models/sim/scale", {"replicas": 2})
        self.key = lab.key()

    def nodes(self) -> dict[str, str]:
        return {node["id"]: node["state"] for node in self.lab.get("nodes")}

    def by_node(self) -> dict[str, dict[str, Any]]:
        """The ready replicas, by the node that each is on, once there is one on each."""

        def check() -> dict[str, dict[str, Any]] | None:
            ready = [found for found in self.lab.get("replicas") if found["state"] == "ready"]
            found = {found["placements"][0]["node"]: found for found in ready}
            return found if len(ready) == len(self.lab.get("replicas")) == 2 == len(found) else None

        found = eventually(check, "a replica is ready on each node", 60)
        self.lab.ready()  # and the gateway has been told
        return found


def test_neither_a_control_plane_nor_a_node_that_stands_still_is_waited_for() -> None:
    lab = Lab.make(SIMULATED, extra=QUICK)
    try:
        pair = Pair(lab)
        the_control_plane_stands_still_for_longer_than_nodes_may_be_silent(pair)
        a_node_hangs_and_gets_no_more_requests_from_the_moment_it_is_suspect(pair)
    finally:
        lab.close()


def patient(lab: Lab, lost_s: float) -> None:
    """From now on nodes may be silent for so long before they are lost."""
    lab.write_server(SIMULATED, QUICK.replace(f"{LOST_S:g}s", f"{lost_s:g}s"))
    with lab.admin() as client:
        client.post("reload")


def the_control_plane_stands_still_for_longer_than_nodes_may_be_silent(pair: Pair) -> None:
    """When it goes on it has lost nobody: streams went on, and each replica is the process that it was."""
    lab, before = pair.lab, pair.by_node()
    seen = len(lab.events())
    streams = start_streams(lab, pair.key, 4, tokens=TOKENS)
    pair.server.popen.send_signal(signal.SIGSTOP)
    try:
        stands_until = time.monotonic() + 1.5 * LOST_S
        assert ask(lab, pair.key).status_code == 200
        eventually(lambda: time.monotonic() > stands_until, "it stood for long", 4 * LOST_S)
    finally:
        pair.server.popen.send_signal(signal.SIGCONT)
    eventually(lambda: lab.events("control.stalled"), "it says that it stood still", 20)
    for stream in streams:
        stream.join()
        assert (stream.error, stream.done, stream.tokens) == ("", True, TOKENS)
    eventually(lambda: pair.nodes() == {"n1": "ready", "n2": "ready"}, "both nodes are ready", 20)
    after = pair.by_node()
    assert {node: (found["id"], found["pids"], found["restarts"]) for node, found in after.items()} == {
        node: (found["id"], found["pids"], found["restarts"]) for node, found in before.items()
    }
    new = [event["kind"] for event in lab.events()[seen:]]
    assert not [kind for kind in new if kind in ("node.lost", "replica.failed", "replica.created", "node.brake")], new


def taken(replica: dict[str, Any]) -> int:
    """Requests that the replica's engine has begun to work on since it started."""
    return int(httpx2.get(f"http://{replica['endpoint']}/sim/stats", timeout=20, trust_env=False).json()["requests"])


def a_node_hangs_and_gets_no_more_requests_from_the_moment_it_is_suspect(pair: Pair) -> None:
    """Agent and engine stand still while their connections stay open: requests must not run into a time limit one by
    one until the node is called lost."""
    lab, hung = pair.lab, pair.by_node()["n2"]
    patient(lab, 300)
    agent, engine = pair.agents["n2"].pid, hung["pids"][0]
    os.kill(agent, signal.SIGSTOP)
    try:
        had = taken(hung)
        os.kill(engine, signal.SIGSTOP)
        eventually(lambda: pair.nodes()["n2"] != "ready", "its silence is seen", 20)
        told = lab.get("status")["table_version"]
        eventually(lambda: all(gate["table_acked"] >= told for gate in lab.get("status")["gateways"]), "it is told")
        assert [ask(lab, pair.key, timeout_s=20).status_code for _ in range(10)] == [200] * 10
        os.kill(engine, signal.SIGCONT)
        assert taken(hung) == had, "nothing was sent to it meanwhile"
        assert pair.nodes()["n2"] == "suspect"
        patient(lab, LOST_S)
        eventually(lambda: pair.nodes()["n2"] == "lost", "it is lost", 20)
    finally:
        for pid in (agent, engine):
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: pair.nodes()["n2"] == "ready", "it is back", 30)
    two = ["ready", "ready"]
    eventually(lambda: [found["state"] for found in lab.get("replicas")] == two, "two replicas are left", 60)
    assert ask(lab, pair.key).status_code == 200
