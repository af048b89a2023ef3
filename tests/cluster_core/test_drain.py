"""Drains: the plan that is shown is what is carried out, one replica at a time, its replacement ready first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmgw.cluster import drain as drains
from llmgw.cluster import rolling
from llmgw.cluster.beside import nodes_of
from llmgw.cluster.explain import why
from llmgw.cluster.model import DrainState, MoveState, NodeState, Replica, ReplicaState, ShardState
from llmgw.cluster.reconcile import reconcile, routes
from llmgw.cluster.wording import clock

from .building import model, node, profile
from .lab import Lab, on_fabric

ONE = profile(gpus_per_node=1)


def roomy(*, replicas: int = 1, gpus: int = 2) -> Lab:
    """Two nodes, everything on the first at the start, and room for it on the second."""
    lab = Lab([node("n1", gpus=gpus)], [model("m", ONE, replicas=replicas)])
    lab.run()
    lab.add(node("n2", gpus=gpus))
    lab.run()
    assert {nodes_of(replica) for replica in lab.ready()} == {("n1",)}
    return lab


def full() -> Lab:
    """Two nodes without a free GPU."""
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE, replicas=2)])
    lab.run()
    assert len(lab.ready()) == 2
    return lab


def over_two_nodes() -> Lab:
    """A replica over n1 and n2 on fabric ib-a; n3 and n4 on ib-b can take it."""
    lab = Lab(
        [on_fabric("n1", "ib-a", gpus=4), on_fabric("n2", "ib-a", gpus=4)],
        [model("m", profile(nodes=2, gpus_per_node=4, tensor_parallel=8))],
    )
    lab.run()
    lab.add(on_fabric("n3", "ib-b", gpus=4))
    lab.add(on_fabric("n4", "ib-b", gpus=4))
    lab.run()
    (replica,) = lab.ready()
    assert nodes_of(replica) == ("n1", "n2")
    return lab


# -- the plan


def test_the_plan_says_where_each_goes_and_changes_nothing() -> None:
    lab = roomy(replicas=2)
    before = lab.state
    planned = drains.plan(lab.state, "n1", now=lab.now)
    assert lab.state is before
    assert [move.replica for move in planned.moves] == sorted(replica.id for replica in lab.ready())
    assert [(move.targets, move.weights_there, move.state) for move in planned.moves] == [
        (("n2",), True, MoveState.PENDING)
    ] * 2
    assert (planned.state, planned.why, drains.refusal(planned)) == (DrainState.MOVING, "2 replicas to move", None)
    assert drains.plan(lab.state, "n1", now=lab.now) == planned


def test_the_plan_says_whether_the_weights_are_there() -> None:
    lab = Lab([node("n1", weights=("/w",))], [model("m", profile("c", "llamacpp", memory_bytes=1), source="/w")])
    lab.run()
    lab.add(node("n2"))
    assert [(m.targets, m.weights_there) for m in drains.plan(lab.state, "n1", now=lab.now).moves] == [(("n2",), False)]
    lab.add(node("n3", weights=("/w",)))
    assert [(m.targets, m.weights_there) for m in drains.plan(lab.state, "n1", now=lab.now).moves] == [(("n3",), True)]


def test_a_full_cluster_refuses_at_once_says_what_is_short_and_which_choices_there_are() -> None:
    """A rollout that waits for room which only its own end would free stands for ever: it is not begun."""
    lab = full()
    (replica,) = lab.on("n1")
    before = lab.state
    planned = lab.drain("n1")
    assert lab.state is before
    assert reconcile(lab.state, lab.now) == ()
    words = drains.refusal(planned)
    assert words is not None
    assert words.startswith(
        f"n1 can't be drained now, and nothing was changed: {replica.id} of m has no other place: "
        "2 nodes: 1 draining, 1 short of GPUs; nearest n2: 0 of 1 GPU free, 1 needed"
    )
    _, _, choices = words.partition("\nChoices:\n")
    assert [line.split(":")[0].strip() for line in choices.splitlines()] == [
        "make room for it",
        "--wait",
        "--allow-downtime m",
        "--force",
    ]


def test_a_plan_counts_what_it_has_placed_itself() -> None:
    lab = Lab([node("n1", gpus=2), node("n2", gpus=1)], [model("m", ONE, replicas=3)])
    lab.run()
    lab.add(node("n3", gpus=1))
    planned = lab.drain("n1")
    assert [move.state for move in planned.moves] == [MoveState.PENDING, MoveState.BLOCKED]
    assert planned.moves[0].targets == ("n3",)
    assert drains.refusal(planned) is not None
    assert "n1" not in lab.state.drains


def test_the_largest_are_planned_first_so_that_small_ones_do_not_break_up_their_room() -> None:
    large = model("z-large", profile(gpus_per_node=2, node_selector={"pool": "big"}))
    lab = Lab([node("n1", gpus=3, labels={"pool": "big"})], [model("a-small", ONE), large])
    lab.run()
    lab.add(node("n2", gpus=2, labels={"pool": "big"}))
    lab.add(node("n3", gpus=8))
    lab.drain("n1")
    assert [(move.model, move.targets) for move in lab.state.drains["n1"].moves] == [
        ("z-large", ("n2",)),
        ("a-small", ("n3",)),
    ]
    lab.run()
    assert lab.is_drained("n1")


def test_an_empty_node_is_drained_at_once() -> None:
    lab = roomy()
    assert lab.drain("n2").why == "nothing is placed on n2"
    assert lab.is_drained("n2")


def test_a_plan_takes_aliases_for_the_models_that_they_mean() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE, aliases=("a",))])
    lab.run()
    planned = lab.drain("n1", allow_downtime=("a",))
    assert planned.allow_downtime == ("m",)
    assert drains.refusal(planned) is None


# -- carrying it out


def test_replicas_move_one_at_a_time_each_after_its_replacement_is_ready() -> None:
    lab = roomy(replicas=2)
    first, second = sorted(replica.id for replica in lab.ready())
    lab.drain("n1")
    lab.until(lambda: lab.move("n1", first).state is MoveState.MOVED)
    assert lab.state.replicas[second].state is ReplicaState.READY
    lab.run()
    assert lab.is_drained("n1")
    assert {nodes_of(replica) for replica in lab.ready()} == {("n2",)}
    assert len(lab.ready()) == 2
    move = lab.move("n1", first)
    assert set(move.seconds) == {"starting", "shifting", "finishing", "stopping"}
    (words,) = lab.told("drain.done")
    assert words.startswith("n1 is drained: 2 replicas moved, 0 requests finished, 0 broken; starting ")
    assert lab.state.nodes["n1"].state is NodeState.DRAINED


def test_requests_in_flight_are_waited_for_and_counted() -> None:
    """Whoever streams at the node being drained streams on to the end."""
    lab = roomy()
    (old,) = lab.ready()
    lab.drain("n1")
    door = lab.doors["gw"]
    door.in_flight[old.id] = 20
    door.acknowledges = False
    lab.until(lambda: lab.move("n1").state is MoveState.SHIFTING)
    for _ in range(30):
        lab.tick()
    assert lab.move("n1").why == "gateway gw has not taken up the table without it yet"
    door.acknowledges = True
    lab.until(lambda: lab.move("n1").state is MoveState.FINISHING)
    for _ in range(30):
        lab.tick()
    assert lab.state.replicas[old.id].state is ReplicaState.DRAINING
    door.finish(old.id, 20)
    lab.run()
    assert lab.is_drained("n1")
    assert (lab.move("n1").finished, lab.move("n1").broken) == (20, 0)
    assert "20 requests finished, 0 broken" in lab.told("drain.done")[0]


def test_a_deadline_ends_the_wait_for_requests_in_flight() -> None:
    lab = roomy()
    (old,) = lab.ready()
    lab.drain("n1", in_flight_s=40.0)
    lab.doors["gw"].in_flight[old.id] = 1
    lab.until(lambda: lab.move("n1").state is MoveState.FINISHING)
    waited = lab.now.monotonic_s
    lab.until(lambda: lab.move("n1").state is MoveState.STOPPING)
    assert 38.0 <= lab.now.monotonic_s - waited <= 41.0


def test_a_gateway_that_is_cut_off_is_waited_for_by_its_lease_and_named() -> None:
    lab = roomy()
    lab.drain("n1")
    lab.tick()
    lab.doors["gw"].connected = False
    lab.until(lambda: lab.move("n1").state is MoveState.SHIFTING)
    assert "gateway gw is not connected" in lab.move("n1").why
    since = lab.doors["gw"].heard_at_s
    lab.until(lambda: lab.move("n1").state is MoveState.STOPPING)
    assert lab.now.monotonic_s - since >= lab.state.lease_s


def test_draining_the_node_of_a_worker_rank_replaces_the_whole_replica() -> None:
    """Ranks that serve nothing themselves are not stopped under the leader's open streams."""
    lab = over_two_nodes()
    (old,) = lab.ready()
    assert lab.drain("n2").moves[0].targets == ("n3", "n4")
    lab.doors["gw"].in_flight[old.id] = 3
    lab.until(lambda: lab.move("n2").state is MoveState.FINISHING)
    for at, rank in (("n1", 0), ("n2", 1)):
        assert lab.engines[at][old.shard_id(rank)].state is ShardState.READY
    lab.doors["gw"].finish(old.id, 3)
    lab.run()
    (new,) = lab.ready()
    assert (nodes_of(new), new.fabric) == (("n3", "n4"), "ib-b")
    assert lab.is_drained("n2")
    assert lab.state.nodes["n1"].state is NodeState.READY


