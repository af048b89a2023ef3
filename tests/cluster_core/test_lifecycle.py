"""States of nodes and replicas, and what time does to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.actions import Note
from llmgw.cluster.lifecycle import NODE_CHANGES, REPLICA_CHANGES, SHARD_CHANGES, STORY_LINES, backoff_s, moved, told
from llmgw.cluster.model import (
    Cluster,
    Drain,
    Instant,
    NodeState,
    Replica,
    ReplicaState,
    ShardState,
)
from llmgw.cluster.reconcile import apply, next_wake_s, reconcile

from .building import NOW, cluster, later, model, node, observed, only, ready, reported, settled, with_node


def state_of(state: Cluster, name: str = "n1") -> tuple[NodeState, str]:
    return state.nodes[name].state, state.nodes[name].why


def test_tables_cover_every_state() -> None:
    assert set(NODE_CHANGES) == set(NodeState)
    assert set(REPLICA_CHANGES) == set(ReplicaState)
    assert set(SHARD_CHANGES) == set(ShardState)


@pytest.mark.parametrize("before", ReplicaState)
@pytest.mark.parametrize("after", ReplicaState)
def test_a_change_that_is_not_in_the_table_raises(before: ReplicaState, after: ReplicaState) -> None:
    replica = Replica(id="m-aaaaa", model="m", state=before, since=0.0)
    if after in REPLICA_CHANGES[before]:
        assert moved(replica, after, "why", NOW).state is after
    else:
        with pytest.raises(AssertionError, match=f"m-aaaaa can't go from {before} to {after}"):
            moved(replica, after, "why", NOW)


def test_each_change_leaves_a_line_and_the_story_is_bounded() -> None:
    replica = Replica(id="m-aaaaa", model="m", state=ReplicaState.FAILED, since=0.0, generation=7)
    replica = moved(replica, ReplicaState.UNPLACED, "no node is registered", NOW)
    line = replica.story[-1]
    assert (line.at, line.generation, line.state, line.why) == (NOW.wall_s, 7, "unplaced", "no node is registered")
    for number in range(STORY_LINES + 5):
        replica = told(replica, str(number), NOW)
    assert [replica.story[0].why, replica.story[-1].why, len(replica.story)] == ["5", str(STORY_LINES + 4), STORY_LINES]


def test_backoff_doubles_from_one_second_to_sixty() -> None:
    assert [backoff_s(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(100_000) == 60


def test_a_node_joins_until_it_has_probed() -> None:
    state = settled(cluster([node("n1", state=NodeState.JOINING, probed=False)]))
    assert state_of(state)[0] is NodeState.JOINING
    state = settled(with_node(state, "n1", probed=True))
    assert state_of(state)[0] is NodeState.READY


def test_a_node_is_suspect_as_soon_as_its_stream_breaks() -> None:
    state = settled(with_node(cluster([node("n1")]), "n1", session=None), later(0.1))
    assert state_of(state) == (NodeState.SUSPECT, "its stream is closed")


def test_silence_makes_suspect_then_lost_and_a_word_makes_ready() -> None:
    state = cluster([node("n1")])
    assert reconcile(state, later(14.99)) == ()
    state = settled(state, later(15))
    assert state_of(state) == (NodeState.SUSPECT, "silent for 15 s")
    assert reconcile(state, later(29.99)) == ()
    state = settled(state, later(31))
    assert state_of(state) == (NodeState.LOST, "silent for 31 s")
    assert reconcile(state, later(3600)) == ()
    state = settled(with_node(state, "n1", heard_at_s=1031.5), later(32))
    assert state_of(state)[0] is NodeState.READY


def test_no_node_is_lost_inside_a_grace_period() -> None:
    state = replace(cluster([node("n1")]), grace_until_s=1090.0)
    state = settled(state, later(89.9))
    assert state_of(state) == (NodeState.SUSPECT, "silent for 90 s")
    assert state_of(settled(state, later(90)))[0] is NodeState.LOST


def test_a_lost_node_stays_lost_when_a_grace_period_begins() -> None:
    state = settled(cluster([node("n1")]), later(31))
    assert reconcile(replace(state, grace_until_s=1100.0), later(40)) == ()


def test_a_restarted_control_plane_holds_nothing_against_nodes_before_the_grace_is_over() -> None:
    state = replace(ready(cluster([node("n1")], [model()])), grace_until_s=1030.0)
    state = with_node(state, "n1", session=None, heard_at_s=0.0, shards=())
    assert reconcile(state, later(29.9)) == ()
    assert next_wake_s(state, later(29.9)) == 1030.0
    state = settled(state, later(30))
    assert state_of(state) == (NodeState.LOST, "not heard from since this control plane started")


def test_a_lost_node_heard_on_its_old_stream_stays_lost_until_it_has_caught_up() -> None:
    state = settled(with_node(cluster([node("n1")]), "n1", caught_up=False), later(31))
    again = with_node(state, "n1", heard_at_s=1040.0)
    assert reconcile(again, later(40)) == ()
    assert state_of(settled(with_node(again, "n1", caught_up=True), later(40)))[0] is NodeState.READY


def test_a_revoked_node_is_not_judged() -> None:
    assert reconcile(cluster([node("n1", state=NodeState.REVOKED)]), later(1)) == ()
    assert reconcile(cluster([node("n1", state=NodeState.REVOKED)]), later(1000)) == ()


def drained(*names: str) -> dict[str, Drain]:
    return {name: Drain(node=name, since=NOW.wall_s) for name in names}


def test_a_node_to_be_emptied_is_draining_and_then_drained_until_that_is_taken_back() -> None:
    state = replace(ready(cluster([node("n1")], [model()])), drains=drained("n1"))
    assert state_of(settled(state))[0] is NodeState.DRAINING
    empty = replace(cluster([node("n1")]), drains=drained("n1"))
    state = settled(empty)
    assert state_of(state) == (NodeState.DRAINED, "nothing is placed on it, and nothing runs there")
    runs = settled(with_node(state, "n1", shards=(observed("x-aaaaa/0", 1, ShardState.LOADING),)))
    assert state_of(runs) == (NodeState.DRAINING, "something runs on it again")
    assert state_of(settled(replace(state, drains={})))[0] is NodeState.READY
    assert state_of(settled(replace(with_node(state, "n1", probed=False), drains={})))[0] is NodeState.JOINING


def test_a_node_to_be_emptied_is_lost_while_it_is_lost_and_to_be_emptied_again_when_it_returns() -> None:
    """Taken down for maintenance and switched off: shown lost, not running, and not forgotten to be drained."""
    state = settled(replace(cluster([node("n1")]), drains=drained("n1")))
    state = settled(state, later(20))
    assert (state.nodes["n1"].state, state.nodes["n1"].silent) == (NodeState.DRAINED, True)
    state = settled(with_node(state, "n1", session=None), later(31))
    assert state_of(state) == (NodeState.LOST, "silent for 31 s")
    state = settled(with_node(state, "n1", session=2, heard_at_s=1040.0), later(40))
    assert state_of(state)[0] is NodeState.DRAINED


def test_a_node_that_is_revoked_is_not_to_be_emptied_any_more() -> None:
    state = replace(cluster([node("n1", state=NodeState.REVOKED, session=None)]), drains=drained("n1"))
    actions = reconcile(state, NOW)
    assert apply(state, actions).drains == {}
    assert [action.words for action in actions if isinstance(action, Note)] == [
        "n1 is not drained any more: it has been revoked"
    ]


def test_a_control_plane_that_has_just_started_knows_nothing_of_what_runs_on_a_drained_node() -> None:
    state = replace(cluster([node("n1", state=NodeState.DRAINING)]), drains=drained("n1"), grace_until_s=1030.0)
    state = with_node(state, "n1", session=None, heard_at_s=0.0)
    assert state_of(settled(state, later(5)))[0] is NodeState.DRAINING


def test_next_wake_is_the_first_time_at_which_something_happens() -> None:
    state = cluster([node("n1")])
    for expected in (1015.0, 1030.0):
        now_s = next_wake_s(state, NOW)
        assert now_s is not None
        assert now_s == expected
        before = Instant(NOW.wall_s, now_s - 0.001)
        assert reconcile(state, before) == ()
        at = Instant(NOW.wall_s, now_s)
        assert reconcile(state, at) != ()
        state = apply(state, reconcile(state, at))
    assert next_wake_s(state, later(40)) is None


def test_next_wake_knows_backoff_and_forgiveness() -> None:
    state = settled(reported(ready(cluster([node("n1")], [model()])), ShardState.FAILED))
    state = settled(with_node(state, "n1", shards=()))
    assert next_wake_s(state, NOW) == 1001.0
    failed_once = replace(only(state), state=ReplicaState.READY, retry_at=None, since=NOW.wall_s)
    state = replace(state, nodes={}, replicas={failed_once.id: failed_once})
    assert next_wake_s(state, NOW) == 1600.0
