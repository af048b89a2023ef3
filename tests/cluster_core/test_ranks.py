"""Replicas over several nodes: their ranks start together, and end together."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest

from llmgw.cluster import drain
from llmgw.cluster.actions import Note
from llmgw.cluster.derived import unconfirmed
from llmgw.cluster.explain import why
from llmgw.cluster.model import Cluster, DrainState, NodeState, ReplicaState, ShardPeer, ShardState
from llmgw.cluster.reconcile import desired, next_wake_s, reconcile, routes
from llmgw.cluster.returning import WHOLE_WITHIN_S

from .building import (
    NOW,
    cluster,
    heard,
    later,
    lost_one,
    model,
    node,
    observed,
    only,
    profile,
    ready,
    reported,
    settled,
    with_node,
)

S = ShardState
TWO = profile(nodes=2, gpus_per_node=4, tensor_parallel=8)


def lab(*names: str, fabric: str = "ib-a", **fields: object) -> Cluster:
    """Nodes on one fabric, and a replica over two of them, not placed yet."""
    nodes = [node(name, gpus=8, fabrics=(fabric,), address=f"10.0.0.{name[1:]}") for name in names or ("n1", "n2")]
    return cluster(nodes, [model("m", TWO, **fields)])


def two_fabrics() -> Cluster:
    """n1 and n2 on one fabric, n3 and n4 on another; the replica is ready on n1 and n2."""
    other = lab("n3", "n4", fabric="ib-b").nodes
    state = ready(lab())
    return replace(state, nodes={**state.nodes, **other})


def report(state: Cluster, name: str, shard_state: ShardState, **fields: object) -> Cluster:
    """One node reports its rank of the one replica."""
    replica = only(state)
    rank = [placement.node for placement in replica.placements].index(name)
    endpoint = None if rank else f"10.0.0.{name[1:]}:{replica.placements[0].port}"
    shard = observed(replica.shard_id(rank), replica.generation, shard_state, endpoint, **fields)
    return with_node(state, name, shards=(shard,))


def at(state: Cluster, seconds: float) -> Cluster:
    return settled(heard(state, later(seconds)), later(seconds))


def notes(state: Cluster, seconds: float = 0) -> dict[str, str]:
    return {action.kind: action.words for action in reconcile(state, later(seconds)) if isinstance(action, Note)}


def silent(state: Cluster, *names: str) -> Cluster:
    for name in names:
        state = with_node(state, name, session=None, heard_at_s=NOW.monotonic_s)
    return state


def endpoints(state: Cluster) -> list[str]:
    return [endpoint.url for route in routes(state) for endpoint in route.endpoints]


# -- starting


def test_each_rank_knows_the_others_and_where_they_meet() -> None:
    state = settled(lab())
    replica = only(state)
    (leader,), (worker,) = desired(state, "n1"), desired(state, "n2")
    assert (leader.rank, worker.rank) == (0, 1)
    peers = tuple(
        ShardPeer(node=f"n{last}", address=f"10.0.0.{last}", port=20000, fabrics=("ib-a",)) for last in (1, 2)
    )
    assert leader.peers == worker.peers == peers
    assert leader.fabric == worker.fabric == replica.fabric == "ib-a"
    assert leader.dist_init == worker.dist_init == f"10.0.0.1:{replica.placements[0].port + 50}"


def test_no_rank_is_told_to_start_before_all_are_prepared() -> None:
    state = settled(lab())
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [False, False]
    state = settled(report(state, "n1", S.PREPARING, prepared=True, why="everything is there"))
    assert (only(state).state, [shard.go for shard in desired(state, "n1")]) == (ReplicaState.PLACING, [False])
    state = settled(report(state, "n2", S.PREPARING, why="downloading (41 %)"))
    assert (only(state).state, only(state).why) == (ReplicaState.PREPARING, "rank 1: downloading (41 %) on n2")
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [False, False]
    state = settled(report(state, "n2", S.PREPARING, prepared=True))
    assert (only(state).state, only(state).why) == (
        ReplicaState.STARTING,
        "all 2 ranks are prepared: starting together",
    )
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [True, True]


WAITS = "rank 0: loading on n1; it says: waiting for rank 1 of 2"


def test_once_told_to_start_they_are_not_told_otherwise() -> None:
    state = settled(reported(settled(lab()), S.PREPARING, prepared=True))
    assert reconcile(state, NOW) == (), "neither has taken it up yet"
    state = settled(report(state, "n1", S.LOADING, why="loading; it says: waiting for rank 1 of 2"))
    assert (only(state).state, only(state).why) == (ReplicaState.STARTING, WAITS)
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [True, True]


def test_an_agent_that_was_restarted_while_it_prepared_begins_anew() -> None:
    state = settled(report(settled(reported(settled(lab()), S.PREPARING)), "n1", S.PREPARING, prepared=True))
    state = settled(with_node(state, "n2", session=2, shards=()))
    assert (only(state).state, only(state).restarts, len(desired(state, "n2"))) == (ReplicaState.PLACING, 0, 1)


def test_an_agent_that_was_restarted_after_the_start_and_has_lost_its_rank_fails_the_generation() -> None:
    state = settled(reported(settled(lab()), S.PREPARING, prepared=True))
    state = settled(with_node(state, "n2", session=2, shards=()))
    assert (only(state).state, desired(state, "n1")) == (ReplicaState.FAILED, ())


def test_a_node_that_goes_between_plan_and_launch_lets_nothing_start_on_what_is_left() -> None:
    state = settled(with_node(settled(lab("n1", "n2", "n3")), "n2", session=None), later(1))
    state = at(report(state, "n1", S.PREPARING, prepared=True), 2)
    assert [shard.go for shard in desired(state, "n1")] == [False]
    assert only(state).state is ReplicaState.PLACING
    state = at(state, 31)
    assert [placement.node for placement in only(state).placements] == ["n1", "n3"]
    assert only(state).state is ReplicaState.PLACING
    assert endpoints(state) == []


def test_one_of_a_single_node_is_never_held_back() -> None:
    state = settled(cluster([node("n1")], [model()]))
    assert [shard.go for shard in desired(state, "n1")] == [True]
    assert desired(state, "n1")[0].peers == ()


def held(*names: str) -> Cluster:
    """A replica whose ranks on n1 and n2 are prepared, in the moment in which n2 is to be emptied, and waits for it."""
    state = settled(reported(settled(lab(*names)), S.PREPARING))
    state = replace(state, drains={"n2": drain.plan(state, "n2", now=NOW, wait=True)})
    state = replace(state, drains={"n2": replace(state.drains["n2"], state=DrainState.WAITING)})
    return reported(state, S.PREPARING, prepared=True)


def test_prepared_ranks_are_made_elsewhere_where_a_node_of_theirs_is_to_be_emptied() -> None:
    before = held("n1", "n2", "n3")
    state = settled(before)
    (new,) = (replica for replica in state.replicas.values() if replica.id != only(before).id)
    assert [placement.node for placement in new.placements] == ["n1", "n3"]
    assert state.replicas[only(before).id].state is ReplicaState.STOPPING
    assert {shard.id for name in state.nodes for shard in desired(state, name)} == {new.shard_id(0), new.shard_id(1)}


def test_with_no_other_place_they_are_held_and_say_so_until_the_node_takes_them_again() -> None:
    state = settled(held())
    assert state.drains["n2"].state is DrainState.WAITING
    assert (only(state).state, only(state).why) == (
        ReplicaState.PREPARING,
        "all 2 ranks are prepared; not started, as n2 is to be emptied",
    )
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [False, False]
    state = settled(replace(state, drains={}))
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [True, True]


def test_what_a_node_that_is_to_be_emptied_has_not_taken_up_is_not_asked_of_it() -> None:
    state = with_node(settled(lab()), "n2", state=NodeState.DRAINING)
    assert (len(desired(state, "n1")), desired(state, "n2")) == (1, ())
    state = with_node(reported(settled(lab()), S.PREPARING), "n2", state=NodeState.DRAINING)
    assert (len(desired(state, "n1")), len(desired(state, "n2"))) == (1, 1)


# -- ready


def test_it_is_ready_when_all_ranks_are_and_served_by_the_leader_alone() -> None:
    state = settled(reported(settled(lab()), S.PREPARING, prepared=True))
    state = settled(report(report(state, "n1", S.READY), "n2", S.LOADING, why="joining"))
    assert (only(state).state, endpoints(state)) == (ReplicaState.STARTING, [])
    state = settled(report(state, "n2", S.READY, why="runs; rank 0 answers for the replica"))
    assert (only(state).state, only(state).why) == (ReplicaState.READY, "ready on n1, n2")
    assert endpoints(state) == [f"http://10.0.0.1:{only(state).placements[0].port}"]


def test_a_dropped_ready_event_converges_with_the_next_full_report() -> None:
    state = settled(reported(settled(lab()), S.PREPARING, prepared=True))
    state = settled(report(report(state, "n1", S.LOADING), "n2", S.READY))
    assert only(state).state is ReplicaState.STARTING
    state = at(reported(state, S.READY), 5)
    assert only(state).state is ReplicaState.READY


def test_a_worker_that_is_suspect_makes_others_preferred() -> None:
    state = settled(with_node(ready(lab()), "n2", session=None), later(1))
    (endpoint,) = routes(state)[0].endpoints
    assert not endpoint.preferred


# -- the end of a generation


@pytest.mark.parametrize("name", ["n1", "n2"])
@pytest.mark.parametrize("how", [S.FAILED, S.STOPPED, None])
def test_the_loss_of_any_rank_takes_it_from_the_routes_and_stops_all_at_once(name: str, how: ShardState | None) -> None:
    before = ready(lab("n1", "n2", "n3", "n4"))
    state = with_node(before, name, shards=()) if how is None else report(before, name, how)
    state = settled(state)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.FAILED)
    assert (only(state).restarts, only(state).failures) == (1, 1)
    assert endpoints(state) == []
    assert [desired(state, each) for each in state.nodes] == [()] * 4


def test_the_next_generation_begins_once_all_of_the_last_is_gone() -> None:
    state = settled(report(ready(lab()), "n2", S.FAILED))
    state = at(with_node(state, "n2", shards=()), 5)
    assert (only(state).state, only(state).generation) == (ReplicaState.FAILED, 1), "rank 0 is still there"
    state = at(report(state, "n1", S.STOPPING), 6)
    assert only(state).state is ReplicaState.FAILED
    state = at(with_node(state, "n1", shards=()), 7)
    assert (only(state).state, only(state).generation) == (ReplicaState.PLACING, 2)
    assert [shard.go for name in ("n1", "n2") for shard in desired(state, name)] == [False, False]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_four_ranks_that_die_in_any_order_end_as_one_generation(order: tuple[int, ...]) -> None:
    """The head dies and others run on, or the other way round: a stale process never counts as part of the next."""
    names = ["n1", "n2", "n3", "n4"]
    nodes = lab(*names).nodes
    state = ready(cluster(nodes.values(), [model("m", profile(nodes=4, gpus_per_node=8))]))
    for number, rank in enumerate(order):
        state = at(report(state, names[rank], S.FAILED), number)
        assert (only(state).state, only(state).restarts, only(state).generation) == (ReplicaState.FAILED, 1, 1)
        assert endpoints(state) == []
        assert not any(desired(state, name) for name in names)
    for number, rank in enumerate(order):
        assert only(state).generation == 1
        state = at(with_node(state, names[rank], shards=()), 10 + number)
    assert (only(state).state, only(state).generation, only(state).restarts) == (ReplicaState.PLACING, 2, 1)


def ways_to_die() -> list[tuple[str, str]]:
    ways = ("crash", "agent back without", "power")
    return list(product(ways, ways))


@pytest.mark.parametrize("ways", ways_to_die())
@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
def test_both_sides_that_die_in_any_order_leave_nothing_behind(ways: tuple[str, str], order: tuple[str, str]) -> None:
    state, now_s = ready(lab("n1", "n2", "n3", "n4", "n5")), 0.0
    first = only(state).id
    for name, way in zip(order, ways, strict=True):
        if way == "crash":
            shards = tuple(replace(shard, state=S.FAILED, endpoint=None) for shard in state.nodes[name].shards)
            state = at(with_node(state, name, shards=shards), now_s)
        elif way == "agent back without":
            state = at(with_node(state, name, session=7, shards=()), now_s)
        else:
            now_s += 31
            state = at(heard(with_node(state, name, session=None, heard_at_s=NOW.monotonic_s), later(now_s)), now_s)
        assert first not in [endpoint.replica for route in routes(state) for endpoint in route.endpoints]
    assert endpoints(state) == []
    for name in order:
        state = at(with_node(state, name, session=9, heard_at_s=NOW.monotonic_s + now_s, shards=()), now_s)
    for _ in range(3):
        now_s += 2
        state = at(state, now_s)
    assert len(state.replicas) == 1
    assert only(state).state is ReplicaState.PLACING


def test_an_address_that_changed_fails_the_generation_in_words_and_it_is_built_anew() -> None:
    """A lease ran out, or another interface carries the route now: ranks can't meet where they were told to."""
    for name, address in (("n1", "10.0.0.9"), ("n2", "10.0.0.8")):
        before = ready(lab())
        moved = node(name, gpus=8, fabrics=("ib-a",), address=address).inventory
        state = settled(with_node(before, name, inventory=moved))
        assert (only(state).state, endpoints(state)) == (ReplicaState.FAILED, [])
        assert only(state).why == (
            f"the management address of {name} changed from 10.0.0.{name[1:]} to {address}: the ranks of generation 1 "
            "can't meet there any more"
        )
        state = at(with_node(with_node(state, "n1", shards=()), "n2", shards=()), 2)
        assert (only(state).generation, only(state).state) == (2, ReplicaState.PLACING)
        assert address in [peer.address for peer in desired(state, "n1")[0].peers]


