"""Nodes on which nothing gets ready, though they look as good as any: what fails there is tried elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmgw.cluster import drain as drains
from llmgw.cluster.beside import nodes_of
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.explain import why
from llmgw.cluster.lifecycle import FORGIVEN_AFTER_S
from llmgw.cluster.model import DesiredShard, MoveState, ReplicaState
from llmgw.cluster.reconcile import next_wake_s

from .building import engine, model, node, profile
from .lab import Lab, on_fabric

ONE = profile(gpus_per_node=1)
PAIR = profile(nodes=2, gpus_per_node=1, pipeline_parallel=2)


def bad(*names: str) -> Callable[[DesiredShard], bool]:
    """Every engine on these nodes ends while it starts."""
    return lambda shard: shard.placement.node in names


def places(lab: Lab, *, ticks: int = 100) -> list[str]:
    """The nodes of each generation that is placed, one after another, by their digits."""
    seen: dict[tuple[str, int], str] = {}
    for _ in range(ticks):
        for replica in lab.replicas():
            if replica.placements and replica.state is not ReplicaState.STOPPING:
                names = "".join(name.removeprefix("n") for name in nodes_of(replica))
                seen.setdefault((replica.id, replica.generation), names)
        lab.tick()
    return list(seen.values())


# -- a replica by itself


def test_a_replica_that_fails_three_times_on_a_node_is_tried_on_another() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.broken = bad("n1")
    assert places(lab) == ["1", "1", "1", "2"]
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]


def test_its_story_and_its_words_say_that_it_is_tried_elsewhere_and_why() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.broken, lab.slow = bad("n1"), lambda shard: True
    lab.until(lambda: lab.replicas()[0].failures == 3)
    assert "elsewhere if it fits there, since it failed 3 times on n1" in why(lab.state, "m").summary
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.STARTING)
    (replica,) = lab.replicas()
    words = "tried there since it failed 3 times on n1"
    assert why(lab.state, "m").replicas[0].why == f"{replica.why}; {words}"
    assert [line.why for line in replica.story if words in line.why] == [
        f"on n2: waits for its agent to take it up; {words}"
    ]
    assert lab.told("replica.placed")[-1].endswith(f"on n2, generation 4, profile p; {words}")
    lab.slow = lambda shard: False
    lab.run()
    assert why(lab.state, "m").summary == "1 of 1 replica ready"


def test_it_is_remembered_over_a_restart_of_the_control_plane() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.broken = bad("n1")
    lab.until(lambda: lab.replicas()[0].failures == 3)
    lab.restart_control()
    lab.tick()
    lab.come_back()
    assert places(lab)[-1] == "2"


def test_where_every_node_is_bad_each_has_its_turn() -> None:
    lab = Lab([node(f"n{number}", gpus=1) for number in (1, 2, 3)], [model("m", ONE)])
    lab.broken = lambda shard: True
    tried = places(lab, ticks=900)
    assert tried[:9] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert set(tried[9:15]) == {"1", "2", "3"}
    lab.broken = bad("n1", "n3")
    places(lab, ticks=300)
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]


def test_with_no_other_place_it_stays_where_it_is() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=0)], [model("m", ONE)])
    lab.broken = lambda shard: True
    assert set(places(lab)) == {"1"}


def test_ports_that_something_else_holds_are_no_fault_of_the_node() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.taken = lambda shard: shard.placement.node == "n1" and shard.placement.port < 20600
    assert set(places(lab)) == {"1"}
    assert [replica.placements[0].port for replica in lab.ready()] == [20600]


def test_ports_that_were_taken_on_one_node_say_nothing_of_those_of_another() -> None:
    """The first block of the other is the first that is tried there, and no failure of the thing itself."""
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.taken = lambda shard: shard.placement.port <= (20000 if shard.placement.node == "n2" else 20200)
    lab.broken = bad("n1")
    lab.until(lambda: bool(lab.ready()))
    (replica,) = lab.ready()
    assert (nodes_of(replica), replica.placements[0].port) == (("n2",), 20100)
    assert replica.failed_on == {"n1": 3}


def test_it_is_forgotten_once_it_has_been_ready_for_long() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.broken = bad("n1")
    lab.until(lambda: bool(lab.ready()))
    assert lab.ready()[0].failed_on == {"n1": 3}
    places(lab, ticks=int(FORGIVEN_AFTER_S) + 5)
    assert lab.ready()[0].failed_on == {}


@pytest.mark.parametrize("culprit", ["n1", "n2", "n3"])
def test_of_a_replica_over_several_nodes_any_may_be_the_bad_one(culprit: str) -> None:
    lab = Lab([on_fabric(f"n{number}", "ib-a", gpus=1) for number in (1, 2, 3)], [model("m", PAIR)])
    lab.broken = bad(culprit)
    tried = places(lab)
    assert tried == {"n1": ["12"] * 3 + ["13", "23"], "n2": ["12"] * 3 + ["13"], "n3": ["12"]}[culprit]
    assert len(lab.ready()) == 1


def test_several_nodes_that_share_no_bad_one_are_tried_before_some_that_may() -> None:
    lab = Lab(
        [on_fabric(name, "ib-a" if name < "n4" else "ib-b", gpus=1) for name in ("n1", "n2", "n3", "n4", "n5")],
        [model("m", PAIR)],
    )
    lab.broken = bad("n1")
    assert places(lab) == ["12"] * 3 + ["45"]


# -- one that takes over from another


def emptied(*names: str) -> Lab:
    """One replica on n1, and the other nodes free."""
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    for name in names:
        lab.add(node(name, gpus=1))
    return lab


def test_a_drain_goes_on_past_a_node_on_which_nothing_starts() -> None:
    lab = emptied("n2", "n3")
    lab.broken = bad("n2")
    lab.drain("n1")
    assert places(lab) == ["1", "2", "2", "2", "3"]
    assert lab.is_drained("n1")
    assert lab.told("drain.blocked") == []


def test_a_drain_remembers_where_replacements_failed_that_it_gave_up() -> None:
    lab = emptied("n2", "n3", "n4")
    lab.broken = bad("n2", "n3")
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    assert "failed 4 times in a row (so far 3 times on n2, 1 time on n3): shard" in lab.move("n1").why
    lab.restart_control()
    lab.tick()
    lab.come_back()
    assert places(lab) == ["1", "4"]
    assert lab.is_drained("n1")


def test_what_a_drain_remembered_is_forgotten_once_the_replacement_has_been_ready_for_long() -> None:
    """As its own failures are: the node that was bad then is not held against it for ever."""
    lab = emptied("n2", "n3")
    lab.broken = bad("n2", "n3")
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    lab.broken = bad()
    lab.until(lambda: lab.is_drained("n1"))
    (new,) = lab.ready()
    assert (new.failures, new.failed_on) == (0, {"n2": 3, "n3": 1})
    wake_s = next_wake_s(replace(lab.state, nodes={}), lab.now)
    assert wake_s == pytest.approx(lab.now.monotonic_s - lab.now.wall_s + new.since + FORGIVEN_AFTER_S)
    places(lab, ticks=int(FORGIVEN_AFTER_S) + 5)
    assert lab.ready()[0].failed_on == {}


def test_a_drain_that_is_asked_for_again_plans_with_what_has_failed() -> None:
    lab = emptied("n2", "n3", "n4")
    lab.broken = bad("n2", "n3")
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    (move,) = drains.plan(lab.state, "n1", now=lab.now).moves
    assert (move.targets, move.failed_on) == (("n4",), {"n2": 3, "n3": 1})


def test_one_bad_node_does_not_end_a_roll() -> None:
    lab = emptied("n2", "n3")
    lab.broken = bad("n2")
    lab.edit(model("m", profile(gpus_per_node=1, context=4096)))
    lab.run()
    assert [replica.profile.context for replica in lab.ready() if replica.profile] == [4096]
    assert lab.told("roll.given-up") == []


@pytest.mark.parametrize("culprit", ["n1", "n2", "n3", "n4"])
def test_one_bad_node_of_several_does_not_end_a_roll(culprit: str) -> None:
    """Each of the nodes is left out before it is given up."""
    lab = Lab([on_fabric(f"n{number}", "ib-a", gpus=2) for number in (1, 2, 3, 4)], [model("m", PAIR)])
    lab.run()
    lab.broken = bad(culprit)
    three = profile(nodes=3, gpus_per_node=1, pipeline_parallel=3)
    lab.edit(model("m", three))
    lab.run()
    (replica,) = lab.ready()
    assert len(nodes_of(replica)) == 3
    assert lab.told("roll.given-up") == []


def test_a_change_that_fails_on_several_nodes_is_given_up_once_each_was_left_out() -> None:
    lab = Lab([on_fabric(f"n{number}", "ib-a", gpus=2) for number in (1, 2, 3)], [model("m", PAIR)])
    lab.run()
    lab.broken = lambda shard: shard.profile.context == 4096
    lab.edit(model("m", profile(nodes=2, gpus_per_node=1, pipeline_parallel=2, context=4096)))
    lab.run()
    assert len(lab.ready()) == 1
    (words,) = lab.told("roll.given-up")
    assert "failed 5 times in a row (so far " in words


def test_a_change_is_given_up_where_there_is_no_place_without_the_node_that_may_be_to_blame() -> None:
    lab = Lab([on_fabric("n1", "ib-a", "ib-b", gpus=3), on_fabric("n2", "ib-a", gpus=1)], [model("m", PAIR)])
    lab.run()
    lab.add(on_fabric("n3", "ib-a", gpus=1))
    lab.add(on_fabric("n4", "ib-b", gpus=1))
    lab.broken = lambda shard: shard.profile.context == 4096
    lab.edit(model("m", profile(nodes=2, gpus_per_node=1, pipeline_parallel=2, context=4096)))
    lab.run()
    (words,) = lab.told("roll.given-up")
    assert "failed 4 times in a row (so far 4 times on n1, 3 times on n3, 1 time on n4)" in words


def test_one_bad_node_does_not_roll_back_an_engine() -> None:
    old, new = EngineSpec(name="sim", version="1.0"), EngineSpec(name="sim", version="2.0")
    both = (engine("sim", version="1.0"), engine("sim", version="2.0"))
    lab = Lab([node("n1", gpus=1, engines=both)], [model("m", ONE)], engines=[old])
    lab.run()
    lab.add(node("n2", gpus=1, engines=both))
    lab.add(node("n3", gpus=1, engines=both))
    lab.broken = bad("n2")
    lab.edit(model("m", ONE), engines=[new])
    lab.run()
    assert lab.state.engines["sim"].rolled_back == ""
    assert [(nodes_of(each), each.profile and each.profile.engine_version) for each in lab.ready()] == [
        (("n3",), "2.0")
    ]