def wide_and_small() -> Lab:
    """A replica over n1 and all of n2, and a small one on n1; n3 and n4 have just the room for the wide one."""
    wide = model("wide", profile(nodes=2, gpus_per_node=2, tensor_parallel=4))
    lab = Lab([on_fabric("n1", "ib-a", gpus=3), on_fabric("n2", "ib-a", gpus=2)], [wide])
    lab.run()
    lab.edit(wide, model("small", ONE))
    lab.run()
    lab.add(on_fabric("n3", "ib-b", gpus=2))
    lab.add(on_fabric("n4", "ib-b", gpus=2))
    return lab


def test_what_a_replica_leaves_on_its_other_nodes_is_room_for_the_next() -> None:
    lab = wide_and_small()
    lab.drain("n1")
    assert [move.targets for move in lab.state.drains["n1"].moves] == [("n3", "n4"), ("n2",)]
    lab.tick()
    again = drains.plan(lab.state, "n1", now=lab.now, force=True)
    assert [(move.state, move.targets) for move in again.moves] == [
        (MoveState.STARTING, ("n3", "n4")),
        (MoveState.PENDING, ("n2",)),
    ]
    lab.run()
    assert lab.is_drained("n1")
    assert [nodes_of(replica) for replica in lab.ready("small")] == [("n2",)]


def test_it_goes_where_the_plan_said_also_where_a_better_place_has_come_up_since() -> None:
    lab = roomy(replicas=2)
    lab.drain("n1")
    lab.add(node("n3", gpus=1))
    assert drains.plan(lab.state, "n1", now=lab.now).moves[1].targets == ("n3",)
    lab.run()
    assert {nodes_of(replica) for replica in lab.ready()} == {("n2",)}


def test_requests_are_not_shifted_to_a_replacement_on_a_node_that_does_not_answer() -> None:
    lab = over_two_nodes()
    (old,) = lab.ready()
    lab.slow = lambda shard: shard.id.endswith("/0")
    lab.drain("n1")
    lab.until(lambda: any(engine.state is ShardState.READY for engine in lab.engines["n4"].values()))
    lab.mute("n4")
    for _ in range(4):
        lab.tick(5.0)
    assert lab.state.nodes["n4"].state is NodeState.SUSPECT
    lab.slow = lambda shard: False
    lab.tick()
    (new,) = lab.on("n4")
    assert (new.state, lab.state.replicas[old.id].state) == (ReplicaState.READY, ReplicaState.READY)
    lab.hear("n4")
    lab.run()
    assert lab.is_drained("n1")


