"""Replicas that leave in peace: out of the routes at once, stopped once no gateway has anything left for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.actions import Note
from llmgw.cluster.model import Cluster, Drain, Gateway, Replica, ReplicaState, ShardState, Traffic
from llmgw.cluster.quiet import waits_for
from llmgw.cluster.reconcile import desired, next_wake_s, reconcile, routes

from .building import (
    NOW,
    cluster,
    heard,
    later,
    model,
    node,
    profile,
    ready,
    reported,
    settled,
    with_catalog,
    with_node,
)


def gateway(name: str = "g1", may_send: set[str] | None = None, in_flight: dict[str, int] | None = None) -> Gateway:
    traffic = {replica: Traffic(in_flight=number) for replica, number in (in_flight or {}).items()}
    table = None if may_send is None else frozenset(may_send)
    return Gateway(id=name, connected=True, heard_at_s=NOW.monotonic_s, may_send=table, traffic=traffic)


def with_gateways(state: Cluster, *gateways: Gateway) -> Cluster:
    return replace(state, gateways={gateway.id: gateway for gateway in gateways})


def serving(replicas: int = 2) -> Cluster:
    """A gateway has taken up the table with all replicas."""
    state = ready(cluster([node("n1")], [model("m", replicas=replicas)]))
    return with_gateways(state, gateway(may_send=set(state.replicas)))


def scaled(state: Cluster, replicas: int, seconds: float = 0) -> Cluster:
    return settled(replace(state, scale={"m": replicas}), later(seconds))


def leaving(state: Cluster) -> Replica:
    (replica,) = (
        each for each in state.replicas.values() if each.state in (ReplicaState.DRAINING, ReplicaState.STOPPING)
    )
    return replica


def at(state: Cluster, seconds: float) -> Cluster:
    return settled(heard(state, later(seconds)), later(seconds))


def notes(state: Cluster, seconds: float) -> dict[str, str]:
    return {action.kind: action.words for action in reconcile(state, later(seconds)) if isinstance(action, Note)}


def test_one_that_is_too_many_leaves_the_routes_and_runs_on_until_it_is_quiet() -> None:
    state = scaled(serving(), 1)
    old = leaving(state)
    (kept,) = state.replicas.keys() - {old.id}
    assert (old.state, old.number, old.why) == (ReplicaState.DRAINING, 2, "1 replica of m wanted (by ctl scale)")
    (route,) = routes(state)
    assert ([endpoint.replica for endpoint in route.endpoints], route.draining) == ([kept], (old.id,))
    assert len(desired(state, "n1")) == 2
    assert waits_for(state, old, NOW) == ("gateway g1 has not taken up the table without it yet",)

    state = at(with_gateways(state, gateway(may_send={kept}, in_flight={old.id: 3})), 1)
    assert waits_for(state, old, later(1)) == ("3 requests in flight through gateway g1",)
    assert leaving(state).state is ReplicaState.DRAINING
    state = with_gateways(state, gateway(may_send={kept}, in_flight={old.id: 0}))
    assert notes(state, 2)["replica.stopping"].endswith("stops: 1 replica of m wanted (by ctl scale)")
    state = at(state, 2)
    assert (leaving(state).state, len(desired(state, "n1"))) == (ReplicaState.STOPPING, 1)


def test_one_that_is_not_ready_stops_at_once() -> None:
    state = settled(reported(settled(cluster([node("n1")], [model("m", replicas=2)])), ShardState.PREPARING))
    state = scaled(with_gateways(state, gateway(may_send=set())), 1)
    assert leaving(state).state is ReplicaState.STOPPING


def test_one_whose_agent_takes_it_up_anew_lets_its_requests_finish() -> None:
    """Ready a moment ago: what it was sent then is still running."""
    state = serving(1)
    (replica,) = state.replicas.values()
    state = settled(reported(state, ShardState.STARTING, why="adopted"), NOW)
    assert state.replicas[replica.id].state is ReplicaState.STARTING
    state = scaled(state, 0)
    assert leaving(state).state is ReplicaState.DRAINING
    assert len(desired(state, "n1")) == 1
    state = at(with_gateways(state, gateway(may_send=set())), 1)
    assert leaving(state).state is ReplicaState.STOPPING


def test_halting_waits_for_no_request() -> None:
    state = settled(replace(serving(), halting=True))
    assert {replica.state for replica in state.replicas.values()} == {ReplicaState.STOPPING}
    state = settled(replace(scaled(serving(), 1), halting=True))
    assert {replica.state for replica in state.replicas.values()} == {ReplicaState.STOPPING}


def test_a_model_that_leaves_the_catalog_lets_its_requests_finish() -> None:
    state = settled(with_catalog(serving(1)))
    assert leaving(state).state is ReplicaState.DRAINING
    (route,) = routes(state)
    assert (route.model, route.endpoints, route.draining) == ("m", (), (leaving(state).id,))


def test_requests_that_take_too_long_are_given_up_in_words() -> None:
    state = scaled(serving(), 1)
    state = with_gateways(state, gateway(may_send=set(), in_flight={leaving(state).id: 1}))
    assert leaving(state).drained_by_s == NOW.monotonic_s + 600
    now = later(599.9)
    state = settled(heard(state, now), now)
    assert leaving(state).state is ReplicaState.DRAINING
    assert notes(heard(state, later(600)), 600)["replica.stopping"].endswith(
        "1 replica of m wanted (by ctl scale); out of time, it does not wait any longer for: "
        "1 request in flight through gateway g1"
    )


def test_a_drain_of_its_node_says_how_long_requests_may_take() -> None:
    state = serving()
    state = replace(state, drains={"n1": Drain(node="n1", since=0.0, in_flight_s=20.0, wait=True)}, in_flight_s=100.0)
    assert leaving(scaled(state, 1)).drained_by_s == NOW.monotonic_s + 20
    assert leaving(scaled(replace(state, drains={}), 1)).drained_by_s == NOW.monotonic_s + 100


def test_a_changed_file_says_anew_how_long_requests_may_take() -> None:
    state = scaled(serving(), 1)
    state = at(with_gateways(state, gateway(may_send=set(), in_flight={leaving(state).id: 1})), 10)
    assert leaving(at(replace(state, in_flight_s=20.0), 10)).drained_by_s == later(30).monotonic_s
    assert leaving(at(replace(state, in_flight_s=900.0), 10)).drained_by_s == later(900).monotonic_s


def test_a_control_plane_that_has_just_started_counts_the_time_anew() -> None:
    state = scaled(serving(), 1)
    stored = {name: replace(replica, drained_by_s=0.0) for name, replica in state.replicas.items()}
    state = at(replace(state, replicas=stored), 100)
    assert leaving(state).drained_by_s == later(100).monotonic_s + 600


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (gateway(may_send=None), "gateway g1 has not taken up a table yet"),
        (gateway(may_send={"OLD"}), "gateway g1 has not taken up the table without it yet"),
        (
            gateway(may_send={"OLD"}, in_flight={"OLD": 1}),
            "gateway g1 has not taken up the table without it yet, with 1 request in flight",
        ),
        (gateway(may_send=set(), in_flight={"OLD": 2}), "2 requests in flight through gateway g1"),
        (
            replace(gateway(may_send=set()), connected=False),
            "gateway g1 is not connected: the lease of the table that it may still send by runs on",
        ),
    ],
)
def test_each_gateway_says_what_is_waited_for(seen: Gateway, words: str) -> None:
    state = scaled(serving(), 1)
    old = leaving(state).id
    table = None if seen.may_send is None else frozenset(old if each == "OLD" else each for each in seen.may_send)
    seen = replace(seen, may_send=table, traffic={old: seen.traffic.get("OLD", Traffic())})
    quiet = gateway("g0", may_send=set())
    state = with_gateways(state, quiet, seen)
    assert waits_for(state, leaving(state), NOW) == (words,)
    assert leaving(settled(state)).state is ReplicaState.DRAINING


def test_a_gateway_that_is_cut_off_is_waited_for_no_longer_than_the_lease_of_its_table() -> None:
    state = scaled(serving(), 1)
    cut_off = replace(gateway(may_send=set(state.replicas), in_flight={leaving(state).id: 9}), connected=False)
    state = at(with_gateways(state, cut_off), 29.9)
    assert leaving(state).state is ReplicaState.DRAINING
    assert next_wake_s(state, later(29.9)) == NOW.monotonic_s + state.lease_s
    assert leaving(at(state, 30)).state is ReplicaState.STOPPING


def test_a_new_leader_waits_until_no_older_table_can_be_in_use() -> None:
    state = replace(with_gateways(serving()), tables_settled_at_s=NOW.monotonic_s + 30)
    state = scaled(state, 1)
    (words,) = waits_for(state, leaving(state), NOW)
    assert words.startswith("gateways that have not come back since this control plane took the lead")
    assert next_wake_s(heard(state, later(20)), later(20)) == NOW.monotonic_s + 30
    assert leaving(at(state, 29)).state is ReplicaState.DRAINING
    assert leaving(at(state, 30)).state is ReplicaState.STOPPING


def test_with_no_gateway_there_is_nothing_to_wait_for() -> None:
    assert leaving(scaled(with_gateways(serving()), 1)).state is ReplicaState.STOPPING


def test_one_that_ends_or_is_lost_while_it_leaves_is_not_built_anew() -> None:
    state = scaled(serving(), 1)
    old = leaving(state)
    shards = tuple(
        replace(shard, state=ShardState.FAILED, endpoint=None) if shard.id == old.shard_id(0) else shard
        for shard in state.nodes["n1"].shards
    )
    ended = at(with_node(state, "n1", shards=shards), 1)
    assert leaving(ended).state is ReplicaState.STOPPING
    assert "is no longer" not in leaving(ended).why
    lost = settled(with_node(state, "n1", session=None), later(31))
    assert old.id not in lost.replicas


def test_one_that_leaves_serves_on_while_its_shard_is_slow_to_answer() -> None:
    state = scaled(serving(), 1)
    state = at(reported(state, ShardState.LOADING), 1)
    assert leaving(state).state is ReplicaState.DRAINING


def test_of_several_ready_ones_that_on_a_node_not_heard_goes_first() -> None:
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    state = ready(cluster(nodes, [model("m", profile(gpus_per_node=1), replicas=2)]))
    oldest = next(replica for replica in state.replicas.values() if replica.number == 1)
    state = settled(with_node(state, oldest.placements[0].node, session=None), later(1))
    state = scaled(with_gateways(state, gateway(may_send=set(state.replicas))), 1, 1)
    assert leaving(state).id == oldest.id


def test_all_ranks_of_a_leaving_replica_run_until_it_is_quiet_and_stop_together() -> None:
    """Only a worker's node is to be emptied: the worker must not stop while the leader still has streams."""
    nodes = [node(name, gpus=8, fabrics=("ib-a",), address=f"10.0.0.{name[1:]}") for name in ("n1", "n2")]
    state = ready(cluster(nodes, [model("m", profile(nodes=2, gpus_per_node=8))]))
    state = with_gateways(state, gateway(may_send=set(state.replicas), in_flight=dict.fromkeys(state.replicas, 1)))
    state = scaled(state, 0)
    assert [[shard.go for shard in desired(state, name)] for name in ("n1", "n2")] == [[True], [True]]
    state = at(with_gateways(state, gateway(may_send=set())), 1)
    assert [desired(state, name) for name in ("n1", "n2")] == [(), ()]


def test_an_address_that_changes_does_not_cut_off_the_streams_of_one_that_leaves() -> None:
    nodes = [node(name, gpus=8, fabrics=("ib-a",), address=f"10.0.0.{name[1:]}") for name in ("n1", "n2")]
    state = ready(cluster(nodes, [model("m", profile(nodes=2, gpus_per_node=8))]))
    state = with_gateways(state, gateway(may_send=set(state.replicas), in_flight=dict.fromkeys(state.replicas, 1)))
    state = scaled(state, 0)
    state = at(with_node(state, "n2", inventory=node("n2", gpus=8, fabrics=("ib-a",), address="10.9.9.9").inventory), 1)
    assert leaving(state).state is ReplicaState.DRAINING