# -- losing nodes


@pytest.mark.parametrize("name", ["n1", "n2"])
def test_a_node_that_loses_power_has_the_replica_rebuilt_on_the_other_fabric_at_once(name: str) -> None:
    before = two_fabrics()
    left = "n2" if name == "n1" else "n1"
    state = heard(silent(before, name), later(31))
    words = notes(state, 31)
    assert words["replica.failed"].endswith(f"failed: node {name} lost: silent for 31 s")
    assert words["replica.stopping"].endswith(f"what is left of it on {left} can't serve without")
    state = settled(state, later(31))
    assert endpoints(state) == []
    assert desired(state, left) == (), "the survivor is left idle"
    assert [placement.node for placement in only(state).placements] == ["n3", "n4"]
    assert only(state).fabric == "ib-b"
    state = at(with_node(state, left, shards=()), 33)
    assert only(before).id not in state.replicas, "nothing of it can run any more"
    late = with_node(state, name, session=2, heard_at_s=NOW.monotonic_s + 40)
    late = at(late, 40)
    assert late.nodes[name].shards != ()
    assert desired(late, name) == (), "what the late node still runs is a leftover"


def test_the_survivor_holds_what_it_held_until_it_has_stopped() -> None:
    state = at(silent(ready(lab("n1", "n2", "n3")), "n1"), 31)
    assert only(state).state is ReplicaState.PLACING
    state = at(
        silent(
            ready(cluster([*lab("n1", "n2").nodes.values()], [model("m", profile(nodes=2, gpus_per_node=8))])), "n1"
        ),
        31,
    )
    replaced = replace(state, nodes={**state.nodes, "n3": lab("n3").nodes["n3"]})
    assert only(at(replaced, 32)).state is ReplicaState.UNPLACED, "rank 1 still runs on n2"
    gone = at(with_node(replaced, "n2", shards=()), 33)
    assert [placement.node for placement in only(gone).placements] == ["n2", "n3"]


