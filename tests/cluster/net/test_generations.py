"""A generation ends whole, whatever its ranks do, and the next one meets where its nodes are by then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.lab import eventually
from tests.cluster.net.lab import NetLab
from tests.cluster.net.machine import Machine
from tests.cluster.net.reference import nodes_of, simulators
from tests.cluster.streams import ask

pytestmark = pytest.mark.timeout(240)

WIDE = "models: [{name: wide, profiles: [{engine: sim, nodes: 2, gpus_per_node: 4, sim: {token_interval: 5ms}}]}]\n"
NARROW = "models: [{name: narrow, profiles: [{engine: sim, gpus_per_node: 4, sim: {token_interval: 5ms}}]}]\n"
BEATS = "heartbeat_interval: 500ms\n"
GONE_S = 10.0


def two_nodes(lab: NetLab) -> dict[str, Any]:
    """The one replica, ready over both."""
    lab.server()
    for name in ("node01", "node02"):
        lab.node(name, fabric="ib-a", extra=BEATS)
        lab.agent(name)
    return lab.ready("wide", within_s=90)


def rebuilt(lab: NetLab, before: dict[str, Any], within_s: float = 60) -> dict[str, Any]:
    def check() -> bool:
        now = lab.replica("wide")
        return now.get("state") == "ready" and now["generation"] > before["generation"]

    try:
        eventually(check, "the next generation is ready", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{lab.get('replicas')}\n{lab.logs()}") from None
    return lab.ready("wide")


def test_a_rank_that_hangs_goes_with_its_dead_leader(build: Callable[..., NetLab]) -> None:
    """The head is dead and a headless rank would run on for ever, with its GPUs: it hears nothing and says nothing."""
    lab = build(WIDE)
    before = two_nodes(lab)
    leader, worker = (lab.machines[name] for name in nodes_of(before))
    (hung,), (head,) = simulators(worker), simulators(leader)
    os.kill(hung, signal.SIGSTOP)
    os.kill(head, signal.SIGKILL)
    eventually(lambda: hung not in simulators(worker), "the rank that hangs is gone too", GONE_S)
    after = rebuilt(lab, before)
    assert after["restarts"] == 1
    assert [len(simulators(machine)) for machine in (leader, worker)] == [1, 1]
    assert ask(lab, lab.key(), model="wide").status_code == 200


def test_the_addresses_of_nodes_change_under_a_replica(build: Callable[..., NetLab]) -> None:
    """As when a DHCP lease ends: each rank in turn. The ranks can't find each other there any more, and the gateway not
    the leader: the replica is built anew, at the addresses of now."""
    lab = build(WIDE)
    found, key = two_nodes(lab), lab.key()
    addresses = {name: lab.machines[name].address for name in nodes_of(found)}
    for rank in (1, 0):
        name = nodes_of(found)[rank]
        addresses[name] = readdressed(lab.machines[name])
        found = rebuilt(lab, found)
        leader = addresses[nodes_of(found)[0]]
        assert found["endpoint"].startswith(f"{leader}:")
        assert found["dist_init"].startswith(f"{leader}:")
        assert ask(lab, key, model="wide").status_code == 200
        told = {node["id"]: node["inventory"]["mgmt_addr"] for node in lab.get("nodes")}
        assert told == addresses


def readdressed(machine: Machine) -> str:
    """Another address in place of the one it has."""
    head, _, last = machine.address.rpartition(".")
    new = f"{head}.{int(last) + 100}"
    machine.run("ip", "addr", "del", f"{machine.address}/24", "dev", "eth0")
    machine.run("ip", "addr", "add", f"{new}/24", "dev", "eth0")
    return new


def test_an_engine_that_ends_on_a_node_that_is_cut_off_is_not_started_there_again(build: Callable[..., NetLab]) -> None:
    """It was replaced meanwhile. The node that returns starts nothing of its own: one replica there is, and no more."""
    lab = build(NARROW, extra="nodes: {suspect_after: 1s, lost_after: 3s}\n")
    lab.server()
    for name in ("node01", "node02"):
        lab.node(name, extra=BEATS)
        lab.agent(name)
        if name == "node01":
            before = lab.ready("narrow", within_s=90)
    eventually(lambda: [node["state"] for node in lab.get("nodes")] == ["ready", "ready"], "both nodes are in", 60)
    node = lab.machines[nodes_of(before)[0]]
    (engine,) = simulators(node)
    node.cut()
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: not simulators(node), "its engine is gone")
    seen: set[int] = set()

    def returned() -> bool:
        seen.update(simulators(node))
        return {found["id"]: found["state"] for found in lab.get("nodes")}[node.name] == "ready"

    def replaced() -> bool:
        seen.update(simulators(node))
        return lab.replica("narrow").get("state") == "ready" and nodes_of(lab.replica("narrow")) != [node.name]

    eventually(replaced, "it is replaced", 60)
    node.heal()
    eventually(returned, "the node is back", 60)
    eventually(lambda: len(lab.get("replicas")) == 1, "one replica is left", 30)
    seen |= simulators(node)
    assert seen == set(), "something was started on the node that was cut off"
    after = lab.ready("narrow")
    assert (after["generation"], after["restarts"], nodes_of(after) != [node.name]) == (1, 0, True)
    assert ask(lab, lab.key(), model="narrow").status_code == 200
