"""Versions of engines: which is in effect, who runs on which, and back to the one before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from llmgw.cluster.catalog import Catalog, EngineSpec, ModelSpec
from llmgw.cluster.engines import (
    CantRollBack,
    builds_for,
    builds_kept,
    followed,
    in_effect,
    missing_engine,
    reset,
    roll_back,
    told_versions,
    with_file,
)
from llmgw.cluster.explain import why
from llmgw.cluster.lifecycle import FAILURES_GIVEN_UP
from llmgw.cluster.model import Cluster, DesiredShard, EngineHistory, EngineOnNode, EngineState, Node, ReplicaState
from llmgw.cluster.reconcile import apply
from llmgw.cluster.rolling import restart
from llmgw.cluster.starting import builds_for_all

from .building import NOW, cluster, engine, later, model, node, profile
from .lab import Lab

OLD, NEW, NEWEST = (EngineSpec(name="llamacpp", version=version, source="index") for version in ("1", "2", "3"))
CHAT = model("m", profile(engine="llamacpp", gpus_per_node=1), source="/m.gguf", replicas=2)
ONE = replace(CHAT, replicas=1)


def has(*versions: str, **fields: Any) -> tuple[EngineOnNode, ...]:
    return tuple(replace(engine("llamacpp", version=version), **fields) for version in versions)


def machine(name: str, *versions: str, gpus: int = 4) -> Node:
    return node(name, gpus=gpus, engines=has(*versions))


def started(*nodes: Node, spec: ModelSpec = CHAT) -> Lab:
    lab = Lab(nodes or (machine("n1", "1"), machine("n2", "1")), [spec], engines=[OLD])
    lab.run()
    return lab


def versions(lab: Lab) -> Counter[str]:
    """On which version how many replicas are ready."""
    return versions_of(lab, "m")


def versions_of(lab: Lab, model: str) -> Counter[str]:
    return Counter(each.profile.engine_version for each in lab.ready(model) if each.profile is not None)


def has_failed(lab: Lab, times: int) -> bool:
    return lab.replicas("new")[0].failures == times


def on(version: str) -> Callable[[DesiredShard], bool]:
    return lambda shard: shard.profile.engine_version == version


# -- the catalog in effect


def test_profiles_get_the_version_of_their_engine_and_nobody_else_does() -> None:
    simulated = model("s", profile(engine="sim"))
    state, actions = with_file(cluster(), Catalog(models=(CHAT, simulated), engines=(OLD,)), NOW)
    assert [spec.profiles[0].engine_version for spec in state.catalog.models] == ["1", ""]
    assert state.engines == {"llamacpp": EngineHistory(name="llamacpp", spec=OLD, since=NOW.wall_s)}
    assert len(actions) == 1
    assert in_effect(state.catalog, state.engines) is state.catalog
    again, nothing = with_file(state, Catalog(models=(CHAT, simulated), engines=(OLD,)), later(5))
    assert nothing == ()
    assert again == state


def test_an_engine_that_the_file_lists_no_more_asks_for_no_version() -> None:
    lab = started()
    lab.edit(CHAT)
    lab.run()
    assert lab.state.catalog.models[0].profiles[0].engine_version == ""
    assert versions(lab) == {"1": 2}
    assert lab.told("replica.draining") == []
    assert builds_for_all(lab.state) == ()
    assert builds_for(lab.state, (), lab.state.replicas.values()) == (OLD,)


def test_nodes_keep_the_build_before_and_those_that_their_replicas_run_on() -> None:
    lab = started()
    assert (builds_for_all(lab.state), builds_kept(lab.state)) == ((OLD,), ())
    lab.edit(CHAT, engines=[NEW])
    assert (builds_for_all(lab.state), builds_kept(lab.state)) == ((NEW,), (OLD,))
    assert builds_for(lab.state, (NEW,), lab.state.replicas.values()) == (NEW, OLD)
    lab.carry_out(roll_back(lab.state, "llamacpp", "why", lab.now))
    assert (builds_for_all(lab.state), builds_kept(lab.state)) == ((OLD,), (NEW,))


# -- what the file says


def test_the_build_before_is_the_last_that_served() -> None:
    lab = started()
    lab.edit(CHAT, engines=[NEW])
    lab.edit(CHAT, engines=[NEWEST])
    assert lab.state.engines["llamacpp"].previous == OLD, "nothing ever ran on 2"
    lab.edit(CHAT, engines=[OLD])
    assert lab.state.engines["llamacpp"] == EngineHistory(
        name="llamacpp", spec=OLD, previous=NEWEST, since=lab.now.wall_s
    )


def test_where_none_has_served_it_is_one_that_a_node_has() -> None:
    state = with_file(cluster([machine("n1", "1")]), Catalog(engines=(OLD,)), NOW)[0]
    for mistyped in (NEW, NEWEST):
        state = with_file(state, Catalog(engines=(mistyped,)), NOW)[0]
    assert state.engines["llamacpp"].previous == OLD


def test_builds_that_replicas_run_on_are_remembered_over_two_changes() -> None:
    lab = started(machine("n1", "1", "2", gpus=1), machine("n2", "1", gpus=1), machine("n3", "1", "2", gpus=1))
    lab.edit(CHAT, engines=[NEW])
    lab.until(lambda: versions(lab)["2"] == 1)
    lab.edit(CHAT, engines=[NEWEST])
    history = lab.state.engines["llamacpp"]
    assert (history.previous, history.older) == (NEW, (OLD,))
    assert builds_kept(lab.state) == (NEW, OLD)


def test_the_same_version_from_elsewhere_rolls_nothing() -> None:
    lab = started()
    elsewhere = replace(OLD, source="https://mirror/l.tar.gz", sha256="ab" * 32)
    lab.edit(CHAT, engines=[elsewhere])
    lab.run()
    assert lab.told("replica.draining") == []
    assert lab.state.engines["llamacpp"].in_effect == elsewhere
    assert lab.told("engine.changed") == [
        "llamacpp 1 comes from elsewhere now (index -> https://mirror/l.tar.gz)",
    ]


def test_a_rollback_ends_when_the_file_says_otherwise() -> None:
    rolled = EngineHistory(name="llamacpp", spec=NEW, previous=OLD, rolled_back="it never got ready", since=1.0)
    assert followed(rolled, NEW, cluster(), NOW) == rolled
    assert followed(rolled, NEWEST, cluster(), NOW) == EngineHistory(
        name="llamacpp", spec=NEWEST, previous=OLD, since=NOW.wall_s
    )
    back = followed(rolled, OLD, cluster(), NOW)
    assert (back.spec, back.previous, back.rolled_back) == (OLD, None, ""), (
        "what did not serve is nothing to go back to"
    )
    other_source = replace(NEW, source="github")
    assert followed(rolled, other_source, cluster(), NOW).in_effect == other_source


# -- upgrades


def test_replicas_follow_a_changed_version_one_at_a_time_once_it_is_there() -> None:
    lab = started()
    first = {replica.id for replica in lab.ready()}
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert versions(lab) == {"1": 2}
    lab.install("n1", *has("1", "2"))
    most = 0
    while lab.tick():
        most = max(most, len([each for each in lab.replicas() if each.replaces is not None]))
        assert len(lab.ready()) >= 2
    lab.run()
    assert most == 1
    assert versions(lab) == {"2": 2}
    assert not first & {replica.id for replica in lab.ready()}
    assert {node for replica in lab.ready() for node in (replica.placements[0].node,)} == {"n1"}


def test_what_a_roll_waits_for_is_said_in_the_nodes_own_words() -> None:
    lab = started(machine("n1", "1"), spec=ONE)
    lab.edit(ONE, engines=[NEW])
    words = why(lab.state, "m").summary
    (old,) = lab.ready()
    assert f"{old.id} runs on llamacpp 1, and 2 is in effect: no node has llamacpp 2 yet" in words
    assert "n1: has llamacpp 1, and 2 is asked for" in words
    assert "--allow-downtime" not in words
    progress = "downloading llama-2.tar.gz (16 MB, 42 %)"
    lab.install("n1", *has("1"), *has("2", state=EngineState.DOWNLOADING, words=progress))
    assert f"(n1: installing: {progress})" in why(lab.state, "m").summary
    lab.install("n1", *has("1"), *has("2", state=EngineState.FAILED, words="--version: killed by SIGILL"))
    assert "n1: llamacpp 2 can't be used: --version: killed by SIGILL" in why(lab.state, "m").summary
    lab.run()
    assert [replica.id for replica in lab.ready()] == [old.id], "nothing changes"


def test_a_version_that_never_gets_ready_is_returned_from_by_itself() -> None:
    lab = started(machine("n1", "1", "2"), machine("n2", "1", "2"))
    before = {replica.id for replica in lab.ready()}
    lab.broken = on("2")
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert {replica.id for replica in lab.ready()} == before
    history = lab.state.engines["llamacpp"]
    assert (history.in_effect, history.spec) == (OLD, NEW)
    assert "failed 4 times in a row (so far 3 times on n1, 1 time on n2)" in history.rolled_back
    (said,) = lab.told("engine.rolled-back")
    assert said.startswith("llamacpp is rolled back from 2 to 1: m-")
    assert "`llmgw ctl engines rollback llamacpp --reset`" in said
    assert lab.told("roll.given-up") == []
    assert all(not replica.not_rolled_to for replica in lab.replicas())
    assert why(lab.state, "m").summary == "2 of 2 replicas ready"


def test_what_runs_on_it_already_goes_back_replacement_first() -> None:
    lab = started(machine("n1", "1", "2"), machine("n2", "1", "2"))
    lab.edit(CHAT, engines=[NEW])
    lab.until(lambda: versions(lab)["2"] == 1 and len(lab.ready()) == 2)
    lab.broken = on("2")
    lab.run()
    assert versions(lab) == {"1": 2}
    assert len(lab.told("engine.rolled-back")) == 1


def test_a_change_of_more_than_the_version_is_tried_again_on_the_version_before() -> None:
    lab = started(machine("n1", "1", "2"), machine("n2", "1", "2"))
    lab.broken = on("2")
    changed = replace(CHAT, profiles=(replace(CHAT.profiles[0], context=4096),))
    lab.edit(changed, engines=[NEW])
    lab.run()
    assert versions(lab) == {"1": 2}
    assert {each.profile.context for each in lab.ready() if each.profile is not None} == {4096}


def test_where_the_catalog_is_what_does_not_serve_the_engine_stays() -> None:
    lab = started(machine("n1", "1", "2"), machine("n2", "1", "2"))
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert versions(lab) == {"2": 2}
    lab.broken = lambda shard: shard.profile.context is not None
    lab.edit(replace(CHAT, profiles=(replace(CHAT.profiles[0], context=1),)), engines=[NEW])
    lab.run()
    assert lab.told("engine.rolled-back") == []
    assert len(lab.told("roll.given-up")) == 1


# -- who must be placed meanwhile


@pytest.mark.parametrize("there", [("1",), ("1", "2")], ids=["not there yet", "there, and not proved"])
def test_a_replica_that_crashes_comes_back_on_the_version_that_it_ran_on(there: tuple[str, ...]) -> None:
    # No room beside it, so that its crash comes before its roll.
    lab = started(machine("n1", *there, gpus=1), spec=ONE)
    (old,) = lab.ready()
    lab.edit(ONE, engines=[NEW])
    lab.broken = on("2")
    lab.fail(old.id)
    lab.run()
    (again,) = lab.ready()
    assert (again.id, again.generation, versions(lab)) == (old.id, 2, {"1": 1})


def test_once_the_new_version_serves_the_model_what_crashes_comes_back_on_that() -> None:
    lab = started(machine("n1", "1", gpus=1), machine("n2", "1", gpus=1))
    lab.add(machine("n3", "1", "2", gpus=1))
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert versions(lab) == {"1": 1, "2": 1}, "there is no other place with the new version"
    old = next(each for each in lab.ready() if each.profile is not None and each.profile.engine_version == "1")
    lab.install(old.placements[0].node, *has("1", "2"))
    lab.fail(old.id)
    lab.run()
    assert versions(lab) == {"2": 2}
    assert lab.state.replicas[old.id].generation == 2


def test_a_version_that_it_fails_on_again_and_again_is_not_held_on_to() -> None:
    lab = started(machine("n1", "1", "2", gpus=1), spec=ONE)
    (old,) = lab.ready()
    lab.broken = on("1")
    lab.fail(old.id)
    lab.until(lambda: lab.replicas()[0].state is ReplicaState.FAILED)
    lab.edit(ONE, engines=[NEW])
    lab.run()
    assert versions(lab) == {"2": 1}


def test_what_was_lost_with_its_node_is_made_anew_on_the_version_before() -> None:
    lab = started(machine("n1", "1", "2", gpus=1), machine("n2", "1", "2", gpus=1), spec=ONE)
    (old,) = lab.ready()
    lab.broken = on("2")
    lab.edit(ONE, engines=[NEW])
    lab.lose(old.placements[0].node, power=True)
    lab.run()
    assert versions(lab) == {"1": 1}


def test_more_replicas_need_not_wait_for_the_version() -> None:
    lab = started(spec=ONE)
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert versions(lab) == {"1": 2}
    lab.install("n2", *has("1", "2"))
    lab.run()
    assert versions(lab) == {"2": 2}


def test_a_model_that_never_ran_begins_on_the_version_in_effect() -> None:
    lab = started(machine("n1", "1", "2"), spec=ONE)
    lab.edit(ONE, replace(ONE, name="new"), engines=[NEW])
    lab.until(lambda: bool(lab.ready("new")))
    assert [each.profile.engine_version for each in lab.ready("new") if each.profile is not None] == ["2"]


def test_a_model_that_never_ran_and_fails_there_is_tried_on_the_version_before_also_where_that_never_was() -> None:
    lab = started(machine("n1", "1", gpus=1), spec=ONE)
    lab.add(machine("n2", "2", gpus=1))
    lab.broken = on("2")
    lab.edit(ONE, replace(ONE, name="new"), engines=[NEW])
    for failures in range(FAILURES_GIVEN_UP):
        lab.until(partial(has_failed, lab, failures))
        assert builds_for_all(lab.state) == (NEW,)
    lab.until(partial(has_failed, lab, FAILURES_GIVEN_UP))
    assert builds_for_all(lab.state) == (NEW, OLD)
    assert builds_kept(lab.state) == (OLD,)
    lab.install("n2", *has("1", "2"))
    lab.until(lambda: bool(lab.ready("new")))
    assert versions_of(lab, "new") == {"1": 1}


def test_a_drain_need_not_wait_for_the_version() -> None:
    lab = started(spec=ONE)
    lab.edit(ONE, engines=[NEW])
    (old,) = lab.ready()
    leaves = old.placements[0].node
    drain = lab.drain(leaves)
    assert drain.moves[0].targets == (({"n1", "n2"} - {leaves}).pop(),)
    lab.run()
    assert lab.is_drained(leaves)
    assert versions(lab) == {"1": 1}


def test_a_restart_need_not_wait_for_the_version() -> None:
    lab = started(spec=ONE)
    lab.edit(ONE, engines=[NEW])
    (old,) = lab.ready()
    lab.carry_out(restart(lab.state, "m", False, lab.now))
    lab.run()
    assert old.id not in lab.state.replicas
    assert versions(lab) == {"1": 1}


def test_a_program_of_the_nodes_own_stands_in_for_every_version() -> None:
    lab = started(node("n1", gpus=4, engines=has("own", named=True)))
    before = {replica.id for replica in lab.ready()}
    assert len(before) == 2
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    assert {replica.id for replica in lab.ready()} == before
    assert why(lab.state, "m").summary == "2 of 2 replicas ready"
    lab.fail(sorted(before)[0])
    lab.run()
    assert len(lab.ready()) == 2


def test_what_waits_for_an_engine_that_does_not_run_any_more_is_started_elsewhere() -> None:
    lab = Lab([machine("n1", "1")], [ONE], engines=[OLD])
    (waits,) = lab.replicas()
    assert waits.state is ReplicaState.PLACING
    lab.add(machine("n2", "1"))
    lab.install("n1", *has("1", state=EngineState.FAILED, words="libgomp.so.1 is missing"))
    (failed,) = lab.replicas()
    assert failed.why == "llamacpp 1 can't be used on n1 any more: libgomp.so.1 is missing"
    lab.run()
    assert [replica.placements[0].node for replica in lab.ready()] == ["n2"]


def test_what_runs_goes_on_where_its_engine_does_not_run_any_more() -> None:
    lab = started(machine("n1", "1"), spec=ONE)
    (runs,) = lab.ready()
    lab.install("n1", *has("1", state=EngineState.FAILED, words="libgomp.so.1 is missing"))
    lab.run()
    assert [(replica.id, replica.generation) for replica in lab.ready()] == [(runs.id, 1)]


# -- by hand


def test_an_operator_goes_back_and_forth() -> None:
    lab = started(machine("n1", "1", "2"), machine("n2", "1", "2"))
    lab.edit(CHAT, engines=[NEW])
    lab.run()
    lab.carry_out(roll_back(lab.state, "llamacpp", "an operator asked for it", lab.now))
    lab.run()
    assert versions(lab) == {"1": 2}
    with pytest.raises(CantRollBack, match="rolled back already, from 2 to 1: an operator asked for it"):
        roll_back(lab.state, "llamacpp", "again", lab.now)
    lab.carry_out(reset(lab.state, "llamacpp", lab.now))
    lab.run()
    assert versions(lab) == {"2": 2}
    with pytest.raises(CantRollBack, match="not rolled back: 2 is in effect"):
        reset(lab.state, "llamacpp", lab.now)


def test_where_there_is_nothing_to_go_back_to_it_says_so() -> None:
    lab = started()
    with pytest.raises(CantRollBack, match="no version of llamacpp before 1"):
        roll_back(lab.state, "llamacpp", "why", lab.now)
    with pytest.raises(CantRollBack, match="vllm is not among the engines of the file"):
        roll_back(lab.state, "vllm", "why", lab.now)
    with pytest.raises(CantRollBack, match="vllm is not among the engines of the file"):
        reset(lab.state, "vllm", lab.now)


# -- stores of older releases


def without_versions(state: Cluster) -> Cluster:
    """As a release stored it that knew no versions."""
    replicas = {}
    for key, replica in state.replicas.items():
        assert replica.profile is not None
        assert replica.spec is not None
        bare = replace(replica.profile, engine_version="")
        replicas[key] = replace(replica, profile=bare, spec=replace(replica.spec, profiles=(bare,)))
    return replace(state, replicas=replicas, engines={})


def test_replicas_of_an_older_release_run_on_what_their_nodes_report() -> None:
    lab = started()
    state, _ = with_file(without_versions(lab.state), Catalog(models=(CHAT,), engines=(OLD,)), NOW)
    lab.state = replace(state, replicas={**state.replicas, **told_versions(state)})
    lab.run()
    assert versions(lab) == {"1": 2}
    assert lab.told("replica.draining") == []
    assert told_versions(lab.state) == {}


def test_a_shard_is_asked_for_with_its_version() -> None:
    lab = started(spec=ONE)
    seen: list[DesiredShard] = [each.asked for here in lab.engines.values() for each in here.values()]
    assert [shard.profile.engine_version for shard in seen] == ["1"]


def test_which_engine_is_nowhere() -> None:
    state, _ = with_file(cluster([machine("n1", "1")]), Catalog(models=(ONE,), engines=(NEW,)), NOW)
    (spec,) = state.catalog.models
    assert missing_engine(state.nodes, spec) == "llamacpp 2"
    assert missing_engine(apply(state, ()).nodes, ONE) == ""