def away_both(before: Cluster) -> Cluster:
    """Both nodes of the replica are cut off, three others are not."""
    others = {name: node(name, gpus=8, fabrics=("ib-b",), address=f"10.0.0.{name[1:]}") for name in ("n3", "n4", "n5")}
    return at(silent(replace(before, nodes={**before.nodes, **others}), "n1", "n2"), 31)


def returned(state: Cluster, name: str, seconds: float, before: Cluster) -> Cluster:
    shards = before.nodes[name].shards
    return with_node(state, name, session=2, heard_at_s=NOW.monotonic_s + seconds, shards=shards)


def test_one_cut_off_whole_that_returns_whole_is_taken_up_while_its_replacement_is_not_ready() -> None:
    before = ready(lab())
    state = away_both(before)
    new = only(state)
    assert (lost_one(state).id, [placement.node for placement in new.placements]) == (only(before).id, ["n3", "n4"])
    state = at(returned(state, "n2", 40, before), 40)
    assert lost_one(state).whole_by_s == NOW.monotonic_s + 40 + WHOLE_WITHIN_S
    assert len(desired(state, "n2")) == 1, "it is kept until the other is back"
    assert endpoints(state) == []
    state = at(returned(state, "n1", 50, before), 50)
    assert (only(state).id, only(state).state, only(state).generation) == (only(before).id, ReplicaState.READY, 1)
    assert new.id not in state.replicas or state.replicas[new.id].state is ReplicaState.STOPPING
    assert len(endpoints(state)) == 1


