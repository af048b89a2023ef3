"""Nodes are emptied under load: nobody notices. On a full cluster nothing begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmgw.client import AdminError
from tests.cluster.lab import eventually
from tests.cluster.net.lab import NetLab
from tests.cluster.net.load import Load
from tests.cluster.net.reference import FABRICS, WIDE, Reference, drained, nodes_of

pytestmark = pytest.mark.timeout(240)

NARROW = "  - {name: narrow, profiles: [{engine: sim, gpus_per_node: 2, sim: {token_interval: 20ms}}]}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_over_two_nodes_moves_whole(build: Callable[..., NetLab], rank: int) -> None:
    """Whichever of its nodes is emptied: streams end where they began, and what comes after goes to the replacement."""
    case = Reference.start(build(f"models:\n{WIDE}"))
    victim = next(replica for replica in case.ready(2, 10) if FABRICS[nodes_of(replica)[0]] == "ib-a")
    node = nodes_of(victim)[rank]
    with Load(case.lab, case.key, "wide", clients=8, tokens=100) as load:
        report = drained(case.lab, node)
    assert not load.broken, load.words()
    assert not load.failed, load.words()
    assert [(move["replica"], move["state"], move["broken"]) for move in report["moves"]] == [
        (victim["id"], "moved", 0)
    ]
    assert set(report["moves"][0]["seconds"]) >= {"starting", "shifting", "finishing", "stopping"}
    for replica in case.ready(2, 10):
        assert node not in nodes_of(replica)
    assert case.lab.machines[node].listening() == set()
    with case.lab.admin() as client:
        client.delete(f"nodes/{node}/drain")
    eventually(lambda: state_of(case.lab, node) == "ready", f"{node} is taken back")


def test_a_full_cluster_refuses_before_anything_changes(build: Callable[..., NetLab]) -> None:
    case = Reference.start(build(f"models:\n{WIDE.replace('replicas: 2', 'replicas: 4')}"), replicas=4)
    before = settled(case.lab)
    with case.lab.admin() as client:
        plan = client.post("nodes/node01/drain", {"plan": True})
        assert "free GPUs" in plan["refusal"] or "GPUs free" in plan["refusal"], plan["refusal"]
        with pytest.raises(AdminError) as refused:
            client.post("nodes/node01/drain", {})
    for choice in ("--wait", "--allow-downtime wide", "--force"):
        assert choice in str(refused.value), str(refused.value)
    assert settled(case.lab) == before
    case.served()


def test_a_drained_node_that_loses_its_power_is_shown_lost(build: Callable[..., NetLab]) -> None:
    lab = build(f"models:\n{NARROW}", extra="nodes: {suspect_after: 2s, lost_after: 5s}\n")
    lab.server()
    for name in ("node01", "node02"):
        lab.node(name)
        lab.agent(name)
    node = nodes_of(lab.ready("narrow"))[0]
    drained(lab, node)
    assert state_of(lab, node) == "drained"
    lab.machines[node].power_off()
    eventually(lambda: state_of(lab, node) == "lost", "it is shown lost", 20)
    lab.machines[node].power_on()
    lab.agent(node)
    eventually(lambda: state_of(lab, node) == "drained", "it is drained still, when it is back", 20)
    assert nodes_of(lab.ready("narrow")) != [node]


def state_of(lab: NetLab, node: str) -> str:
    return str(next(found["state"] for found in lab.get("nodes") if found["id"] == node))


def settled(lab: NetLab) -> list[Any]:
    """What must not change by asking: replicas, nodes' states and drains."""
    replicas = [(found["id"], found["generation"], found["state"], found["pids"]) for found in lab.get("replicas")]
    return [replicas, [(node["id"], node["state"]) for node in lab.get("nodes")], lab.get("drains")]