@pytest.mark.parametrize("way", ["mute", "cut"])
def test_a_node_that_is_drained_and_falls_silent_is_used_last_until_it_answers_again(way: str) -> None:
    lab = full()
    (old,) = lab.on("n1")
    lab.drain("n1", wait=True)

    def preferred() -> dict[str, bool]:
        return {endpoint.replica: endpoint.preferred for route in routes(lab.state) for endpoint in route.endpoints}

    assert set(preferred().values()) == {True}
    getattr(lab, way)("n1")
    lab.tick(16.0)
    assert lab.state.nodes["n1"].state is NodeState.DRAINING
    assert [name for name, first in preferred().items() if not first] == [old.id]
    assert "node n1, which is draining, does not answer" in why(lab.state, "m").summary
    assert lab.told("node.suspect") == ["node n1, which is draining, does not answer any more"]
    lab.hear("n1") if way == "mute" else lab.connect("n1")
    lab.tick()
    assert set(preferred().values()) == {True}
    assert lab.told("node.draining")[-1] == "node n1, which is draining, answers again"


def test_a_node_that_does_not_answer_is_not_drained_before_it_has_said_what_it_runs() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE)])
    lab.run()
    (empty,) = (name for name in lab.state.nodes if not lab.on(name))
    lab.mute(empty)
    lab.tick(16.0)
    lab.drain(empty)
    drain = lab.state.drains[empty]
    assert (drain.state, lab.is_drained(empty)) == (DrainState.MOVING, False)
    assert f"{empty} does not answer: whether it still runs anything is not known" in drain.why
    lab.hear(empty)
    lab.tick()
    assert lab.is_drained(empty)
    assert lab.state.drains[empty].state is DrainState.DONE


def test_a_replacement_is_dropped_in_the_moment_in_which_a_drain_of_its_own_node_begins() -> None:
    ours = model("m", profile(gpus_per_node=1, node_selector={"m": "yes"}))
    lab = Lab([node("n1", gpus=1, labels={"m": "yes"})], [ours])
    lab.run()
    lab.add(node("n2", gpus=2, labels={"m": "yes", "x": "yes"}))
    lab.edit(ours, model("x", profile(gpus_per_node=1, node_selector={"x": "yes"})))
    lab.run()
    lab.slow = lambda shard: shard.model == "m"
    lab.carry_out(rolling.restart(lab.state, "m", False, lab.now))
    lab.tick()
    (new,) = lab.on("n2")
    lab.drain("n2", wait=True)
    lab.tick()
    assert lab.state.drains["n2"].state is DrainState.WAITING
    lab.add(node("n3", gpus=1, labels={"x": "yes"}))
    assert lab.state.drains["n2"].state is DrainState.MOVING
    assert new.id not in lab.state.replicas or lab.state.replicas[new.id].state is ReplicaState.STOPPING


def test_a_replacement_that_is_held_on_a_node_whose_drain_waits_is_dropped_where_there_is_no_other_place() -> None:
    """Else the drain that it was made for would wait for it for ever, and an operator's restart with that."""
    pair = model("m", profile(nodes=2, gpus_per_node=1))
    large = model("x", profile(gpus_per_node=2))
    lab = Lab([on_fabric("n3", "ib", gpus=3)], [large, model("y", ONE)])
    lab.run()
    lab.add(on_fabric("n1", "ib", gpus=1))
    lab.add(on_fabric("n2", "ib", gpus=2))
    lab.edit(large, model("y", ONE), pair)
    lab.run()
    (old,) = lab.ready()
    lab.edit(large, pair)
    lab.run()
    assert (nodes_of(old), [nodes_of(replica) for replica in lab.ready("x")]) == (("n1", "n2"), [("n3",)])
    lab.fetching = lambda shard: shard.model == "m"
    lab.drain("n1")
    lab.tick()
    (new,) = (replica for replica in lab.replicas() if replica.replaces == old.id)
    assert (new.state, "n3" in nodes_of(new)) == (ReplicaState.PREPARING, True)
    lab.drain("n3", wait=True)
    lab.run()
    assert lab.state.drains["n3"].state is DrainState.WAITING
    assert [replica.id for replica in lab.replicas()] == [old.id]
    assert lab.move("n1").state is MoveState.BLOCKED
    lab.fetching = lambda shard: False
    lab.add(on_fabric("n4", "ib", gpus=1))
    lab.run()
    assert lab.is_drained("n1")
    assert [sorted(nodes_of(replica)) for replica in lab.ready()] == [["n2", "n4"]]


def preparing_beside_two_that_serve() -> Lab:
    """x and y serve on n2, and a is prepared on n1 and n2."""
    lab = Lab([on_fabric("n2", "ib", gpus=3)], [model("x", ONE), model("y", ONE)])
    lab.run()
    lab.add(on_fabric("n1", "ib", gpus=1))
    lab.fetching = lambda shard: shard.model == "a"
    lab.edit(model("x", ONE), model("y", ONE), model("a", profile(nodes=2, gpus_per_node=1)))
    lab.tick()
    (preparing,) = lab.replicas("a")
    assert (preparing.state, nodes_of(preparing)) == (ReplicaState.PREPARING, ("n1", "n2"))
    return lab


