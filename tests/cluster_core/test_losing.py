"""Nodes lost, and what becomes of their replicas when they return, or do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.actions import Note
from llmgw.cluster.lifecycle import LEAVING
from llmgw.cluster.model import Cluster, NodeState, ReplicaState, ShardState
from llmgw.cluster.reconcile import desired, next_wake_s, reconcile, routes
from llmgw.cluster.returning import REMEMBERED_S

from .building import (
    GIB,
    NOW,
    cluster,
    heard,
    later,
    lost_one,
    model,
    node,
    only,
    profile,
    ready,
    reported,
    settled,
    with_catalog,
    with_node,
)

S = ShardState


def two_nodes() -> Cluster:
    """A replica on n1, with room for another on n2."""
    return ready(cluster([node("n1", memory_gib=32), node("n2")], [model()]))


def lost(state: Cluster, *names: str) -> Cluster:
    """31 s later: the nodes named (n1, if none is) were silent all the while, the others were not."""
    now = later(31)
    for name in names or ("n1",):
        state = with_node(state, name, session=None, heard_at_s=NOW.monotonic_s)
    return settled(heard(state, now), now)


def back(state: Cluster, name: str = "n1", seconds: float = 40, **changes: object) -> Cluster:
    """The node has come back with what it was running."""
    return with_node(state, name, session=2, heard_at_s=NOW.monotonic_s + seconds, **changes)


def at(state: Cluster, seconds: float) -> Cluster:
    """Settled at that time, all connected nodes heard just now."""
    return settled(heard(state, later(seconds)), later(seconds))


def notes(state: Cluster, seconds: float) -> dict[str, str]:
    return {action.kind: action.words for action in reconcile(state, later(seconds)) if isinstance(action, Note)}


def test_another_is_made_in_place_of_a_lost_one_and_placed_at_once() -> None:
    """The node that holds the only replica is killed."""
    before = two_nodes()
    state = lost(before)
    gone, new = lost_one(state), only(state)
    assert (gone.id, gone.state, gone.why) == (only(before).id, ReplicaState.FAILED, "node n1 lost: silent for 31 s")
    assert (gone.restarts, gone.failures, gone.endpoint) == (0, 0, None)
    assert (new.state, new.placements[0].node, new.generation, new.number) == (ReplicaState.PLACING, "n2", 1, 2)
    assert routes(state)[0].endpoints == ()


def test_a_suspect_nodes_replica_stays_where_it_is_and_is_not_preferred() -> None:
    state = settled(with_node(two_nodes(), "n1", session=None), later(1))
    (endpoint,) = routes(state)[0].endpoints
    assert (endpoint.preferred, only(state).state) == (False, ReplicaState.READY)


def test_a_node_that_returns_before_it_is_lost_has_lost_nothing() -> None:
    before = two_nodes()
    state = settled(with_node(before, "n1", session=None), later(10))
    state = at(back(state, seconds=20), 20)
    assert state.replicas == before.replicas
    assert routes(state) == routes(before)


def test_with_no_other_place_the_new_one_says_so_and_the_old_one_is_taken_up_again_on_return() -> None:
    before = ready(cluster([node("n1", gpus=2)], [model("m", profile(gpus_per_node=2))]))
    state = lost(before)
    assert only(state).state is ReplicaState.UNPLACED
    assert only(state).why == "n1: lost since 2023-11-14 22:13:51 UTC: silent for 31 s"
    assert routes(state)[0].endpoints == ()
    state = back(state)
    assert len(desired(state, "n1")) == 1, "it must not be stopped before it is decided"
    assert notes(state, 40)["replica.adopted"].endswith("is taken up again: n1 is back and still runs generation 1")
    state = settled(state, later(40))
    assert only(state) == replace(only(before), story=only(state).story, since=later(40).wall_s)
    assert routes(state) == routes(before)
    assert len(state.replicas) == 1, "the one made in its place is no longer needed"


def test_one_that_returns_while_its_replacement_is_starting_is_kept_and_the_replacement_cancelled() -> None:
    before = two_nodes()
    state = lost(before)
    new = only(state)
    state = settled(reported(state, S.LOADING), later(35))
    shards = before.nodes["n1"].shards
    state = at(back(state, shards=shards), 40)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.READY)
    assert state.replicas[new.id].state is ReplicaState.STOPPING
    assert desired(state, "n2") == ()
    assert len(desired(state, "n1")) == 1


def test_one_that_returns_after_its_replacement_is_ready_is_let_go() -> None:
    before = two_nodes()
    state = lost(before)
    new = only(state)
    state = settled(reported(state, S.READY), later(35))
    state = back(state, shards=before.nodes["n1"].shards)
    assert len(desired(state, "n1")) == 1, "it must not be stopped before it is decided"
    words = notes(state, 40)
    assert words["replica.draining"].endswith("finishes its requests: replaced while its node was away")
    state = settled(state, later(40))
    assert (only(state).id, only(state).state) == (new.id, ReplicaState.READY)
    assert (state.replicas[only(before).id].state, desired(state, "n1")) == (ReplicaState.STOPPING, ())
    state = at(with_node(state, "n1", shards=()), 41)
    assert set(state.replicas) == {new.id}


@pytest.mark.parametrize("heard_at_s", [NOW.monotonic_s + 35, 0.0], ids=["silent since", "not heard since a restart"])
def test_one_that_returns_is_taken_up_where_nobody_hears_the_one_in_its_place(heard_at_s: float) -> None:
    """Of two the one that is known to run is kept."""
    before = two_nodes()
    state = lost(before)
    new = only(state)
    state = settled(reported(state, S.READY), later(35))
    state = with_node(state, "n2", session=None, heard_at_s=heard_at_s)
    state = replace(state, grace_until_s=later(65).monotonic_s if heard_at_s == 0.0 else 0.0)
    state = at(back(state, shards=before.nodes["n1"].shards), 40)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.READY)
    assert state.replicas[new.id].state in LEAVING
    assert only(before).id in {endpoint.replica for endpoint in routes(state)[0].endpoints}
    state = at(with_node(state, "n2", session=3, heard_at_s=later(50).monotonic_s), 50)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.READY)


def test_what_was_asked_of_a_lost_node_is_not_taken_back_on_a_stream_that_is_still_open() -> None:
    before = settled(cluster([node("n1", memory_gib=32), node("n2")], [model()]))
    asked = desired(before, "n1")
    assert len(asked) == 1
    assert before.nodes["n1"].shards == (), "what it has started, it has not said yet"
    # Nothing is heard of it any more, and what is sent to it may arrive.
    state = settled(with_node(heard(before, later(31)), "n1", heard_at_s=NOW.monotonic_s), later(31))
    assert state.nodes["n1"].state is NodeState.LOST
    assert state.replicas[only(before).id].lost
    assert desired(state, "n1") == asked
    state = settled(with_node(state, "n1", session=2, heard_at_s=NOW.monotonic_s + 40), later(40))
    assert desired(state, "n1") == (), "it is back without"


def test_of_several_that_return_only_those_still_missed_are_taken_up() -> None:
    nodes = [node("n1", gpus=2), node("n2", gpus=2), node("n3", gpus=1), node("n4"), node("n5")]
    before = ready(cluster(nodes, [model("m", profile(gpus_per_node=1), replicas=3)]))
    at_first = {replica.id for replica in before.replicas.values()}
    state = lost(before, "n1", "n2")
    state = settled(reported(state, S.READY), later(35))
    kept = {replica.id for replica in state.replicas.values() if replica.state is ReplicaState.READY}
    state = at(back(back(state, shards=before.nodes["n1"].shards), "n2", shards=before.nodes["n2"].shards), 40)
    serving = {replica.id for replica in state.replicas.values() if replica.state is ReplicaState.READY}
    assert len(serving) == 3
    assert kept <= serving
    assert serving <= kept | at_first


def test_one_that_returns_and_is_loading_again_is_taken_up_as_it_is() -> None:
    before = ready(cluster([node("n1")], [model()]))
    shards = tuple(replace(shard, state=S.LOADING, endpoint=None) for shard in before.nodes["n1"].shards)
    state = at(back(lost(before), shards=shards), 40)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.STARTING)
    assert routes(state)[0].endpoints == ()


@pytest.mark.parametrize("left", ["nothing", "what failed", "what stops", "another generation"])
def test_one_of_which_the_node_returns_without_is_forgotten(left: str) -> None:
    before = ready(cluster([node("n1")], [model()]))
    (shard,) = before.nodes["n1"].shards
    shards = {
        "nothing": (),
        "what failed": (replace(shard, state=S.FAILED),),
        "what stops": (replace(shard, state=S.STOPPING),),
        "another generation": (replace(shard, generation=2),),
    }[left]
    state = back(lost(before), shards=shards)
    words = notes(state, 40)
    assert words["replica.stopping"].endswith("stops: n1 is back without generation 1")
    state = settled(state, later(40))
    state = at(with_node(state, "n1", shards=()), 41)
    assert only(before).id not in state.replicas
    assert (only(state).state, only(state).generation) == (ReplicaState.PLACING, 1)


def test_what_a_returned_node_is_to_stop_keeps_everything_else_off_it_until_it_has() -> None:
    before = two_nodes()
    state = settled(reported(lost(before), S.READY), later(35))
    state = at(back(state, shards=before.nodes["n1"].shards), 40)
    full = model("big", profile(memory_bytes=32 * GIB - (512 << 20)))
    state = at(with_catalog(state, *state.catalog.models, full), 42)
    assert only(state, "big").state is ReplicaState.PLACING, "the old one holds no memory of its own"
    gpu = ready(cluster([node("n1", gpus=1), node("n2", gpus=1)], [model("m", profile(gpus_per_node=1))]))
    state = settled(reported(lost(gpu), S.READY), later(35))
    state = at(back(state, shards=gpu.nodes["n1"].shards), 40)
    state = at(with_catalog(state, *state.catalog.models, model("x", profile(gpus_per_node=1))), 42)
    assert only(state, "x").state is ReplicaState.UNPLACED
    state = at(with_node(state, "n1", shards=()), 43)
    assert only(state, "x").placements[0].node == "n1"


def test_one_that_is_no_longer_wanted_is_not_kept_for_its_return() -> None:
    state = lost(two_nodes())
    for after in (replace(state, scale={"m": 0}), with_catalog(state), replace(state, halting=True)):
        assert not [replica for replica in at(after, 32).replicas.values() if replica.lost]


def test_a_failed_replica_of_a_lost_node_gets_its_next_generation_elsewhere() -> None:
    state = settled(reported(two_nodes(), S.FAILED))
    assert only(state).state is ReplicaState.FAILED
    state = lost(state)
    assert (only(state).placements[0].node, only(state).generation) == ("n2", 2)


def test_a_node_that_is_removed_takes_its_replicas_with_it() -> None:
    before = two_nodes()
    state = settled(replace(before, nodes={"n2": before.nodes["n2"]}))
    assert (len(state.replicas), only(state).placements[0].node) == (1, "n2")
    words = notes(replace(before, nodes={"n2": before.nodes["n2"]}), 0)
    assert words["replica.failed"].endswith("failed: node n1 has been removed")


def test_a_revoked_node_runs_nothing_and_is_not_waited_for() -> None:
    state = settled(with_node(two_nodes(), "n1", state=NodeState.REVOKED, session=None))
    assert desired(state, "n1") == ()
    assert (len(state.replicas), only(state).placements[0].node) == (1, "n2")


def test_a_lost_node_that_is_removed_or_revoked_is_not_waited_for() -> None:
    state = lost(two_nodes())
    removed = at(replace(state, nodes={"n2": state.nodes["n2"]}), 32)
    revoked = at(with_node(state, "n1", state=NodeState.REVOKED), 32)
    assert [len(removed.replicas), len(revoked.replicas)] == [1, 1]


def test_one_that_was_replaced_is_forgotten_after_a_day_and_another_is_not() -> None:
    state = lost(two_nodes())
    day = 31 + REMEMBERED_S
    assert len(at(state, day).replicas) == 2, "nothing serves in its place yet"
    state = settled(reported(state, S.READY), later(35))
    now = later(day - 100)
    state = settled(heard(state, now), now)
    state = replace(state, suspect_after_s=1000, lost_after_s=2000)
    assert len(state.replicas) == 2
    wake = next_wake_s(state, now)
    assert wake == pytest.approx(NOW.monotonic_s + day)
    assert len(at(state, day - 0.1).replicas) == 2
    state = at(state, day)
    assert (len(state.replicas), only(state).placements[0].node) == (1, "n2")
    late = back(state, seconds=day + 1)
    assert desired(settled(late, later(day + 1)), "n1") == (), "what it brings after that is a leftover"


def test_what_stops_on_a_lost_node_is_removed_and_stopped_when_that_returns() -> None:
    state = settled(replace(ready(cluster([node("n1")], [model()])), scale={"m": 0}))
    state = lost(state)
    assert state.replicas == {}
    assert desired(with_node(state, "n1", session=2), "n1") == ()


def test_a_replacement_lost_in_turn_is_replaced_and_the_first_of_them_to_return_is_kept() -> None:
    before = two_nodes()
    nodes = {**before.nodes, "n3": node("n3"), "n4": node("n4"), "n5": node("n5")}
    state = lost(settled(replace(before, nodes=nodes)))
    second = only(state)
    state = settled(reported(state, S.READY), later(35))
    now = later(70)
    state = with_node(heard(state, now), second.placements[0].node, session=None, heard_at_s=NOW.monotonic_s + 35)
    state = settled(state, now)
    assert len([replica for replica in state.replicas.values() if replica.lost]) == 2
    third = only(state)
    assert third.id not in (second.id, only(before).id)
    state = at(back(state, seconds=75, shards=before.nodes["n1"].shards), 75)
    assert (only(state).id, only(state).state) == (only(before).id, ReplicaState.READY)
    assert state.replicas[second.id].lost
    assert third.id not in state.replicas or state.replicas[third.id].state is ReplicaState.STOPPING


@pytest.mark.parametrize("whole", [0, 1])
def test_one_that_is_taken_up_decides_on_others_in_the_same_moment(whole: int) -> None:
    """Two were lost, one in the other's place. One comes back with a node of the other's."""
    nodes = [node(f"n{number}", gpus=1, fabrics=("ib",), address=f"10.0.0.{number}") for number in range(1, 10)]
    before = ready(cluster(nodes, [model("m", profile(nodes=2, gpus_per_node=1))]))
    first = only(before)
    state = settled(reported(lost(before, *(at.node for at in first.placements)), S.READY), later(35))
    second = only(state)
    now = later(70)
    state = heard(state, now)
    for placement in second.placements:
        state = with_node(state, placement.node, session=None, heard_at_s=NOW.monotonic_s + 35)
    state = settled(state, now)
    assert {first.id, second.id} == {replica.id for replica in state.replicas.values() if replica.lost}
    kept, half = ((first, second), (second, first))[whole]
    for name in (half.placements[0].node, *(at.node for at in kept.placements)):
        state = back(state, name, seconds=75)
    state = at(state, 75)
    assert state.replicas[kept.id].state is ReplicaState.READY
    assert half.id not in state.replicas or state.replicas[half.id].state is ReplicaState.STOPPING