def test_one_cut_off_whole_that_returns_whole_is_let_go_when_its_replacement_is_ready() -> None:
    before = ready(lab())
    state = settled(reported(away_both(before), S.PREPARING, prepared=True), later(32))
    state = settled(reported(state, S.READY), later(33))
    new = only(state).id
    state = returned(returned(state, "n1", 40, before), "n2", 40, before)
    assert notes(state, 40)["replica.draining"].endswith("replaced while its nodes were away")
    state = at(state, 40)
    assert (only(state).id, desired(state, "n1"), desired(state, "n2")) == (new, (), ())


def test_one_of_which_only_a_part_returns_is_given_up_in_time() -> None:
    before = ready(lab())
    state = at(returned(away_both(before), "n1", 40, before), 40)
    wake = next_wake_s(heard(state, later(40)), later(40))
    assert wake is not None
    assert wake <= NOW.monotonic_s + 40 + WHOLE_WITHIN_S
    state = at(state, 40 + WHOLE_WITHIN_S - 0.1)
    assert len(desired(state, "n1")) == 1
    state = at(state, 40 + WHOLE_WITHIN_S)
    assert desired(state, "n1") == ()
    assert state.replicas[only(before).id].why == "n1 is back, and n2 did not follow within 60 s"
    state = at(with_node(state, "n1", shards=()), 101)
    assert only(before).id not in state.replicas