@pytest.mark.parametrize("allowed", [(), ("x",)])
@pytest.mark.parametrize("room", ["before", "after"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_drain_that_waits_does_not_begin_with_the_place_of_what_is_made_elsewhere(
    allowed: tuple[str, ...], room: str, fits: bool
) -> None:
    lab = preparing_beside_two_that_serve()
    if not fits:
        nowhere = profile(nodes=2, gpus_per_node=1, node_selector={"rack": "r21"})
        lab.edit(model("x", ONE), model("y", ONE), model("a", nowhere))
    before = {replica.id for name in ("x", "y") for replica in lab.ready(name)}
    (held,) = lab.replicas("a")
    third = on_fabric("n3", "ib", gpus=1)  # room for one rank of a, or for one of the two
    if room == "before":
        lab.add(third)
    lab.drain("n2", wait=True, allow_downtime=allowed)
    if room == "after":
        assert lab.state.replicas[held.id].state is ReplicaState.PREPARING
        lab.add(third)
    assert lab.state.replicas[held.id].state is ReplicaState.STOPPING
    lab.fetching = lambda shard: False
    lab.run()
    assert {replica.id for name in ("x", "y") for replica in lab.ready(name)} == before, "all serve on"
    assert [nodes_of(replica) for replica in lab.ready("a")] == [("n1", "n3")]
    assert (lab.state.drains["n2"].state, lab.told("drain.moving")) == (DrainState.WAITING, [])


def test_a_node_that_is_silent_when_it_need_not_be_emptied_any_more_is_suspect() -> None:
    lab = full()
    lab.drain("n1", wait=True)
    lab.mute("n1")
    lab.tick(16.0)
    lab.undrain("n1")
    assert (lab.state.nodes["n1"].state, lab.state.nodes["n1"].silent) == (NodeState.SUSPECT, False)


def test_one_that_only_takes_over_from_another_does_not_stand_in_for_one_that_was_lost() -> None:
    lab = full()
    (old,), (cut_off,) = lab.on("n1"), lab.on("n2")
    lab.add(node("n3", gpus=1))
    lab.slow = lambda shard: True
    lab.drain("n1")
    lab.until(lambda: any(engine.state is ShardState.STARTING for engine in lab.engines["n3"].values()))
    lab.lose("n2")
    lab.mute("n3")
    lab.tick(16.0)
    (new,) = lab.on("n3")
    lab.engines["n3"][new.shard_id(0)].state = ShardState.READY
    lab._report("n3")
    lab.connect("n2")
    assert lab.state.replicas[new.id].state is lab.state.replicas[old.id].state is ReplicaState.READY
    assert lab.state.replicas[cut_off.id].state is ReplicaState.READY, "it stopped, and two are wanted"
    lab.hear("n3")
    lab.run()
    assert {cut_off.id, new.id} == {replica.id for replica in lab.ready()}
    assert old.id not in lab.state.replicas


def test_what_was_placed_on_the_node_and_not_begun_there_is_made_elsewhere() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    (placed,) = lab.on("n1")
    assert placed.state is ReplicaState.PLACING
    lab.drain("n1", wait=True)
    lab.run()
    assert [(replica.state, nodes_of(replica)) for replica in lab.replicas()] == [(ReplicaState.UNPLACED, ())]
    assert lab.is_drained("n1")


def test_a_replica_that_is_not_ready_is_stopped_and_made_elsewhere_at_once() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.slow = lambda shard: True
    lab.until(lambda: bool(lab.on("n1")) and lab.on("n1")[0].state is ReplicaState.STARTING)
    lab.add(node("n2", gpus=1))
    (old,) = lab.on("n1")
    assert lab.drain("n1").moves[0].why == "is not ready: it is started anew there"
    assert lab.state.replicas[old.id].state is ReplicaState.STOPPING
    lab.slow = lambda shard: False
    lab.run()
    assert lab.is_drained("n1")
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]


def test_a_replica_that_was_ready_and_is_not_just_now_keeps_its_requests_until_there_is_another() -> None:
    lab = roomy()
    (old,) = lab.ready()
    lab.slow = lambda shard: shard.id.startswith(old.id)
    lab.engines["n1"][old.shard_id(0)].state = ShardState.STARTING
    lab.tick()
    assert lab.state.replicas[old.id].state is ReplicaState.STARTING
    lab.drain("n1")
    assert lab.move("n1").state is MoveState.STARTING
    assert lab.state.replicas[old.id].state is ReplicaState.STARTING
    lab.run()
    assert lab.is_drained("n1")


# -- where not everything can move


def test_what_waits_begins_by_itself_when_everything_can_move() -> None:
    lab = full()
    (old,) = lab.on("n1")
    lab.drain("n1", wait=True)
    lab.run()
    drain = lab.state.drains["n1"]
    assert (drain.state, lab.state.nodes["n1"].state) == (DrainState.WAITING, NodeState.DRAINING)
    assert drain.why.startswith(f"waits until everything can move: {old.id} of m has no other place: ")
    assert lab.state.replicas[old.id].state is ReplicaState.READY
    assert "node n1 waits to be drained" in why(lab.state, "m").summary
    lab.add(node("n3", gpus=1))
    lab.run()
    assert lab.is_drained("n1")
    assert lab.told("drain.moving") != []


def test_a_waiting_drain_is_the_same_while_nothing_changes() -> None:
    lab = full()
    lab.drain("n1", wait=True)
    lab.run()
    before = lab.state.drains["n1"]
    lab.tick(30.0)
    assert lab.state.drains["n1"] == before


@pytest.mark.parametrize("options", [{"allow_downtime": ("m",)}, {"force": True}])
def test_where_downtime_is_allowed_the_original_stops_first(options: dict[str, object]) -> None:
    lab = full()
    (old,) = lab.on("n1")
    planned = lab.drain("n1", **options)
    assert planned.moves[0].downtime
    assert planned.moves[0].why.startswith("stops before there is another place for it: ")
    assert lab.state.replicas[old.id].state is ReplicaState.DRAINING
    lab.run()
    assert lab.is_drained("n1")
    assert [replica.state for replica in lab.replicas()] == [ReplicaState.READY, ReplicaState.UNPLACED]
    assert lab.move("n1").downtime
    (words,) = lab.told("drain.done")
    assert words.startswith("n1 is drained: 0 replicas moved, 1 stopped without a replacement, 0 requests finished")


def test_downtime_that_is_allowed_is_not_taken_where_there_is_room() -> None:
    lab = roomy()
    assert not lab.drain("n1", force=True).moves[0].downtime
    assert lab.move("n1").state is MoveState.STARTING


def test_downtime_of_one_model_does_not_let_another_stop() -> None:
    lab = Lab([node("n1", gpus=2)], [model("a", ONE), model("b", ONE)])
    lab.run()
    words = drains.refusal(lab.drain("n1", allow_downtime=("a",)))
    assert words is not None
    assert "of b has no other place" in words
    assert "of a has no other place" not in words


def test_a_move_that_turns_impossible_midway_is_blocked_in_words_and_tried_again() -> None:
    lab = roomy(replicas=2)
    first, second = sorted(replica.id for replica in lab.ready())
    lab.drain("n1")
    lab.until(lambda: lab.move("n1", first).state is MoveState.STOPPING)
    described = lab.state.nodes["n2"].inventory
    broken = node("n2", gpus=1).inventory
    lab.describe("n2", broken)
    lab.run()
    move = lab.move("n1", second)
    assert move.state is MoveState.BLOCKED
    assert "0 of 1 GPU free, 1 needed" in move.why
    assert "--allow-downtime m" in move.why
    assert lab.told("drain.blocked") == [f"{second} of m can't leave n1: {move.why}"]
    assert lab.state.replicas[second].state is ReplicaState.READY
    assert "can't be drained of it" in why(lab.state, "m").summary
    assert lab.state.drains["n1"].why.startswith(f"1 of 2 replicas moved; {second} is blocked: ")
    lab.describe("n2", described)
    lab.run()
    assert lab.is_drained("n1")


def test_a_drain_that_is_asked_for_again_changes_its_options_and_goes_on() -> None:
    lab = roomy()
    lab.drain("n1")
    lab.tick()
    before = lab.state.drains["n1"]
    lab.drain("n1", in_flight_s=5.0, force=True)
    after = lab.state.drains["n1"]
    assert (after.in_flight_s, after.force, after.since) == (5.0, True, before.since)
    assert after.moves[0].replacement == before.moves[0].replacement
    lab.run()
    assert lab.is_drained("n1")


def test_a_blocked_drain_goes_on_when_it_is_asked_for_again_with_force() -> None:
    lab = full()
    lab.drain("n1", wait=True)
    lab.run()
    lab.drain("n1", force=True)
    lab.run()
    assert lab.is_drained("n1")


def test_a_replacement_that_never_gets_ready_is_given_up_and_tried_again_later() -> None:
    lab = roomy()
    (old,) = lab.ready()
    lab.broken = lambda shard: shard.placement.node == "n2"
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    words = lab.move("n1").why
    assert "failed 3 times in a row" in words
    assert "no such layer" in words
    assert "another is tried at" in words
    assert [replica.id for replica in lab.replicas() if replica.state is ReplicaState.READY] == [old.id]
    lab.broken = lambda shard: False
    lab.run()
    assert lab.is_drained("n1")


def test_force_empties_the_node_though_nothing_gets_ready_elsewhere() -> None:
    lab = roomy()
    lab.broken = lambda shard: shard.placement.node == "n2"
    lab.drain("n1", force=True)
    lab.until(lambda: lab.is_drained("n1"))


# -- whatever happens in whichever phase

PHASES = (MoveState.STARTING, MoveState.SHIFTING, MoveState.FINISHING, MoveState.STOPPING, MoveState.MOVED)


def at_phase(phase: MoveState) -> tuple[Lab, Replica]:
    """A drain of n1 whose one move is in that phase, with room for the replica on n2 and on n3."""
    lab = roomy()
    lab.add(node("n3", gpus=2))
    (old,) = lab.ready()
    door = lab.doors["gw"]
    door.acknowledges, door.in_flight[old.id] = False, 2
    lab.drain("n1")
    if phase is not MoveState.STARTING:
        lab.until(lambda: lab.move("n1").state is MoveState.SHIFTING)
    if phase is not MoveState.SHIFTING:
        door.acknowledges = True
    if phase is MoveState.FINISHING:
        lab.until(lambda: lab.move("n1").state is phase)
    if phase in (MoveState.STOPPING, MoveState.MOVED):
        lab.until(lambda: lab.move("n1").state is MoveState.FINISHING)
        door.finish(old.id, 2)
        lab.until(lambda: lab.move("n1").state is phase)
    assert lab.move("n1").state is phase
    return lab, old


def all_go_on(lab: Lab, old: Replica) -> None:
    door = lab.doors["gw"]
    door.acknowledges = True
    lab.until(lambda: not lab.state.replicas.get(old.id) or old.id not in door.may_send or not lab.tick())
    if door.in_flight.get(old.id):
        door.finish(old.id, door.in_flight[old.id])
    lab.run()


def undrain(lab: Lab, old: Replica) -> None:
    lab.undrain("n1")


def restart_control(lab: Lab, old: Replica) -> None:
    lab.restart_control()
    for _ in range(3):
        lab.tick()
    lab.come_back()


def restart_agents(lab: Lab, old: Replica) -> None:
    for name in ("n1", "n2", "n3"):
        lab.restart_agent(name)


def crash_replacement(lab: Lab, old: Replica) -> None:
    (new,) = (replica for replica in lab.replicas() if replica.id != old.id)
    at = nodes_of(new)[0]
    if new.shard_id(0) not in lab.engines[at]:
        lab.tick()
    lab.engines[at][new.shard_id(0)].state = ShardState.FAILED
    lab.tick()


def lose_target(lab: Lab, old: Replica) -> None:
    (new,) = (replica for replica in lab.replicas() if replica.id != old.id)
    lab.lose(nodes_of(new)[0])


def crash_original(lab: Lab, old: Replica) -> None:
    engine = lab.engines["n1"].get(old.shard_id(0))
    if engine is not None and engine.state is ShardState.READY:
        engine.state = ShardState.FAILED
    lab.tick()


def lose_original(lab: Lab, old: Replica) -> None:
    lab.lose("n1")
    lab.run()
    lab.connect("n1")


EVENTS = (undrain, restart_control, restart_agents, crash_replacement, lose_target, crash_original, lose_original)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_each_phase_survives_each_event(phase: MoveState, event: Callable[[Lab, Replica], None]) -> None:
    lab, old = at_phase(phase)
    event(lab, old)
    all_go_on(lab, old)
    (left,) = (replica for replica in lab.replicas() if not replica.lost)
    assert left.state is ReplicaState.READY
    if event is undrain:
        assert lab.state.nodes["n1"].state is NodeState.READY
        assert (left.id == old.id) is (phase is MoveState.STARTING)
    else:
        assert lab.is_drained("n1")
        assert nodes_of(left) != ("n1",)


def test_a_drain_that_is_taken_back_while_it_waits_leaves_everything_as_it_was() -> None:
    lab = full()
    before = lab.replicas()
    lab.drain("n1", wait=True)
    lab.undrain("n1")
    lab.run()
    assert [replica.id for replica in lab.ready()] == [replica.id for replica in before]
    assert lab.state.nodes["n1"].state is NodeState.READY


def test_a_node_that_is_switched_off_while_it_drains_is_lost_and_shows_nothing_running() -> None:
    lab = roomy()
    lab.doors["gw"].acknowledges = False
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.SHIFTING)
    lab.lose("n1", power=True)
    assert lab.state.nodes["n1"].state is NodeState.LOST
    assert not any(replica.state is ReplicaState.READY for replica in lab.on("n1"))
    lab.doors["gw"].acknowledges = True
    lab.run()
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]
    drain = lab.state.drains["n1"]
    assert drain.state is DrainState.MOVING
    assert drain.why == f"1 of 1 replica moved; {lost_since(lab)}"
    lab.connect("n1")
    lab.run()
    assert lab.is_drained("n1")
    lab.lose("n1", power=True)
    lab.run()
    assert lab.state.drains["n1"].state is DrainState.DONE, "what is drained may be switched off"


