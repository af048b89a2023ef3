"""The life of replicas: made, placed, started, failed, lost, taken up again, stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.actions import CountReplica, Note, PutReplica, RemoveReplica
from llmgw.cluster.lifecycle import FORGIVEN_AFTER_S
from llmgw.cluster.model import (
    Cluster,
    Exit,
    Instant,
    NodeState,
    ObservedShard,
    Replica,
    ReplicaState,
    ShardState,
)
from llmgw.cluster.naming import replica_id, replica_key
from llmgw.cluster.reconcile import apply, desired, reconcile, routes

from .building import (
    NOW,
    cluster,
    gpu,
    heard,
    later,
    model,
    node,
    observed,
    only,
    profile,
    ready,
    reported,
    settled,
    with_catalog,
    with_node,
)

S = ShardState


def one(**fields: object) -> Cluster:
    """One node, one model with one replica, ready."""
    return ready(cluster([node("n1", gpus=2)], [model("m", profile(gpus_per_node=2), **fields)]))


def shard_of(state: Cluster, node_name: str = "n1") -> ObservedShard:
    (shard,) = state.nodes[node_name].shards
    return shard


def failed(state: Cluster, now: Instant = NOW, **fields: object) -> Cluster:
    """The one shard has failed, and its node says so."""
    return settled(reported(state, S.FAILED, **fields), now)


def notes(state: Cluster, now: Instant = NOW) -> list[tuple[str, str]]:
    return [(action.kind, action.words) for action in reconcile(state, now) if isinstance(action, Note)]


# -- starting


def test_a_replica_is_made_placed_and_asked_for_in_one_step() -> None:
    state = cluster([node("n1", gpus=2)], [model("m", profile(gpus_per_node=2), source="/w", aliases=("a",))])
    actions = reconcile(state, NOW)
    name = replica_id(state, "m", 1)
    assert [type(action) for action in actions[:2]] == [CountReplica, PutReplica]
    state = apply(state, actions)
    replica = only(state)
    assert (replica.id, replica.state, replica.generation, replica.number) == (name, ReplicaState.PLACING, 1, 1)
    (shard,) = desired(state, "n1")
    assert (shard.id, shard.generation, shard.rank, shard.model) == (f"{name}/0", 1, 0, "m")
    assert (shard.source, shard.aliases, shard.api_key) == ("/w", ("a",), replica_key("secret", name))
    assert shard.placement == replica.placements[0]
    assert shard.placement.gpu_uuids == ("GPU-0", "GPU-1")
    assert [kind for kind, _ in notes(cluster([node("n1", gpus=2)], state.catalog.models))] == [
        "replica.created",
        "replica.placed",
    ]


@pytest.mark.parametrize(
    ("shard_state", "state", "why"),
    [
        (S.WANTED, ReplicaState.PLACING, "queued on n1"),
        (S.PREPARING, ReplicaState.PREPARING, "queued on n1"),
        (S.STARTING, ReplicaState.STARTING, "queued on n1"),
        (S.LOADING, ReplicaState.STARTING, "queued on n1"),
        (S.READY, ReplicaState.READY, "ready on n1"),
    ],
)
def test_the_nodes_words_are_the_replicas(shard_state: ShardState, state: ReplicaState, why: str) -> None:
    after = settled(reported(settled(cluster([node("n1")], [model()])), shard_state, why="queued"))
    assert (only(after).state, only(after).why) == (state, why)


def test_progress_changes_the_words_but_not_the_story() -> None:
    state = settled(reported(settled(cluster([node("n1")], [model()])), S.PREPARING, why="downloading (41 %)"))
    before = only(state)
    after = only(settled(reported(state, S.PREPARING, why="downloading (42 %)"), later(3)))
    assert (before.why, after.why) == ("downloading (41 %) on n1", "downloading (42 %) on n1")
    assert (after.story, after.since) == (before.story, before.since)


def test_ready_without_an_endpoint_is_not_ready() -> None:
    state = settled(cluster([node("n1")], [model()]))
    (shard,) = desired(state, "n1")
    state = settled(with_node(state, "n1", shards=(observed(shard.id, 1, S.READY),)))
    assert only(state).state is ReplicaState.STARTING
    assert only(state).why == "its shard on n1 says that it is ready, but not at which address"


def test_another_generations_shard_makes_nothing_ready() -> None:
    state = settled(cluster([node("n1")], [model()]))
    (shard,) = desired(state, "n1")
    for generation in (0, 2):
        after = settled(with_node(state, "n1", shards=(observed(shard.id, generation, S.READY, "127.0.0.1:1"),)))
        assert only(after).state is ReplicaState.PLACING


def test_a_ready_shard_that_goes_back_to_loading_leaves_the_routes() -> None:
    state = settled(reported(one(), S.LOADING, why="not answering"))
    assert (only(state).state, only(state).endpoint) == (ReplicaState.STARTING, None)
    assert routes(state)[0].endpoints == ()
    assert routes(settled(reported(state, S.READY)))[0].endpoints != ()


def test_a_lost_report_costs_latency_only() -> None:
    """The report that says ready is dropped; the next one, of the same state, converges all the same."""
    state = settled(reported(settled(cluster([node("n1")], [model()])), S.LOADING))
    state = settled(reported(state, S.READY), later(5))
    assert only(state).state is ReplicaState.READY


def test_nothing_new_is_asked_of_a_node_that_has_come_back_and_not_probed_yet() -> None:
    state = settled(cluster([node("n1")], [model()]))
    state = settled(with_node(state, "n1", probed=False, session=2))
    assert state.nodes["n1"].state is NodeState.JOINING
    assert desired(state, "n1") == ()
    assert len(desired(settled(with_node(state, "n1", probed=True)), "n1")) == 1


def test_what_runs_goes_on_running_while_its_agent_probes_again() -> None:
    state = settled(with_node(one(), "n1", probed=False, session=2))
    assert len(desired(state, "n1")) == 1
    assert routes(state)[0].endpoints[0].preferred


# -- failing


def test_a_crash_is_told_with_its_exit_and_its_last_lines() -> None:
    state = failed(one(), exit=Exit(status=1, last_lines=("loading", "  no such file  ")))
    replica = only(state)
    assert (replica.state, replica.restarts, replica.failures) == (ReplicaState.FAILED, 1, 1)
    assert replica.last_exit == Exit(status=1, last_lines=("loading", "  no such file  "))
    assert replica.why == (f"shard {replica.id}/0 on n1 exited with status 1; last lines: loading | no such file")
    assert replica.story[-1].why == replica.why
    assert replica.retry_at == NOW.wall_s + 1
    assert desired(state, "n1") == ()
    assert routes(state)[0].endpoints == ()


def test_a_signal_and_a_lack_of_memory_are_named() -> None:
    assert "killed by SIGKILL" in only(failed(one(), exit=Exit(signal="SIGKILL"))).why
    assert "killed for lack of memory" in only(failed(one(), exit=Exit(signal="SIGKILL", oom=True))).why


def test_a_shard_that_is_no_longer_reported_has_failed() -> None:
    state = settled(with_node(one(), "n1", shards=()))
    assert (only(state).state, only(state).restarts) == (ReplicaState.FAILED, 1)
    assert only(state).why == f"shard {only(state).id}/0 is no longer running on n1, and nobody saw it end"


def test_an_agent_that_was_restarted_while_it_prepared_begins_anew_without_a_failure() -> None:
    state = settled(reported(settled(cluster([node("n1")], [model()])), S.PREPARING))
    state = settled(with_node(state, "n1", session=2, shards=()))
    assert (only(state).state, only(state).restarts, only(state).generation) == (ReplicaState.PLACING, 0, 1)
    assert len(desired(state, "n1")) == 1
    for started in (S.STARTING, S.LOADING, S.READY):
        state = settled(reported(settled(cluster([node("n1")], [model()])), started))
        assert only(settled(with_node(state, "n1", session=2, shards=()))).state is ReplicaState.FAILED


def test_a_shard_that_was_not_taken_up_yet_has_not_failed() -> None:
    state = settled(cluster([node("n1")], [model()]))
    assert reconcile(with_node(state, "n1", shards=(), heard_at_s=1005.0), later(5)) == ()


def test_the_next_generation_waits_for_its_backoff_and_for_the_end_of_the_last() -> None:
    state = failed(one())
    assert reconcile(heard(state, later(30)), later(30)) == (), "its shard is still there"
    state = settled(with_node(state, "n1", shards=()), later(0.2))
    assert only(state).placements == ()
    assert reconcile(state, later(0.99)) == (), "its backoff runs"
    state = settled(state, later(1))
    replica = only(state)
    assert (replica.state, replica.generation, replica.restarts, replica.retry_at) == (ReplicaState.PLACING, 2, 1, None)
    assert desired(state, "n1")[0].generation == 2


def test_what_a_failed_replica_gave_up_it_does_not_hold_again_when_the_stream_breaks() -> None:
    state = failed(one())
    state = settled(with_node(state, "n1", shards=()))
    state = settled(with_catalog(state, *state.catalog.models, model("x", profile(gpus_per_node=2))))
    assert only(state, "x").placements[0].gpu_uuids == ("GPU-0", "GPU-1")
    state = settled(with_node(state, "n1", session=None), later(0.5))
    assert [len(replica.placements) for replica in state.replicas.values()].count(1) == 1


def test_absence_is_no_proof_before_the_node_has_caught_up() -> None:
    state = settled(cluster([node("n1", gpus=2)], [model("m", profile(gpus_per_node=2))]))
    state = settled(with_catalog(with_node(state, "n1", caught_up=False), model("x", profile(gpus_per_node=2))))
    (stopping,) = (replica for replica in state.replicas.values() if replica.model == "m")
    assert stopping.state is ReplicaState.STOPPING
    assert only(state, "x").why == "n1: 0 of 2 GPUs free, 2 needed"
    state = settled(settled(with_node(state, "n1", caught_up=True)))
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.PLACING]


def test_backoff_doubles_and_is_forgotten_after_ten_minutes_of_being_ready() -> None:
    state, now = one(), NOW
    for failures, wait_s in ((1, 1), (2, 2), (3, 4), (4, 8)):
        state = failed(heard(state, now), now)
        assert (only(state).failures, only(state).restarts) == (failures, failures)
        assert only(state).retry_at == now.wall_s + wait_s
        now = later(wait_s, now)
        state = ready(heard(with_node(state, "n1", shards=()), now), now)
        assert only(state).state is ReplicaState.READY
    assert reconcile(heard(state, later(FORGIVEN_AFTER_S - 1, now)), later(FORGIVEN_AFTER_S - 1, now)) == ()
    now = later(FORGIVEN_AFTER_S, now)
    state = settled(heard(state, now), now)
    assert (only(state).failures, only(state).restarts) == (0, 4)


def test_a_clock_that_is_set_back_does_not_prolong_a_backoff() -> None:
    state = settled(with_node(failed(one()), "n1", shards=()))
    back = Instant(NOW.wall_s - 600, NOW.monotonic_s + 0.1)
    state = settled(state, back)
    assert only(state).retry_at == back.wall_s + 1
    assert only(settled(state, later(1, back))).state is ReplicaState.PLACING


def test_a_restart_prefers_the_same_node() -> None:
    state = ready(cluster([node("n1", memory_gib=32), node("n2", memory_gib=16)], [model()]))
    assert only(state).placements[0].node == "n1"
    state = failed(with_node(state, "n2", inventory=node("n2", memory_gib=64).inventory))
    state = settled(settled(with_node(state, "n1", shards=())), later(1))
    assert only(state).placements[0].node == "n1"


def test_a_restart_goes_elsewhere_where_it_no_longer_fits() -> None:
    state = ready(cluster([node("n1", gpus=1), node("n2", gpus=2)], [model("m", profile(gpus_per_node=1))]))
    state = settled(
        with_node(failed(state), "n1", shards=(), inventory=node("n1", gpus=[gpu(0, problem="lost")]).inventory)
    )
    assert only(settled(state, later(1))).placements[0].node == "n2"


def test_a_taken_port_moves_on_to_the_next_block_and_round() -> None:
    state = ready(cluster([node("n1", ports="20000-20299")], [model()]))
    ports, now = [only(state).placements[0].port], NOW
    for _ in range(4):
        state = failed(heard(state, now), now, port_taken=True)
        now = later(60, now)
        state = ready(heard(with_node(state, "n1", shards=()), now), now)
        ports.append(only(state).placements[0].port)
    assert ports == [20000, 20100, 20200, 20000, 20100]


def test_a_failure_of_another_kind_does_not_lead_back_to_a_taken_port() -> None:
    state = failed(ready(cluster([node("n1")], [model()])), port_taken=True)
    now = later(60)
    state = settled(heard(with_node(state, "n1", shards=()), now), now)
    assert only(state).placements[0].port == 20100
    state = failed(ready(state, now), now)
    now = later(60, now)
    state = settled(heard(with_node(state, "n1", shards=()), now), now)
    assert only(state).placements[0].port == 20100
    assert only(state).failures == 2


def test_other_failures_keep_the_block() -> None:
    state = failed(ready(cluster([node("n1")], [model()])))
    state = settled(with_node(state, "n1", shards=()), later(5))
    assert only(state).placements[0].port == 20000


# -- the control plane's own restarts


def restarted(state: Cluster) -> Cluster:
    """As the store gives it back: nodes without sessions, silence, vitals and shards."""
    nodes = {
        name: replace(known, session=None, heard_at_s=0.0, shards=(), vitals=None)
        for name, known in state.nodes.items()
    }
    return replace(state, nodes=nodes, grace_until_s=NOW.monotonic_s + 30)


def test_a_restart_changes_neither_replicas_nor_routes() -> None:
    before = ready(cluster([node("n1"), node("n2")], [model("m", replicas=5)]))
    after = restarted(before)
    assert reconcile(after, later(10)) == ()
    assert routes(after) == routes(before)


def test_what_is_still_running_is_adopted_without_a_restart() -> None:
    before = ready(cluster([node("n1"), node("n2")], [model("m", replicas=5)]))
    state = restarted(before)
    for name in ("n1", "n2"):
        shards = before.nodes[name].shards
        state = settled(with_node(state, name, session=9, heard_at_s=1005.0, shards=shards), later(5))
    assert state.replicas == before.replicas
    assert [desired(state, name) for name in ("n1", "n2")] == [desired(before, name) for name in ("n1", "n2")]


def test_a_node_that_comes_back_short_of_a_shard_fails_the_replica() -> None:
    state = with_node(restarted(one()), "n1", session=9, heard_at_s=1005.0, shards=())
    assert only(settled(state, later(5))).state is ReplicaState.FAILED


def test_nothing_is_placed_on_a_node_that_has_not_come_back() -> None:
    state = restarted(cluster([node("n1")], [model()]))
    assert only(settled(state)).why == "n1: not connected: its agent has not come back yet"


def test_a_shard_of_a_generation_that_is_not_known_is_not_adopted() -> None:
    state = one()
    ahead = replace(shard_of(state), generation=5)
    state = settled(with_node(state, "n1", shards=(ahead,)))
    assert only(state).state is ReplicaState.FAILED
    state = settled(settled(with_node(state, "n1", shards=())), later(1))
    assert only(state).generation == 2


def test_an_id_that_a_node_still_reports_is_never_given_again() -> None:
    """The store was put back from a backup, and knows less than the nodes."""
    state = cluster()
    elsewhere = cluster([node("n1", shards=(observed(f"{replica_id(state, 'm', 1)}/0", 3, S.READY),))], [model()])
    assert only(settled(elsewhere)).number == 2


def test_a_generation_that_a_node_still_reports_is_never_given_again() -> None:
    state = ready(cluster([node("n1", memory_gib=32), node("n2")], [model()]))
    ahead = replace(shard_of(state), generation=5)
    state = with_node(with_node(failed(state), "n1", shards=()), "n2", shards=(ahead,))
    state = settled(settled(state), later(1))
    assert only(state).generation == 6


# -- scaling, removal, change


def test_too_many_go_those_not_ready_first_and_then_the_youngest() -> None:
    state = ready(cluster([node("n1", gpus=3)], [model("m", profile(gpus_per_node=1), replicas=5)]))
    numbers = {replica.number: replica.state for replica in state.replicas.values()}
    assert [numbers[number] for number in (1, 2, 3)] == [ReplicaState.READY] * 3
    assert [numbers[number] for number in (4, 5)] == [ReplicaState.UNPLACED] * 2
    state = settled(replace(state, scale={"m": 4}))
    assert sorted(replica.number for replica in state.replicas.values()) == [1, 2, 3, 4]
    state = settled(replace(state, scale={"m": 2}))
    stopping = [replica for replica in state.replicas.values() if replica.state is ReplicaState.STOPPING]
    assert [(replica.number, replica.why) for replica in stopping] == [(3, "2 replicas of m wanted (by ctl scale)")]


def test_an_older_one_that_is_not_ready_goes_before_a_younger_one_that_is() -> None:
    state = ready(cluster([node("n1")], [model("m", replicas=3)]))
    oldest = next(replica for replica in state.replicas.values() if replica.number == 1)
    shards = tuple(
        replace(shard, state=S.LOADING, endpoint=None) if shard.id == oldest.shard_id(0) else shard
        for shard in state.nodes["n1"].shards
    )
    state = settled(replace(with_node(state, "n1", shards=shards), scale={"m": 2}))
    stopping = [replica.number for replica in state.replicas.values() if replica.state is ReplicaState.STOPPING]
    assert stopping == [1]
    assert len(routes(state)[0].endpoints) == 2


def test_what_stops_leaves_the_routes_at_once_and_is_removed_when_its_node_says_it_is_gone() -> None:
    state = replace(one(), scale={"m": 0})
    state = settled(state)
    (replica,) = state.replicas.values()
    assert replica.state is ReplicaState.STOPPING
    assert routes(state)[0].endpoints == ()
    assert routes(state)[0].why_none == "no replica of m is ready: 1 stopping"
    assert desired(state, "n1") == ()
    assert reconcile(with_node(state, "n1", shards=(replace(shard_of(state), state=S.STOPPING),)), NOW) == ()
    gone = with_node(state, "n1", shards=())
    assert RemoveReplica(replica.id) in reconcile(gone, NOW)
    assert routes(settled(gone))[0].why_none == "m is scaled to 0 replicas"


def test_what_stops_on_a_node_that_is_away_for_a_moment_is_kept_until_it_is_known() -> None:
    state = settled(with_node(replace(one(), scale={"m": 0}), "n1", session=None), later(1))
    assert len(state.replicas) == 1


def test_a_model_that_left_the_catalog_is_stopped() -> None:
    state = settled(with_catalog(one()))
    (replica,) = state.replicas.values()
    assert (replica.state, replica.why) == (ReplicaState.STOPPING, "m is no longer in the catalog")
    assert routes(state) == ()


def test_halting_stops_everything_and_starts_nothing() -> None:
    state = settled(replace(with_catalog(one(), model("m", profile(gpus_per_node=2)), model("n")), halting=True))
    assert [(replica.state, replica.why) for replica in state.replicas.values()] == [
        (ReplicaState.STOPPING, "the cluster is being stopped")
    ]
    assert settled(with_node(state, "n1", shards=())).replicas == {}


def test_ids_are_never_used_again() -> None:
    seen: set[str] = set()
    state = cluster([node("n1")], [model()])
    for _ in range(5):
        state = settled(replace(state, scale={}))
        seen.add(only(state).id)
        state = settled(replace(state, scale={"m": 0}))
        assert state.replicas == {}
    assert len(seen) == state.replicas_made["m"] == 5


def test_a_changed_profile_does_not_touch_what_runs_and_is_taken_by_the_next_generation() -> None:
    state = one()
    changed = model("m", profile(gpus_per_node=1, context=4096))
    state = with_catalog(state, changed)
    assert reconcile(state, NOW) == ()
    assert desired(state, "n1")[0].profile.gpus_per_node == 2
    state = settled(settled(with_node(failed(state), "n1", shards=())), later(1))
    assert only(state).profile == changed.profiles[0]
    assert len(only(state).placements[0].gpu_uuids) == 1


def test_actions_carry_whole_values_in_the_order_of_ids() -> None:
    state = cluster([node("n2"), node("n1")], [model("b"), model("a", replicas=3)])
    actions = reconcile(state, NOW)
    ids = [action.replica.id for action in actions if isinstance(action, PutReplica)]
    assert ids == sorted(ids)
    assert all(isinstance(action.replica, Replica) for action in actions if isinstance(action, PutReplica))
    assert apply(state, actions) == apply(apply(state, actions), actions)