def test_one_of_which_a_part_returns_is_given_up_at_once_where_it_has_been_replaced() -> None:
    before = ready(lab())
    state = settled(reported(away_both(before), S.PREPARING, prepared=True), later(32))
    state = settled(reported(state, S.READY), later(33))
    state = at(returned(state, "n2", 40, before), 40)
    assert state.replicas[only(before).id].why == "replaced while its nodes were away; n2 is back, n1 is not"
    assert desired(state, "n2") == ()


@pytest.mark.parametrize("changed", ["address", "gone"])
def test_one_that_returns_but_not_whole_is_given_up(changed: str) -> None:
    before = ready(lab())
    state = returned(away_both(before), "n1", 40, before)
    if changed == "gone":
        state = with_node(state, "n1", shards=())
    else:
        state = with_node(state, "n1", inventory=node("n1", gpus=8, fabrics=("ib-a",), address="10.9.9.9").inventory)
    state = at(state, 40)
    assert not [replica for replica in state.replicas.values() if replica.lost]
    assert desired(state, "n1") == ()


# -- restarts of the control plane


def restarted(state: Cluster) -> Cluster:
    nodes = {
        name: replace(known, session=None, heard_at_s=0.0, shards=(), vitals=None)
        for name, known in state.nodes.items()
    }
    return replace(state, nodes=nodes, grace_until_s=NOW.monotonic_s + 30)