# -- what was lost


def lost_since(lab: Lab) -> str:
    since = clock(lab.state.nodes["n1"].since)
    return f"n1 is lost since {since}: it is drained once it is back, or `llmgw ctl node remove n1` forgets it"


def test_a_drain_of_a_lost_node_says_what_was_lost_with_it() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    (old,) = lab.ready()
    lab.lose("n1", power=True)
    planned = lab.drain("n1")
    (move,) = planned.moves
    words = "was lost with its node, and n1 may bring it back"
    assert (move.replica, move.state, move.why) == (old.id, MoveState.BLOCKED, words)
    assert (planned.why, drains.refusal(planned)) == (f"1 replica to move; {old.id} of m {words}", None)
    drain = lab.state.drains["n1"]
    assert drain.state is DrainState.MOVING
    assert drain.why == f"0 of 1 replica moved; {old.id} is blocked: {words}; {lost_since(lab)}"
    lab.connect("n1")
    lab.run()
    assert lab.is_drained("n1")
    assert "0 replicas moved, 1 lost with a node, 0 requests finished" in lab.told("drain.done")[0]


def test_a_drain_of_a_lost_node_on_which_nothing_is_placed_waits_for_it() -> None:
    lab = Lab([node("n1", gpus=1)], [])
    lab.lose("n1")
    lab.drain("n1")
    lab.run()
    drain = lab.state.drains["n1"]
    assert (drain.state, drain.why) == (DrainState.MOVING, f"nothing is placed on n1; {lost_since(lab)}")
    lab.connect("n1")
    lab.run()
    assert lab.is_drained("n1")


