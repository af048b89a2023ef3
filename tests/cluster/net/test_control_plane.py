"""Control planes that come back to a cluster that has changed meanwhile, or on a bad road to it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from tests.cluster.lab import eventually
from tests.cluster.net.lab import NetLab
from tests.cluster.net.load import Load
from tests.cluster.net.reference import WIDE, Reference, nodes_of, tables
from tests.cluster.net.relay import Relay

pytestmark = pytest.mark.timeout(240)

ONE = WIDE.replace("replicas: 2", "replicas: 1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ended_while_there_was_no_control_plane(build: Callable[..., NetLab], rank: int) -> None:
    """The replica is never ready again, in no table; it is rebuilt whole, as a new generation."""
    case = Reference.start(build(f"models:\n{ONE}"), replicas=1)
    victim = case.ready(1, 10)[0]
    case.server.kill()
    case.kill_rank(victim, rank)
    told_before = len(tables(case.lab))
    case.server = case.lab.server()
    case.ready_elsewhere_or_again(victim, 60)
    rebuilt = case.ready(1, 10)[0]
    assert (rebuilt["id"], rebuilt["generation"]) != (victim["id"], victim["generation"])
    placed = next(event for event in reversed(case.lab.events("replica.placed")))
    ready = [event for event in case.lab.events("replica.ready") if event["id"] > placed["id"]]
    assert len(ready) == 1

    def told() -> datetime | None:
        return next((at for at, replicas in tables(case.lab)[told_before:] if replicas), None)

    # Whoever hears of it late may never have heard that there was none.
    first = eventually(told, "the gateway is told of the replica", 20)
    assert first >= datetime.fromisoformat(placed["at"]), "a table named a replica that had lost a rank"


def test_a_restart_under_streams(build: Callable[..., NetLab]) -> None:
    """A replica over two nodes serves on without a gap, and is the same generation afterwards."""
    case = Reference.start(build(f"models:\n{WIDE}"))
    before = {replica["id"]: replica["pids"] for replica in case.ready(2, 10)}
    with Load(case.lab, case.key, "wide", clients=6, tokens=100) as load:
        case.server.kill()
        case.served()
        case.server = case.lab.server()
        eventually(lambda: all(node["connected"] for node in case.lab.get("nodes")), "all nodes are back")
        after = {replica["id"]: replica["pids"] for replica in case.ready(2, 20)}
    assert after == before
    assert not load.broken, load.words()
    assert not load.failed, load.words()


def test_a_slow_and_lossy_road(build: Callable[..., NetLab]) -> None:
    """A quarter of a second each way and one packet in twenty lost: slower, and nothing else."""
    lab = build(f"models:\n{ONE}")
    lab.server()
    assert lab.switch is not None
    with Relay(lab.switch.address, (lab.head.address, 7443), 0.25) as relay:
        for name in ("node01", "node02"):
            machine = lab.node(name, fabric="ib-a", server=f"https://{lab.switch.address}:{relay.port}")
            machine.lose(5)
            lab.agent(name)
        replica = lab.ready("wide", within_s=90)
        assert nodes_of(replica) == ["node01", "node02"]
        key = lab.key()
        with Load(lab, key, "wide", clients=2, tokens=20) as load:
            pass
        assert not load.broken, load.words()
        assert not load.failed, load.words()
        assert [event["words"] for event in lab.events("node.suspect")] == []