def test_a_restarted_control_plane_sends_nothing_to_ranks_it_has_not_heard_and_keeps_what_it_knows() -> None:
    before = ready(lab())
    state = restarted(before)
    assert reconcile(state, later(1)) == ()
    assert (endpoints(state), unconfirmed(state)) == ([], (only(before).id,))
    told = why(state, "m")
    assert (told.ready, why(before, "m").ready) == (0, 1)
    assert told.summary.startswith(f"0 of 1 replica ready, 1 not heard again yet; {only(before).id}: ready on n1, n2 ")
    sent_nothing = "ready on n1, n2 when this control plane started; sent nothing before it has heard n1, n2 again; "
    assert told.replicas[0].why.startswith(sent_nothing)
    assert routes(state)[0].why_none == "no replica of m is ready: 1 not heard again yet"
    state = settled(with_node(state, "n2", session=2, heard_at_s=1001.0, shards=before.nodes["n2"].shards), later(1))
    assert endpoints(state) == []
    state = settled(with_node(state, "n1", session=3, heard_at_s=1002.0, shards=before.nodes["n1"].shards), later(2))
    assert (routes(state), state.replicas, unconfirmed(state)) == (routes(before), before.replicas, ())


@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
def test_a_restarted_control_plane_finds_the_leader_gone_and_never_sends_to_it(order: tuple[str, str]) -> None:
    """Rank 0 ended while no control plane was there: what is left of the replica is not ready for one moment."""
    before = ready(lab())
    state = restarted(before)
    assert endpoints(state) == []
    for number, name in enumerate(order):
        shards = () if name == "n1" else before.nodes[name].shards
        state = settled(with_node(state, name, session=2, heard_at_s=1001.0, shards=shards), later(1 + number))
        assert endpoints(state) == []
    assert (only(state).state, desired(state, "n2")) == (ReplicaState.FAILED, ())
    state = at(with_node(state, "n2", shards=()), 5)
    assert (only(state).generation, only(state).state) == (2, ReplicaState.PLACING)


def test_a_restarted_control_plane_fails_one_whose_node_does_not_come_back() -> None:
    before = ready(lab("n1", "n2", "n3"))
    state = restarted(before)
    for name in ("n2", "n3"):
        state = with_node(state, name, session=2, heard_at_s=1001.0, shards=before.nodes[name].shards)
    state = settled(state, later(1))
    assert only(state).state is ReplicaState.READY
    state = at(state, 30)
    assert state.nodes["n1"].state is NodeState.LOST
    assert only(state).state is ReplicaState.PLACING
    assert only(state).id != only(before).id


@pytest.mark.parametrize(("away", "behind"), [("n1", "n2"), ("n2", "n1")])
def test_one_rank_that_is_not_ready_is_enough_while_another_is_not_heard(away: str, behind: str) -> None:
    """The rank that is away keeps what it was, until it is heard: then the replica is ready again as it stands."""
    state = ready(lab())
    before = only(state)
    state = with_node(state, away, session=None)
    (route,) = routes(settled(state))
    assert len(route.endpoints) == 1
    state = settled(report(state, behind, S.LOADING))
    (route,) = routes(state)
    assert route.endpoints == ()
    assert (only(state).state, only(state).endpoint) == (ReplicaState.STARTING, None)
    assert only(state).why.endswith(f"on {behind}")
    state = settled(report(with_node(state, away, session=9), behind, S.READY))
    assert (only(state).state, only(state).generation) == (ReplicaState.READY, before.generation)
    assert only(state).endpoint is not None