def test_asked_again_while_its_node_is_lost_a_drain_forgets_no_replica() -> None:
    lab = roomy()
    (old,) = lab.ready()
    lab.slow = lambda shard: True
    lab.drain("n1")
    lab.tick()
    lab.lose("n1")
    before = lab.state.drains["n1"]
    assert (before.moves[0].state, before.moves[0].replacement is None) == (MoveState.BLOCKED, False)
    lab.drain("n1", force=True)
    after = lab.state.drains["n1"]
    assert after.force
    assert (after.moves, after.why) == (before.moves, before.why)
    assert after.why.startswith(f"0 of 1 replica moved; {old.id} is blocked: was lost with its node")


def test_a_drain_that_waits_goes_on_waiting_for_what_was_lost() -> None:
    lab = full()
    (old,) = lab.on("n1")
    lab.drain("n1", wait=True)
    lab.lose("n1")
    drain = lab.state.drains["n1"]
    assert drain.state is DrainState.WAITING
    words = f"{old.id} of m was lost with its node, and n1 may bring it back"
    assert drain.why == f"waits until everything can move: {words}"
    lab.connect("n1")
    lab.run()
    assert lab.state.drains["n1"].why.startswith(f"waits until everything can move: {old.id} of m has no other place")
    assert lab.told("drain.moving") == []


def test_what_is_taken_up_again_is_blocked_no_longer_while_another_moves() -> None:
    lab = Lab([node("n1", gpus=2)], [model("m", ONE, replicas=2)])
    lab.run()
    lab.lose("n1")
    lab.drain("n1")
    assert [move.state for move in lab.state.drains["n1"].moves] == [MoveState.BLOCKED] * 2
    lab.slow = lambda shard: True
    lab.add(node("n2", gpus=3))
    lab.connect("n1")
    first, second = (move for move in lab.state.drains["n1"].moves)
    assert (first.state, second.state) == (MoveState.STARTING, MoveState.PENDING)
    assert second.why == "is back with its node"
    assert "was lost" not in lab.state.drains["n1"].why


