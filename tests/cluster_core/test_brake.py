"""When many nodes fall silent at once, nothing is moved: it is rather the network's fault, or the control plane's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.actions import Note, PutBrake
from llmgw.cluster.brake import RECENT_S
from llmgw.cluster.model import Cluster, Instant, NodeState, ReplicaState
from llmgw.cluster.reconcile import apply, next_wake_s, reconcile

from .building import NOW, cluster, heard, later, model, node, ready, settled, with_node
from .lab import Lab


def at_work(nodes: int) -> Cluster:
    return ready(cluster([node(f"n{number}") for number in range(1, nodes + 1)], [model("m", replicas=nodes)]))


def silent(state: Cluster, *names: str, since_s: float = NOW.monotonic_s) -> Cluster:
    for name in names:
        state = with_node(state, name, session=None, heard_at_s=since_s)
    return state


def at(state: Cluster, seconds: float) -> Cluster:
    return settled(heard(state, later(seconds)), later(seconds))


def states(state: Cluster) -> list[str]:
    return [state.nodes[name].state.value for name in sorted(state.nodes)]


def words(state: Cluster, seconds: float) -> list[str]:
    actions = reconcile(heard(state, later(seconds)), later(seconds))
    return [action.words for action in actions if isinstance(action, Note) and action.kind == "node.brake"]


@pytest.mark.parametrize(
    ("nodes", "gone", "brakes"),
    [
        (1, 1, False),
        (2, 1, False),
        (2, 2, True),
        (3, 1, False),
        (3, 2, True),
        (4, 2, False),
        (4, 3, True),
        (5, 3, True),
    ],
)
def test_it_takes_two_nodes_and_more_than_half(nodes: int, gone: int, brakes: bool) -> None:
    before = at_work(nodes)
    state = at(silent(before, *[f"n{number}" for number in range(1, gone + 1)]), 31)
    assert (state.brake is not None) is brakes
    assert states(state).count("suspect" if brakes else "lost") == gone
    assert (state.replicas == before.replicas) is brakes


def test_it_says_what_it_is_and_how_it_is_released() -> None:
    state = silent(at_work(3), "n1", "n3")
    assert words(state, 31) == [
        "2 of 3 nodes are silent (n1, n3): more likely the network's fault, or this control plane's, than theirs, so "
        "none of them is judged lost and nothing is moved; if they are gone indeed: llmgw ctl brake release"
    ]
    state = at(state, 31)
    assert state.brake is not None
    assert (state.brake.silent, state.brake.since) == (("n1", "n3"), later(31).wall_s)
    assert reconcile(heard(state, later(500)), later(500)) == ()


def test_it_is_not_put_on_before_a_node_would_be_judged() -> None:
    state = at(silent(at_work(3), "n1", "n2", "n3"), 29)
    assert (state.brake, states(state)) == (None, ["suspect"] * 3)


def test_it_comes_off_when_enough_are_heard_again_and_the_rest_is_judged() -> None:
    state = at(silent(at_work(4), "n1", "n2", "n3"), 31)
    state = with_node(state, "n1", session=2, heard_at_s=later(60).monotonic_s)
    assert words(state, 60) == ["the brake is off: enough nodes are heard again, or were lost long enough ago"]
    state = at(state, 60)
    assert (state.brake, states(state)) == (None, ["ready", "lost", "lost", "ready"])


def test_all_that_return_have_lost_nothing() -> None:
    before = at_work(3)
    state = at(silent(before, "n1", "n2", "n3"), 31)
    for name in state.nodes:
        state = with_node(state, name, session=2, heard_at_s=later(90).monotonic_s)
    state = at(state, 90)
    assert (state.brake, state.replicas) == (None, before.replicas)


def test_released_it_lets_nodes_be_judged_as_ever_and_comes_off_by_itself() -> None:
    state = at(silent(at_work(3), "n1", "n2"), 31)
    assert state.brake is not None
    state = replace(state, brake=replace(state.brake, released=True))
    state = at(state, 40)
    assert states(state) == ["lost", "lost", "ready"]
    assert state.brake is not None
    assert state.brake.released
    wake = next_wake_s(heard(state, later(60)), later(60))
    assert wake is not None
    state = at(state, 40 + RECENT_S)
    assert state.brake is None
    assert states(state) == ["lost", "lost", "ready"]


def test_nodes_that_follow_one_another_into_silence_within_a_minute_are_counted_together() -> None:
    state = at(silent(at_work(5), "n1", "n2"), 31)
    assert states(state).count("lost") == 2
    state = silent(state, "n3", since_s=later(20).monotonic_s)
    state = at(state, 51)
    assert state.brake is not None
    assert state.brake.silent == ("n1", "n2", "n3")
    assert state.nodes["n3"].state is NodeState.SUSPECT


def test_nodes_lost_long_ago_do_not_keep_others_from_being_judged() -> None:
    state = at(silent(at_work(4), "n1", "n2"), 31)
    state = at(silent(at(state, 200), "n3", since_s=later(200).monotonic_s), 231)
    assert (state.brake, states(state)) == (None, ["lost", "lost", "lost", "ready"])


def test_a_wall_clock_that_jumps_does_not_hide_who_was_lost_just_now() -> None:
    state = at(silent(at_work(5), "n1", "n2"), 31)
    state = silent(state, "n3", since_s=later(20).monotonic_s)
    jumped = Instant(later(51).wall_s + 600, later(51).monotonic_s)
    assert settled(heard(state, jumped), jumped).brake is not None


def test_nodes_that_do_not_come_back_after_a_restart_of_the_control_plane_are_counted_when_the_grace_is_over() -> None:
    before = at_work(3)
    state = replace(silent(before, *before.nodes, since_s=0.0), grace_until_s=later(30).monotonic_s)
    assert reconcile(state, later(29)) == ()
    state = with_node(state, "n3", session=2, heard_at_s=later(5).monotonic_s)
    state = at(state, 31)
    assert state.brake is not None
    assert (state.brake.silent, state.replicas) == (("n1", "n2"), before.replicas)
    assert states(state) == ["suspect", "suspect", "ready"]


@pytest.mark.parametrize(
    ("ago_s", "after_s", "counted"),
    [(50, 31, True), (80, 31, True), (-500, 31, True), (-500, 91, False), (80, 91, False), (1000, 31, False)],
)
def test_who_was_lost_under_a_control_plane_before_this_one_counts_by_whichever_clock(
    ago_s: float, after_s: float, counted: bool
) -> None:
    """Its wall clock was another: seconds of it say little, a quarter of an hour says that it was long ago."""
    state = silent(at_work(3), "n1", "n2", since_s=0.0)
    state = with_node(state, "n1", state=NodeState.LOST, since=later(after_s).wall_s - ago_s)
    state = replace(state, grace_until_s=later(30).monotonic_s)
    assert (at(state, after_s).brake is not None) is counted


def test_revoked_nodes_count_for_nothing() -> None:
    state = at_work(4)
    for name in ("n3", "n4"):
        state = with_node(state, name, state=NodeState.REVOKED, session=None)
    state = at(silent(state, "n1", "n2"), 31)
    assert state.brake is not None
    assert state.brake.words.startswith("2 of 2 nodes are silent (n1, n2)")


def test_drained_nodes_that_are_switched_off_count_for_nothing() -> None:
    lab = Lab([node(f"n{number}") for number in range(1, 5)], [model("m", replicas=1)])
    lab.run()
    names = [name for name in lab.state.nodes if not lab.on(name)]
    for name in names:
        lab.drain(name)
    lab.run()
    assert all(lab.is_drained(name) for name in names)
    for name in names:
        lab.lose(name, power=True)
    lab.run()
    assert lab.state.brake is None
    assert {lab.state.nodes[name].state for name in names} == {NodeState.LOST}
    (serves,) = {replica.placements[0].node for replica in lab.ready()}
    lab.lose(serves)
    assert lab.state.brake is None, "what really dies meanwhile is judged as ever"
    assert lab.state.nodes[serves].state is NodeState.LOST


def test_a_silent_node_counts_from_the_moment_at_which_its_drain_is_taken_back() -> None:
    lab = Lab([node(f"n{number}") for number in range(1, 4)], [model("m", replicas=1)])
    lab.run()
    empty, *others = sorted(lab.state.nodes, key=lambda name: len(lab.on(name)))
    lab.drain(empty)
    lab.run()
    assert lab.is_drained(empty)
    # Silent for long enough to be lost, and judged all at once, as by a control plane that was stopped meanwhile.
    state = replace(silent(lab.state, empty, others[0], since_s=lab.now.monotonic_s - 31), drains={})
    first = reconcile(state, lab.now)
    assert [action.brake is not None for action in first if isinstance(action, PutBrake)] == [True]
    after = apply(state, first)
    assert reconcile(after, lab.now) == ()
    assert [after.nodes[name].state for name in (empty, others[0])] == [NodeState.SUSPECT, NodeState.SUSPECT]


def test_a_brake_is_told_as_one_action() -> None:
    actions = reconcile(silent(at_work(2), "n1", "n2"), later(31))
    assert [action.brake for action in actions if isinstance(action, PutBrake)] != []
    assert ReplicaState.FAILED not in {replica.state for replica in at(at_work(2), 31).replicas.values()}
