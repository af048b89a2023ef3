"""Rolls: a changed catalog, or a restart, replaces one replica of a model at a time, and goes back by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmgw.cluster import rolling
from llmgw.cluster.beside import nodes_of
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.engines import roll_back
from llmgw.cluster.explain import why
from llmgw.cluster.model import DesiredShard, MoveState, Replica, ReplicaState, ShardState
from llmgw.cluster.reconcile import apply, reconcile, routes

from .building import engine, model, node, profile
from .lab import Lab, on_fabric

OLD = profile(gpus_per_node=1)
NEW = profile(gpus_per_node=1, context=4096)


def serving(*, replicas: int = 2, gpus: int = 4) -> Lab:
    lab = Lab([node("n1", gpus=gpus)], [model("m", OLD, replicas=replicas)])
    lab.run()
    assert len(lab.ready()) == min(replicas, gpus)
    return lab


def contexts(lab: Lab) -> list[int | None]:
    return [replica.profile.context for replica in lab.ready() if replica.profile is not None]


def restart(lab: Lab, *, allow_downtime: bool = False) -> None:
    lab.state = apply(lab.state, rolling.restart(lab.state, "m", allow_downtime, lab.now))
    lab.settle()


def new_ones(shard: DesiredShard) -> bool:
    return shard.profile.context == 4096


def follow(lab: Lab, *, ready: int) -> list[int]:
    """Run to the end; how many replicas of the model there were with a place, and ready, after each tick."""
    placed = []
    for _ in range(100):
        changed = lab.tick()
        assert len(lab.ready()) >= ready
        placed.append(sum(bool(replica.placements) for replica in lab.replicas()))
        if not changed:
            return placed
    raise AssertionError("never settled")


# -- a changed catalog


def test_a_changed_profile_is_rolled_out_one_at_a_time_the_replacement_first() -> None:
    lab = serving(replicas=3)
    before = {replica.id for replica in lab.ready()}
    lab.edit(model("m", NEW, replicas=3))
    assert max(follow(lab, ready=3)) == 4
    assert contexts(lab) == [4096] * 3
    assert before.isdisjoint(replica.id for replica in lab.replicas())
    assert all(replica.replaces is None for replica in lab.replicas())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (model("m", OLD, source="/v", aliases=("a",)), "source"),
        (model("m", OLD, source="/w", aliases=("a",), task="embed"), "task"),
        (model("m", OLD, source="/w", aliases=("b",)), "aliases"),
        (model("m", NEW, source="/w", aliases=("a",)), "profile p"),
        (model("m", replace(OLD, name="q"), source="/w", aliases=("a",)), "profile p, which is gone"),
        (model("m", replace(OLD, args=("--fast",)), source="/v", aliases=("a",)), "source, profile p"),
    ],
)
def test_what_has_changed_is_named_and_rolled_out(changed: object, what: str) -> None:
    lab = Lab([node("n1", gpus=2)], [model("m", OLD, source="/w", aliases=("a",))])
    lab.run()
    (old,) = lab.ready()
    lab.state = replace(lab.state, catalog=replace(lab.state.catalog, models=(changed,)))  # type: ignore[arg-type]
    assert rolling.outdated(lab.state, old) == what
    lab.settle()
    lab.run()
    (new,) = lab.ready()
    assert new.id != old.id
    assert rolling.outdated(lab.state, new) == ""


@pytest.mark.parametrize(
    "changed", [model("m", OLD, replicas=1), model("m", OLD, profile("other"), replicas=2)], ids=["fewer", "a profile"]
)
def test_what_does_not_concern_what_runs_rolls_nothing(changed: object) -> None:
    lab = serving()
    before = {replica.id for replica in lab.ready()}
    lab.state = replace(lab.state, catalog=replace(lab.state.catalog, models=(changed,)))  # type: ignore[arg-type]
    lab.run()
    assert {replica.id for replica in lab.ready()} <= before


def test_another_name_for_a_model_keeps_its_count_of_ready_replicas() -> None:
    """A rename does not reset how many are ready: those that run serve until others have taken over."""
    lab = Lab([node("n1", gpus=3)], [model("m", OLD, aliases=("old-name",), replicas=2)])
    lab.run()
    lab.edit(model("m", OLD, aliases=("new-name",), replicas=2))
    assert why(lab.state, "m").ready == 2
    follow(lab, ready=2)
    (route,) = routes(lab.state)
    assert (route.aliases, len(route.endpoints)) == (("new-name",), 2)


def test_more_pipeline_stages_are_built_beside_what_serves() -> None:
    """A changed size of the group builds a new generation; the old one is kept until that one is ready."""
    lab = Lab(
        [on_fabric(f"n{index}", "ib-a", gpus=2) for index in range(1, 6)],
        [model("m", profile(nodes=2, gpus_per_node=2, tensor_parallel=2, pipeline_parallel=2))],
    )
    lab.run()
    (old,) = lab.ready()
    lab.edit(model("m", profile(nodes=3, gpus_per_node=2, tensor_parallel=2, pipeline_parallel=3)))
    follow(lab, ready=1)
    (new,) = lab.ready()
    assert len(nodes_of(new)) == 3
    assert set(nodes_of(new)).isdisjoint(nodes_of(old))


def test_ports_that_something_else_holds_say_nothing_of_what_is_rolled_out() -> None:
    """However many there are, and not even between the failures of the thing itself."""
    lab = serving(replicas=1)
    held = {lab.ready()[0].placements[0].port + 100 * block for block in (1, 2, 3, 4, 6)}
    lab.taken = lambda shard: shard.placement.port in held
    tried: list[int] = []

    def once(shard: DesiredShard) -> bool:
        if not new_ones(shard) or tried:
            return False
        tried.append(shard.placement.port)
        held.add(shard.placement.port)
        return True

    lab.broken = once
    lab.edit(model("m", NEW, replicas=1))
    lab.run()
    assert contexts(lab) == [4096]
    assert held.isdisjoint(replica.placements[0].port for replica in lab.ready())
    assert len(tried) == 1
    assert lab.told("roll.given-up") == []


def test_one_without_any_port_is_given_up_in_the_end() -> None:
    lab = Lab([node("n1", gpus=2, ports="20000-20499")], [model("m", OLD)])
    lab.run()
    serves = lab.ready()[0].placements[0].port
    lab.taken = lambda shard: shard.placement.port != serves
    lab.edit(model("m", NEW))
    lab.run()
    assert contexts(lab) == [None]
    (words,) = lab.told("roll.given-up")
    assert "failed 3 times in a row" in words


def test_one_that_does_not_become_ready_is_given_up_and_the_old_ones_serve_on() -> None:
    lab = serving()
    before = [replica.id for replica in lab.ready()]
    lab.broken = new_ones
    lab.edit(model("m", NEW, replicas=2))
    lab.run()
    assert [replica.id for replica in lab.ready()] == before
    assert contexts(lab) == [None, None]
    assert len(lab.replicas()) == 2
    (words,) = lab.told("roll.given-up")
    assert words.startswith(f"m is not rolled over, {before[0]} serves on as it was: ")
    assert "failed 3 times in a row" in words
    assert "no such layer" in words
    explained = why(lab.state, "m")
    assert explained.summary.startswith("2 of 2 replicas ready; ")
    for line in explained.replicas:
        assert line.why.startswith("ready on n1")
        assert "(profile p changed since): the changed one did not become ready (" in line.outdated
        assert "no such layer" in line.outdated
        assert "by `llmgw ctl restart m`" in line.outdated


def test_what_was_given_up_is_tried_again_when_the_catalog_changes() -> None:
    lab = serving()
    lab.broken = new_ones
    lab.edit(model("m", NEW, replicas=2))
    lab.run()
    lab.edit(model("m", replace(NEW, context=8192), replicas=2))
    follow(lab, ready=2)
    assert contexts(lab) == [8192, 8192]


def test_what_was_given_up_is_not_tried_again_because_another_number_of_replicas_is_asked_for() -> None:
    lab = serving(replicas=2)
    lab.broken = new_ones
    lab.edit(model("m", NEW, replicas=2))
    lab.run()
    lab.edit(model("m", NEW, replicas=1), model("other", OLD))
    lab.run()
    assert len(lab.told("roll.given-up")) == 1
    assert contexts(lab) == [None]


def test_what_was_given_up_is_tried_again_when_an_operator_restarts_the_model() -> None:
    lab = serving()
    lab.broken = new_ones
    lab.edit(model("m", NEW, replicas=2))
    lab.run()
    lab.broken = lambda shard: False
    restart(lab)
    follow(lab, ready=2)
    assert contexts(lab) == [4096, 4096]


def test_while_a_change_is_on_trial_and_after_it_failed_others_come_back_as_they_were() -> None:
    lab = serving()
    lab.broken = new_ones
    lab.edit(model("m", NEW, replicas=2))
    _, second = lab.ready()
    lab.fail(second.id)
    lab.until(lambda: lab.state.replicas[second.id].generation == 2)
    again = lab.state.replicas[second.id]
    assert again.profile == OLD
    lab.run()
    assert contexts(lab) == [None, None]
    lab.fail(second.id)
    lab.run()
    assert contexts(lab) == [None, None]


def test_an_original_that_fails_comes_back_as_it_was_where_its_replacement_has_failed_too() -> None:
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.broken = new_ones
    lab.edit(model("m", NEW))
    lab.until(lambda: any(each.failures and each.state is ReplicaState.STARTING for each in lab.replicas()))
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert (again.id, again.generation, again.profile) == (old.id, 2, OLD)


def test_one_that_fails_by_itself_takes_up_the_catalog_where_nothing_speaks_against_it() -> None:
    lab = serving(replicas=1, gpus=1)
    (old,) = lab.ready()
    lab.edit(model("m", NEW))
    lab.run()
    assert contexts(lab) == [None]
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert (again.id, again.generation, contexts(lab)) == (old.id, 2, [4096])


def test_a_roll_stops_where_one_that_was_rolled_over_is_not_ready_any_more() -> None:
    lab = serving(replicas=2)
    first, second = lab.ready()
    lab.edit(model("m", NEW, replicas=2))
    lab.doors["gw"].acknowledges = False
    lab.until(lambda: lab.state.replicas[first.id].state is ReplicaState.DRAINING)
    (new,) = (replica for replica in lab.ready() if replica.id != second.id)
    lab.broken = new_ones
    lab.fail(new.id)
    lab.doors["gw"].acknowledges = True
    for _ in range(30):
        lab.tick()
    assert lab.state.replicas[second.id].state is ReplicaState.READY
    waits = f"its turn comes when {new.id}, which follows the catalog already, is ready"
    assert any(waits in line.outdated for line in why(lab.state, "m").replicas)
    lab.broken = lambda shard: False
    lab.run()
    assert contexts(lab) == [4096, 4096]


def test_one_that_was_never_ready_makes_room_for_the_changed_one_at_once() -> None:
    """A file that is mended does not wait for what the broken one started."""
    lab = Lab([node("n1", gpus=1)], [model("m", OLD)])
    lab.slow = lambda shard: not new_ones(shard)
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.STARTING)
    (old,) = lab.replicas()
    lab.edit(model("m", NEW))
    assert lab.state.replicas[old.id].state is ReplicaState.STOPPING
    lab.run()
    assert contexts(lab) == [4096]


def test_a_catalog_that_changes_back_or_on_drops_the_replacement_on_its_way() -> None:
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.slow = new_ones
    lab.edit(model("m", NEW))
    lab.tick()
    lab.tick()
    lab.edit(model("m", replace(NEW, context=8192)))
    lab.tick()
    assert {replica.id for replica in lab.replicas() if replica.state is not ReplicaState.STOPPING} > {old.id}
    lab.edit(model("m", OLD))
    lab.run()
    assert [replica.id for replica in lab.replicas()] == [old.id]


def test_where_there_is_no_room_beside_it_the_words_say_so_and_what_to_type() -> None:
    lab = serving(replicas=1, gpus=1)
    (old,) = lab.ready()
    lab.edit(model("m", NEW))
    lab.run()
    assert [replica.id for replica in lab.ready()] == [old.id]
    assert why(lab.state, "m").replicas[0].outdated == (
        f"{old.id} runs as the catalog was before (profile p changed since): there is no room for a replacement beside "
        "it (n1: 0 of 1 GPU free, 1 needed); `llmgw ctl restart m --allow-downtime` stops it first"
    )
    restart(lab, allow_downtime=True)
    lab.run()
    assert contexts(lab) == [4096]


def test_without_room_a_restart_with_downtime_still_goes_one_at_a_time() -> None:
    lab = serving(replicas=3, gpus=3)
    before = {replica.id for replica in lab.ready()}
    restart(lab, allow_downtime=True)
    follow(lab, ready=2)
    assert len(lab.ready()) == 3
    assert before.isdisjoint(replica.id for replica in lab.ready())


def test_it_does_not_stop_first_what_alone_is_known_to_serve() -> None:
    lab = Lab([node("n1", gpus=1), node("n2", gpus=1)], [model("m", OLD, replicas=2)])
    lab.run()
    lab.cut("n2")
    (heard,) = lab.on("n1")
    restart(lab, allow_downtime=True)
    for _ in range(5):
        lab.tick()
    assert lab.state.replicas[heard.id].state is ReplicaState.READY
    lab.connect("n2")
    lab.run()
    assert all(not replica.restart for replica in lab.ready())
    assert len(lab.ready()) == 2


def test_it_does_not_stop_first_where_its_place_would_do_for_no_other() -> None:
    lab = serving(replicas=1, gpus=1)
    (old,) = lab.ready()
    lab.edit(model("m", profile(gpus_per_node=2)))
    restart(lab, allow_downtime=True)
    lab.run()
    assert [replica.id for replica in lab.ready()] == [old.id]
    assert "another would find a place then" in str(why(lab.state, "m").replicas[0].outdated)
    lab.edit(model("m", NEW))
    lab.run()
    assert contexts(lab) == [4096]


def test_it_does_not_stop_first_while_others_make_room_beside_it() -> None:
    """Scaled down and restarted at once: those that are too many leave, and then there is room."""
    lab = serving(replicas=2, gpus=2)
    before = {replica.id for replica in lab.ready()}
    lab.state = replace(lab.state, scale={"m": 1})
    lab.state = apply(lab.state, rolling.restart(lab.state, "m", True, lab.now))
    served = []
    for _ in range(60):
        lab.tick()
        served.append(len(lab.ready()))
    assert min(served) == 1
    assert len(lab.ready()) == 1
    assert before.isdisjoint(replica.id for replica in lab.ready())


# -- a changed catalog that fits nowhere

MISTYPED = replace(OLD, node_selector={"rack": "r21"})


def test_one_that_fails_comes_back_as_it_was_where_the_changed_catalog_fits_nowhere() -> None:
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED))
    lab.run()
    for generation in (2, 3):
        lab.fail(old.id)
        lab.run()
        (again,) = lab.ready()
        assert (again.id, again.generation, again.profile) == (old.id, generation, OLD)
    lab.edit(model("m", NEW))
    lab.run()
    assert contexts(lab) == [4096]


def test_that_it_goes_by_the_catalog_from_before_is_said_and_why() -> None:
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED))
    lab.slow = lambda shard: True
    lab.fail(old.id)
    lab.until(lambda: lab.state.replicas[old.id].state is ReplicaState.STARTING)
    short = "n1: has no label rack (r21 is needed)"
    before = f"as the catalog was before, since what it says now fits nowhere: {short}"
    assert [line.why for line in lab.state.replicas[old.id].story if short in line.why] == [
        f"on n1: waits for its agent to take it up; {before}"
    ]
    assert lab.told("replica.placed")[-1].endswith(f"profile p; {before}")
    for _ in range(2):
        assert why(lab.state, "m").replicas[0].outdated == (
            f"{old.id} runs as the catalog was before (profile p changed since): what it says now fits nowhere, not in "
            f"its place either ({short}), so that it goes on as it is until the catalog changes again, or a node can "
            "take it"
        )
        lab.slow = lambda shard: False
        lab.run()
    assert [replica.id for replica in lab.ready()] == [old.id]


def test_one_that_fails_goes_by_the_changed_catalog_wherever_that_fits() -> None:
    """Also where what it ran by would do in its own place."""
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED))
    lab.run()
    lab.fail(old.id)
    lab.add(node("n2", gpus=1, labels={"rack": "r21"}))
    lab.run()
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]
    assert [replica.profile for replica in lab.ready()] == [MISTYPED]


def test_one_that_was_never_ready_goes_on_where_the_changed_catalog_fits_nowhere() -> None:
    lab = Lab([node("n1", gpus=1)], [model("m", OLD)])
    lab.slow = lambda shard: True
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.STARTING)
    (first,) = lab.replicas()
    lab.edit(model("m", MISTYPED))
    lab.slow = lambda shard: False
    lab.run()
    assert [(replica.id, replica.generation) for replica in lab.ready()] == [(first.id, 1)]


def lose_and_return(lab: Lab) -> None:
    lab.lose("n1", power=True)
    lab.run()
    lab.connect("n1")


def remove(lab: Lab) -> None:
    lab.add(node("n2", gpus=4))
    lab.state = replace(lab.state, nodes={"n2": lab.state.nodes["n2"]})
    # Not by `settle`, which takes it for a replica that was let go.
    lab.state = apply(lab.state, reconcile(lab.state, lab.now))


def empty_and_return(lab: Lab) -> None:
    lab.drain("n1", force=True)
    lab.run()
    lab.undrain("n1")


AWAY = [lose_and_return, remove, empty_and_return]


@pytest.mark.parametrize("go_away", AWAY)
def test_one_made_in_the_place_of_another_goes_on_as_that_one_did(go_away: Callable[[Lab], None]) -> None:
    lab = serving(replicas=1)
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED))
    lab.run()
    go_away(lab)
    lab.run()
    (new,) = lab.ready()
    assert (new.id != old.id, new.profile) == (True, OLD)
    lab.edit(model("m", NEW))
    lab.run()
    assert contexts(lab) == [4096]


def test_one_made_in_the_place_of_another_waits_and_takes_up_a_mended_catalog_at_once() -> None:
    lab = serving(replicas=1)
    lab.edit(model("m", MISTYPED))
    lab.run()
    lab.lose("n1", power=True)
    lab.run()
    lab.edit(model("m", NEW))
    lab.connect("n1")
    lab.run()
    assert [(replica.profile, replica.generation) for replica in lab.ready()] == [(NEW, 1)]


def test_one_made_in_the_place_of_several_nodes_goes_on_where_only_some_are_lost() -> None:
    pair = profile(nodes=2, gpus_per_node=1, pipeline_parallel=2)
    lab = Lab([on_fabric(name, "ib", gpus=1) for name in ("n1", "n2")], [model("m", pair)])
    lab.run()
    (old,) = lab.ready()
    lab.edit(model("m", replace(pair, node_selector={"rack": "r21"})))
    lab.run()
    lab.lose("n2", power=True)
    lab.run()
    lab.connect("n2")
    lab.run()
    assert [(replica.id == old.id, replica.profile) for replica in lab.ready()] == [(False, pair)]


def test_one_made_in_the_place_of_another_goes_by_the_changed_catalog_wherever_that_fits() -> None:
    lab = serving(replicas=1)
    lab.edit(model("m", MISTYPED))
    lab.run()
    lab.lose("n1", power=True)
    lab.engines["n2"] = {}
    lab.state = replace(lab.state, nodes={**lab.state.nodes, "n2": node("n2", gpus=1)})
    lab.add(node("n3", gpus=1, labels={"rack": "r21"}))
    lab.run()
    assert [(nodes_of(replica), replica.profile) for replica in lab.ready()] == [(("n3",), MISTYPED)]


def test_each_goes_on_as_one_that_was_lost() -> None:
    lab = serving(replicas=2)
    lab.edit(model("m", MISTYPED, replicas=2))
    lab.run()
    lose_and_return(lab)
    lab.run()
    assert [replica.profile for replica in lab.ready()] == [OLD, OLD]


def test_what_is_wanted_besides_goes_by_the_catalog_alone() -> None:
    lab = serving(replicas=1)
    lab.edit(model("m", MISTYPED))
    lab.run()
    lab.add(node("n2", gpus=4))
    lab.state = replace(lab.state, scale={"m": 2}, nodes={"n2": lab.state.nodes["n2"]})
    lab.state = apply(lab.state, reconcile(lab.state, lab.now))
    lab.run()
    assert [(replica.state, replica.profile) for replica in lab.replicas()] == [
        (ReplicaState.READY, OLD),
        (ReplicaState.UNPLACED, None),
    ]


def test_one_made_in_the_place_of_another_keeps_to_its_version_of_the_engine() -> None:
    """As that one would have: there is no room to try the other beside it."""
    builds = [EngineSpec(name="sim", version=version) for version in ("1.0", "2.0")]
    both = (engine("sim", version="1.0"), engine("sim", version="2.0"))
    lab = Lab([node("n1", gpus=1, engines=both)], [model("m", OLD)], engines=builds[:1])
    lab.run()
    lab.edit(model("m", OLD), engines=builds[1:])
    lab.run()
    lose_and_return(lab)
    lab.run()
    assert [(r.number, r.profile) for r in lab.ready()] == [(2, replace(OLD, engine_version="1.0"))]


def test_what_stops_for_a_roll_does_not_have_another_go_on_as_it_did() -> None:
    """The place that the changed catalog needs is free a moment later, and there is another for what ran before."""
    lab = Lab([node("n1", gpus=1, labels={"rack": "r21"})], [model("m", OLD)])
    lab.slow = lambda shard: True
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.STARTING)
    lab.add(node("n2", gpus=1))
    lab.edit(model("m", MISTYPED))
    lab.slow = lambda shard: False
    lab.run()
    assert [(nodes_of(replica), replica.number) for replica in lab.ready()] == [(("n1",), 2)]


@pytest.mark.parametrize("go_away", AWAY)
def test_a_roll_that_was_given_up_stays_so_for_one_made_in_the_place_of_another(
    go_away: Callable[[Lab], None],
) -> None:
    lab = serving(replicas=1)
    lab.broken = new_ones
    lab.edit(model("m", NEW))
    lab.run()
    assert len(lab.told("roll.given-up")) == 1
    go_away(lab)
    lab.run()
    assert contexts(lab) == [OLD.context]
    assert [replica.failures for replica in lab.replicas()] == [0]
    lab.broken = lambda shard: False
    restart(lab)
    lab.run()
    assert contexts(lab) == [4096]


@pytest.mark.parametrize("rolled_back", [False, True])
def test_it_comes_back_on_its_version_of_the_engine_unless_that_was_rolled_back_from(rolled_back: bool) -> None:
    builds = [EngineSpec(name="sim", version=version) for version in ("1.0", "2.0")]
    both = (engine("sim", version="1.0"), engine("sim", version="2.0"))
    lab = Lab([node("n1", gpus=2, engines=both)], [model("m", OLD)], engines=builds[:1])
    lab.run()
    lab.edit(model("m", OLD), engines=builds[1:])
    lab.run()
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED), engines=builds[1:])
    if rolled_back:
        lab.carry_out(roll_back(lab.state, "sim", "it stammers", lab.now))
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert again.profile == replace(OLD, engine_version="1.0" if rolled_back else "2.0")


def test_it_comes_back_on_the_version_that_it_ran_on_where_another_came_with_the_change() -> None:
    both = (engine("sim", version="1.0"), engine("sim", version="2.0"))
    lab = Lab([node("n1", gpus=2, engines=both)], [model("m", OLD)], engines=[EngineSpec(name="sim", version="1.0")])
    lab.run()
    (old,) = lab.ready()
    lab.edit(model("m", MISTYPED), engines=[EngineSpec(name="sim", version="2.0")])
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert again.profile == replace(OLD, engine_version="1.0")
    lab.install("n1", engine("sim", version="2.0"))
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert again.profile == replace(OLD, engine_version="2.0")


# -- restarts


def test_a_restart_replaces_every_replica_by_a_fresh_one() -> None:
    lab = serving()
    before = {replica.id for replica in lab.ready()}
    restart(lab)
    assert "an operator asked for a restart" in lab.told("replica.created")[-1]
    follow(lab, ready=2)
    assert before.isdisjoint(replica.id for replica in lab.ready())
    assert rolling.restart(lab.state, "none", False, lab.now) == ()


def test_two_restarts_that_meet_because_an_original_came_back_go_one_after_the_other() -> None:
    """The first original is lost with its node, so the second gets its turn; then the first is back as it was."""
    lab = Lab([node("n1", gpus=1), node("n2", gpus=4)], [model("m", OLD, replicas=2)])
    lab.run()
    (first,) = lab.on("n1")
    lab.slow = lambda shard: True
    restart(lab)
    (new,) = [replica for replica in lab.replicas() if replica.replaces is not None]
    assert new.replaces == first.id
    lab.lose("n1")
    assert len([replica for replica in lab.replicas() if replica.replaces is not None]) == 2
    lab.connect("n1")
    beside = [replica for replica in lab.replicas() if replica.replaces is not None and replica.placements]
    assert [replica.replaces for replica in beside if replica.state is not ReplicaState.STOPPING] == [first.id]
    lab.slow = lambda shard: False
    follow(lab, ready=2)
    assert len(lab.ready()) == 2
    assert not any(replica.restart for replica in lab.ready())


def test_a_restart_without_room_is_explained_and_waits() -> None:
    lab = serving(replicas=1, gpus=1)
    restart(lab)
    lab.run()
    assert why(lab.state, "m").replicas[0].why.startswith("ready on n1; is to be restarted: ")
    assert "is to be restarted: there is no room for a replacement beside it" in why(lab.state, "m").replicas[0].why
    lab.add(node("n2", gpus=1))
    lab.run()
    assert [nodes_of(replica) for replica in lab.ready()] == [("n2",)]


def test_a_restart_gives_one_that_waits_for_its_next_generation_that_at_once() -> None:
    lab = serving(replicas=1)
    lab.broken = lambda shard: True
    restart(lab)
    lab.fail(lab.ready()[0].id)
    lab.until(lambda: any((replica.retry_at or 0) > lab.now.wall_s + 3 for replica in lab.replicas()))
    restart(lab)
    assert all(replica.retry_at is None or replica.state is not ReplicaState.FAILED for replica in lab.replicas())


def test_a_restart_whose_fresh_one_does_not_get_ready_is_given_up() -> None:
    lab = serving()
    before = [replica.id for replica in lab.ready()]
    lab.broken = lambda shard: True
    restart(lab)
    lab.run()
    assert [replica.id for replica in lab.ready()] == before
    assert not any(replica.restart for replica in lab.replicas())
    assert len(lab.told("roll.given-up")) == 1


def test_a_restart_survives_one_of_the_control_plane() -> None:
    lab = serving()
    before = {replica.id for replica in lab.ready()}
    restart(lab)
    lab.tick()
    lab.restart_control()
    lab.tick()
    lab.come_back()
    lab.run()
    assert len(lab.ready()) == 2
    assert before.isdisjoint(replica.id for replica in lab.ready())


# -- together with drains


def test_a_drain_takes_the_changed_catalog_along_and_goes_on_without_it_where_it_fails() -> None:
    lab = serving(replicas=1)
    lab.broken = new_ones
    lab.edit(model("m", NEW))
    lab.run()
    lab.add(node("n2", gpus=1))
    lab.drain("n1")
    lab.run()
    assert lab.is_drained("n1")
    assert contexts(lab) == [None]
    (moved,) = lab.ready()
    assert rolling.given_up(lab.state, moved)


def test_a_drain_whose_replacement_fails_by_the_changed_catalog_is_tried_with_the_old_one() -> None:
    lab = serving(replicas=1)
    lab.add(node("n2", gpus=1))
    lab.broken = new_ones
    lab.drain("n1")
    lab.edit(model("m", NEW))
    lab.until(lambda: lab.move("n1").state is MoveState.BLOCKED)
    lab.run()
    assert lab.is_drained("n1")
    assert contexts(lab) == [None]


# -- whatever happens in the middle of it


def restart_control(lab: Lab) -> None:
    lab.restart_control()
    lab.tick()
    lab.come_back()


def restart_agents(lab: Lab) -> None:
    lab.restart_agent("n1")
    lab.restart_agent("n2")


def crash_replacement(lab: Lab) -> None:
    (new,) = (replica for replica in lab.replicas() if replica.replaces is not None)
    for engines in lab.engines.values():
        if new.shard_id(0) in engines:
            engines[new.shard_id(0)].state = ShardState.FAILED


def crash_original(lab: Lab) -> None:
    (new,) = (replica for replica in lab.replicas() if replica.replaces is not None)
    for engines in lab.engines.values():
        engine = engines.get(f"{new.replaces}/0")
        if engine is not None and engine.state is ShardState.READY:
            engine.state = ShardState.FAILED


def lose_a_node(lab: Lab) -> None:
    lab.lose("n2")
    lab.run()
    lab.connect("n2")


@pytest.mark.parametrize(
    "event",
    [restart_control, restart_agents, crash_replacement, crash_original, lose_a_node],
    ids=lambda event: event.__name__,
)
@pytest.mark.parametrize("state", [ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STOPPING], ids=str)
def test_a_roll_survives_each_event_in_each_phase(state: ReplicaState, event: Callable[[Lab], None]) -> None:
    lab = Lab([node("n1", gpus=2), node("n2", gpus=2)], [model("m", OLD, replicas=2)])
    lab.run()
    lab.edit(model("m", NEW, replicas=2))

    def originals() -> list[Replica]:
        names = {replica.replaces for replica in lab.replicas()}
        return [replica for replica in lab.replicas() if replica.id in names]

    lab.until(lambda: any(replica.state is state for replica in originals()))
    event(lab)
    lab.run()
    assert contexts(lab) == [4096, 4096]
    assert len([replica for replica in lab.replicas() if not replica.lost]) == 2