def test_what_was_lost_does_not_keep_a_drain_from_beginning_and_is_not_said_to_be_short_of_a_place() -> None:
    """The wide one waits for the rest of its nodes, of which one is back."""
    wide = model("wide", profile(nodes=2, gpus_per_node=2, tensor_parallel=4))
    small = model("small", ONE)
    lab = Lab([on_fabric("n1", "ib-a", gpus=3), on_fabric("n2", "ib-a", gpus=2)], [wide])
    lab.run()
    lab.edit(wide, small)
    lab.run()
    for name in ("n3", "n4", "n5"):
        lab.add(node(name))
    lab.cut("n2")
    lab.lose("n1")
    lab.connect("n1")
    (lost,), (stays,) = (replica for replica in lab.replicas("wide") if replica.lost), lab.ready("small")
    words = drains.refusal(drains.plan(lab.state, "n1", now=lab.now))
    assert words is not None
    assert f"{stays.id} of small has no other place" in words
    assert "wide" not in words
    waiting = drains.plan(lab.state, "n1", now=lab.now, wait=True).why
    assert f"{lost.id} of wide was lost with its node" in waiting
    assert drains.refusal(drains.plan(lab.state, "n2", now=lab.now)) is None


def test_a_drain_says_what_still_runs_where_nothing_is_placed_any_more() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    (old,) = lab.ready()
    lab.lose("n1")
    lab.edit()
    assert lab.replicas() == []
    lab.engines["n1"][old.shard_id(0)].state = ShardState.STOPPING
    lab.drain("n1")
    lab.connect("n1")
    assert lab.state.drains["n1"].why == f"nothing is placed on n1; n1 still runs {old.id}/0"
    lab.run()
    assert lab.is_drained("n1")


# -- how long requests in flight may take, changed on the way


def finishing(in_flight_s: float | None) -> tuple[Lab, str, float]:
    """A drain of n1 that waits for two requests since a while; the id of the original, and when it left the routes."""
    lab = roomy()
    (old,) = lab.ready()
    lab.doors["gw"].in_flight[old.id] = 2
    lab.drain("n1", in_flight_s=in_flight_s)
    lab.until(lambda: lab.state.replicas[old.id].state is ReplicaState.DRAINING)
    began_s = lab.now.monotonic_s
    for _ in range(30):
        lab.tick()
    assert lab.move("n1").state is MoveState.FINISHING
    return lab, old.id, began_s


def left_until(lab: Lab, old: str) -> float:
    """Runs on until the original is stopped; the monotonic time at which it was."""
    lab.until(lambda: old not in lab.state.replicas or lab.state.replicas[old].state is ReplicaState.STOPPING)
    return lab.now.monotonic_s


def test_a_shorter_deadline_counts_from_now() -> None:
    lab, old, began_s = finishing(None)
    lab.drain("n1", in_flight_s=5.0)
    assert left_until(lab, old) == began_s + 35.0


def test_a_deadline_that_is_shorter_by_little_ends_no_later_than_it_would_have() -> None:
    lab, old, began_s = finishing(40.0)
    lab.drain("n1", in_flight_s=39.0)
    assert left_until(lab, old) == began_s + 40.0


def test_a_longer_deadline_counts_from_when_the_original_left_the_routes() -> None:
    lab, old, began_s = finishing(40.0)
    lab.drain("n1", in_flight_s=5.0)
    lab.tick()
    lab.drain("n1", in_flight_s=70.0)
    assert lab.state.replicas[old].drained_by_s == began_s + 70.0
    assert left_until(lab, old) == began_s + 70.0


def test_a_changed_deadline_outlives_the_control_plane() -> None:
    lab, old, _ = finishing(None)
    lab.drain("n1", in_flight_s=45.0)
    lab.restart_control()
    restarted_s = lab.now.monotonic_s
    lab.come_back()
    assert left_until(lab, old) == restarted_s + 45.0


def test_a_replica_that_comes_back_with_its_node_to_a_drained_one_is_moved_too() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    (old,) = lab.ready()
    lab.lose("n1")
    lab.drain("n1")
    assert lab.state.drains["n1"].state is not DrainState.DONE
    lab.connect("n1")
    lab.run()
    assert [replica.id for replica in lab.ready()] == [old.id]
    lab.add(node("n2", gpus=1))
    lab.run()
    assert lab.is_drained("n1")
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]


def test_two_drains_at_a_time_move_one_replica_each_and_none_to_the_other() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", ONE, replicas=2)])
    lab.run()
    lab.add(node("n3", gpus=1))
    lab.add(node("n4", gpus=1))
    lab.drain("n1")
    lab.drain("n2")
    lab.run()
    assert lab.is_drained("n1")
    assert lab.is_drained("n2")
    assert sorted(nodes_of(replica) for replica in lab.ready()) == [("n3",), ("n4",)]


def test_a_replacement_on_a_node_that_is_drained_next_is_made_anew_elsewhere() -> None:
    lab = roomy()
    lab.slow = lambda shard: shard.placement.node == "n2"
    lab.drain("n1")
    lab.until(lambda: bool(lab.on("n2")) and lab.on("n2")[0].state is ReplicaState.STARTING)
    lab.add(node("n3", gpus=1))
    assert drains.refusal(lab.drain("n2")) is None
    lab.run()
    assert lab.is_drained("n1")
    assert lab.is_drained("n2")
    assert [nodes_of(replica) for replica in lab.ready()] == [("n3",)]


def test_scaling_down_in_the_middle_takes_the_one_that_leaves_anyway() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    lab.add(node("n2", gpus=1))
    lab.edit(model("m", ONE, replicas=2))
    lab.run()
    (stays,) = lab.on("n2")
    lab.add(node("n3", gpus=1))
    lab.drain("n1")
    lab.tick()
    lab.state = replace(lab.state, scale={"m": 1})
    lab.run()
    assert lab.is_drained("n1")
    assert [replica.id for replica in lab.replicas()] == [stays.id]


