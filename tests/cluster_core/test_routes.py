"""Where the gateway may send requests."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.model import ReplicaState, ShardState
from llmgw.cluster.naming import replica_key
from llmgw.cluster.reconcile import routes

from .building import cluster, model, node, only, profile, ready, reported, settled, with_catalog


def test_a_ready_replica_is_routed_to() -> None:
    spec = model("m", profile(max_concurrency=7), aliases=("a", "b"), task="embed")
    state = ready(cluster([node("n1")], [spec]))
    (route,) = routes(state)
    (endpoint,) = route.endpoints
    assert (route.model, route.aliases, route.task, route.why_none) == ("m", ("a", "b"), "embed", "")
    assert (endpoint.replica, endpoint.generation, endpoint.preferred) == (only(state).id, 1, True)
    assert (endpoint.url, endpoint.max_concurrency) == ("http://127.0.0.1:20000", 7)
    assert endpoint.api_key == replica_key("secret", only(state).id)


def test_a_model_without_endpoints_says_in_which_states_its_replicas_are() -> None:
    state = cluster([node("n1")], [model("m", replicas=2), model("n", replicas=0)])
    assert [route.why_none for route in routes(state)] == ["m has no replica yet", "n is scaled to 0 replicas"]
    loading = settled(reported(settled(state), ShardState.LOADING))
    assert routes(loading)[0].why_none == "no replica of m is ready: 2 starting"


def test_words_for_clients_name_no_node() -> None:
    state = settled(cluster([node("secret-host", engines=())], [model()]))
    assert "secret-host" not in routes(state)[0].why_none


def test_an_alias_is_routed_where_every_endpoint_answers_to_it() -> None:
    state = ready(cluster([node("n1")], [model(aliases=("old", "kept"))]))
    state = with_catalog(state, model(aliases=("kept", "new")))
    assert routes(state)[0].aliases == ("kept",)
    state = ready(replace(settled(replace(state, scale={"m": 0})), nodes={"n1": node("n1")}, scale={"m": 0}))
    state = settled(replace(state, scale={}))
    assert routes(state)[0].aliases == ("kept", "new")


def test_an_alias_that_went_to_another_model_is_not_routed_twice() -> None:
    state = ready(cluster([node("n1")], [model("old", aliases=("default",))]))
    state = with_catalog(state, model("new", aliases=("default",)))
    assert [(route.model, route.aliases) for route in routes(state)] == [("new", ("default",)), ("old", ())]


def test_routes_are_in_the_order_of_names() -> None:
    state = ready(cluster([node("n1")], [model("b", replicas=3), model("a")]))
    assert [route.model for route in routes(state)] == ["a", "b"]
    names = [endpoint.replica for endpoint in routes(state)[1].endpoints]
    assert names == sorted(names)
    assert len(names) == 3


def test_a_draining_replica_is_no_endpoint_and_named_as_leaving_in_peace() -> None:
    state = ready(cluster([node("n1")], [model("m", replicas=2)]))
    leaving, stays = sorted(state.replicas)
    draining = replace(state.replicas[leaving], state=ReplicaState.DRAINING)
    state = replace(state, replicas={**state.replicas, leaving: draining})
    (route,) = routes(state)
    assert route.draining == (leaving,)
    assert [endpoint.replica for endpoint in route.endpoints] == [stays]
    failed = replace(draining, state=ReplicaState.FAILED)
    (route,) = routes(replace(state, replicas={**state.replicas, leaving: failed}))
    assert route.draining == ()