def test_a_model_that_leaves_the_catalog_in_the_middle_stops_with_its_replacement() -> None:
    lab = roomy()
    lab.drain("n1")
    lab.tick()
    lab.edit()
    lab.run()
    assert lab.replicas() == []
    assert lab.is_drained("n1")


def test_a_node_that_is_removed_is_not_drained_any_more() -> None:
    lab = roomy()
    lab.drain("n2")
    nodes = {name: each for name, each in lab.state.nodes.items() if name != "n2"}
    lab.state = replace(lab.state, nodes=nodes)
    lab.settle()
    assert lab.state.drains == {}


# -- a changed catalog that fits nowhere

MISTYPED = replace(ONE, node_selector={"rack": "r21"})


@pytest.mark.parametrize("options", [{}, {"force": True}, {"wait": True}])
def test_what_serves_moves_as_it_is_where_the_changed_catalog_fits_nowhere(options: dict[str, object]) -> None:
    lab = roomy()
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED))
    lab.run()
    planned = lab.drain("n1", **options)
    assert (drains.refusal(planned), [move.targets for move in planned.moves]) == (None, [("n2",)])
    lab.until(lambda: lab.is_drained("n1"))
    (new,) = lab.ready()
    assert (new.id != old.id, nodes_of(new), new.profile) == (True, ("n2",), ONE)
    assert lab.state.drains["n1"].why.startswith("1 replica moved, 0 requests")


def test_what_is_not_ready_moves_as_it_is_where_the_changed_catalog_fits_nowhere() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.slow = lambda shard: True
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.STARTING)
    lab.edit(model("m", MISTYPED))
    lab.add(node("n2", gpus=1))
    planned = lab.drain("n1")
    assert (drains.refusal(planned), [move.targets for move in planned.moves]) == (None, [("n2",)])
    lab.slow = lambda shard: False
    lab.until(lambda: lab.is_drained("n1"))
    lab.run()
    assert [(nodes_of(replica), replica.profile) for replica in lab.ready()] == [(("n2",), ONE)]


def starting_beside() -> tuple[Lab, Replica]:
    """A drain's replacement that is starting on n2."""
    lab = roomy()
    lab.slow = lambda shard: True
    lab.drain("n1")
    lab.until(lambda: lab.replicas()[-1].state is ReplicaState.STARTING)
    return lab, lab.replicas()[-1]


def test_a_change_that_fits_nowhere_does_not_stop_a_replacement_on_its_way() -> None:
    lab, new = starting_beside()
    lab.edit(model("m", MISTYPED))
    lab.slow = lambda shard: False
    lab.until(lambda: lab.is_drained("n1"))
    assert [(replica.id, replica.generation) for replica in lab.ready()] == [(new.id, 1)]


def test_a_replacement_on_its_way_that_fails_is_started_again_as_it_was() -> None:
    lab, new = starting_beside()
    lab.edit(model("m", MISTYPED))
    lab.fail(new.id)
    lab.slow = lambda shard: False
    lab.until(lambda: lab.is_drained("n1"))
    assert [(replica.id, replica.generation) for replica in lab.ready()] == [(new.id, 2)]


def test_a_change_that_has_a_place_is_taken_along_by_a_replacement_on_its_way() -> None:
    lab, new = starting_beside()
    lab.edit(model("m", MISTYPED))
    lab.tick()
    assert new.id in lab.state.replicas
    lab.edit(model("m", replace(ONE, context=4096)))
    lab.slow = lambda shard: shard.profile.context != 4096
    lab.until(lambda: lab.is_drained("n1"))
    assert [(replica.number, replica.generation) for replica in lab.ready()] == [(new.number + 1, 1)]


@pytest.mark.parametrize(("gpus", "context"), [(1, 4096), (2, None)])
def test_a_change_that_has_a_place_only_where_the_replacement_is_takes_no_turns_with_it(
    gpus: int, context: int | None
) -> None:
    """Where another could be started by the old catalog beside it, it goes on; else it makes room."""
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    lab.add(node("n2", gpus=gpus))
    lab.slow = lambda shard: True
    lab.drain("n1")
    lab.until(lambda: lab.replicas()[-1].state is ReplicaState.STARTING)
    lab.edit(model("m", profile(gpus_per_node=gpus, context=4096)))
    for _ in range(20):
        lab.tick()
    (new,) = (replica for replica in lab.replicas() if replica.replaces is not None)
    assert new.profile is not None
    assert (new.number, new.profile.context) == (3 if context else 2, context)


def test_the_changed_catalog_goes_first_wherever_it_can_be_placed() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", ONE)])
    lab.run()
    lab.edit(model("m", MISTYPED))
    lab.engines["n2"] = {}
    lab.state = replace(lab.state, nodes={**lab.state.nodes, "n2": node("n2", gpus=1)})
    lab.state = replace(lab.state, nodes={**lab.state.nodes, "n3": node("n3", gpus=1, labels={"rack": "r21"})})
    lab.engines["n3"] = {}
    planned = lab.drain("n1")
    assert [move.targets for move in planned.moves] == [("n3",)]
    lab.until(lambda: lab.is_drained("n1"))
    assert [(nodes_of(replica), replica.profile) for replica in lab.ready()] == [(("n3",), MISTYPED)]


def test_a_roll_does_not_begin_what_a_drain_waits_with() -> None:
    """What is started by the catalog from before is none of a roll's, and is not tried again at once."""
    lab = roomy()
    lab.edit(model("m", MISTYPED))
    lab.broken = lambda shard: True
    lab.drain("n1")
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    for _ in range(30):
        lab.tick()
        assert len([replica for replica in lab.replicas() if replica.state is not ReplicaState.STOPPING]) == 1
    lab.broken = lambda shard: False
    lab.until(lambda: lab.is_drained("n1"))
