"""What would become of a cluster: moves, what finds no place, and what newly does; and nothing of it happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from llmgw.cluster.catalog import Catalog
from llmgw.cluster.model import Cluster, Node, ReplicaState
from llmgw.cluster.reconcile import apply, reconcile
from llmgw.cluster.what_if import Addition, Changes, NotSupposable, WhatIf, WouldFit, WouldMove, WouldStop, what_if

from .building import GIB, NOW, cluster, engine, model, node, only, profile, ready, settled, with_node
from .fabrics import on
from .test_spanning import clusters

TWO = model("m", profile(nodes=2, gpus_per_node=4), replicas=2)


def lab(gpus: int = 8) -> list[Node]:
    return [on(f"node0{number}", "ib-a" if number < 3 else "ib-b", gpus=gpus) for number in (1, 2, 3, 4)]


def on_fabric(state: Cluster, name: str) -> str:
    (replica,) = (replica.id for replica in state.replicas.values() if replica.fabric == name)
    return replica


def moves(found: WhatIf) -> list[tuple[str, tuple[str, ...], tuple[str, ...], str]]:
    return [(move.replica, move.from_nodes, move.to_nodes, move.why) for move in found.moves]


def test_a_lost_node_takes_its_replica_to_the_other_fabric_whole() -> None:
    state = ready(cluster(lab(), [TWO]))
    found = what_if(state, Changes(lose_nodes=("node02",)), NOW)
    assert found == WhatIf(
        supposed=("node node02 is lost",),
        moves=(
            WouldMove(
                replica=on_fabric(state, "ib-a"),
                model="m",
                from_nodes=("node01", "node02"),
                to_nodes=("node03", "node04"),
                weights_there=True,
                why="node node02 is lost",
                fabric="ib-b",
            ),
        ),
    )


def test_it_is_what_then_happens() -> None:
    state = ready(cluster(lab(), [TWO]))
    (move,) = what_if(state, Changes(lose_nodes=("node02",)), NOW).moves
    after = settled(with_node(state, "node02", heard_at_s=NOW.monotonic_s - 100))
    (made,) = (replica for replica in after.replicas.values() if replica.state is ReplicaState.PLACING)
    assert tuple(placement.node for placement in made.placements) == move.to_nodes


def test_what_finds_no_place_says_why_and_how_many() -> None:
    state = ready(cluster(lab(4), [TWO]))
    (short,) = what_if(state, Changes(lose_nodes=("node02", "node02")), NOW).unplaced
    assert (short.model, short.replicas, short.already) == ("m", 1, 0)
    assert short.refusal.summary == ("ib-a has 2 of 2 nodes with 4 free GPUs but node02 is lost; ib-b has 0 of 2")
    three = ready(cluster(lab(4), [replace(TWO, replicas=3)]))
    (short,) = what_if(three, Changes(lose_nodes=("node02",)), NOW).unplaced
    assert (short.replicas, short.already) == (2, 1)


def test_a_lost_fabric_uproots_what_spans_it_and_leaves_what_runs_on_one_node() -> None:
    one = model("one", profile(gpus_per_node=1))
    state = ready(cluster(lab(), [replace(TWO, replicas=1), one]))
    fabric = only(state, "m").fabric
    assert fabric == "ib-a"
    found = what_if(state, Changes(lose_fabrics=("ib-a",)), NOW)
    assert found.supposed == ("fabric ib-a is lost",)
    assert moves(found) == [
        (only(state, "m").id, ("node01", "node02"), ("node03", "node04"), "node node01 is not on fabric ib-a")
    ]
    assert (found.unplaced, found.new) == ((), ())


def test_added_nodes_take_what_has_no_place() -> None:
    state = ready(cluster(lab(4), [replace(TWO, replicas=3)]))
    (waits,) = (replica.id for replica in state.replicas.values() if replica.state is ReplicaState.UNPLACED)
    found = what_if(state, Changes(add=(Addition(nodes=2, gpus_per_node=8, fabric="ib-a"),)), NOW)
    assert found.supposed == ("2 nodes with 8 GPUs each on fabric ib-a are added",)
    fit = WouldFit(replica=waits, model="m", to_nodes=("new-1", "new-2"), weights_there=True, fabric="ib-a")
    assert (found.new, found.moves, found.unplaced) == ((fit,), (), ())
    lone = what_if(state, Changes(add=(Addition(nodes=1, gpus_per_node=8, fabric="ib-a"),)), NOW)
    assert (lone.new, [short.replicas for short in lone.unplaced]) == ((), [1])
    elsewhere = what_if(state, Changes(add=(Addition(nodes=2, gpus_per_node=4, fabric="ib-c"),)), NOW)
    assert elsewhere.supposed == (
        "2 nodes with 4 GPUs each on fabric ib-c are added (a new fabric: there is ib-a, ib-b)",
    )
    assert [fit.fabric for fit in elsewhere.new] == ["ib-c"]
    off = what_if(state, Changes(add=(Addition(nodes=1, gpus_per_node=1),)), NOW)
    assert off.supposed == ("1 node with 1 GPU on no fabric is added",)


def test_added_nodes_are_as_the_others_are() -> None:
    spec = model("m", profile(engine="llamacpp", memory_bytes=20 * GIB, node_selector={"site": "x"}), source="/m")
    others = [
        node("n1", memory_gib=8, labels={"site": "x", "rack": "r1"}),
        node("n2", memory_gib=32, labels={"site": "x", "rack": "r2"}, engines=(engine("sim"),)),
    ]
    found = what_if(ready(cluster(others, [spec])), Changes(add=(Addition(nodes=1, gpus_per_node=0),)), NOW)
    assert [(fit.to_nodes, fit.weights_there) for fit in found.new] == [(("new-1",), False)]
    racked = replace(spec, profiles=(profile(engine="llamacpp", node_selector={"rack": "r9"}),))
    (short,) = what_if(
        ready(cluster(others, [racked])), Changes(add=(Addition(nodes=1, gpus_per_node=0),)), NOW
    ).unplaced
    assert "new-1: has no label rack (r9 is needed)" in [str(each) for each in short.refusal.profiles[0].nodes]


def test_another_catalog_moves_stops_and_makes() -> None:
    one = model("one", profile(gpus_per_node=1), replicas=1)
    gone = model("gone", profile(gpus_per_node=1), replicas=1)
    state = ready(cluster([node("n1", gpus=4), node("n2", gpus=4)], [one, gone]))
    wider = model("one", profile(gpus_per_node=2), replicas=1)
    new = model("new", profile(gpus_per_node=3), replicas=2)
    found = what_if(state, Changes(catalog=Catalog(models=(wider, new))), NOW)
    assert found.supposed == ("the catalog is another one, with 2 models",)
    assert found.stops == (
        WouldStop(
            replica=only(state, "gone").id,
            model="gone",
            nodes=(only(state, "gone").placements[0].node,),
            why="gone is not in the catalog",
        ),
    )
    assert [move.replica for move in found.moves] == [only(state, "one").id]
    assert "the catalog would say otherwise: " in found.moves[0].why
    assert [fit.replica for fit in found.new] == ["new (new)"]
    assert [(short.model, short.replicas, short.already) for short in found.unplaced] == [("new", 1, 0)]


def test_a_replica_that_has_no_room_beside_itself_would_stop_first() -> None:
    state = ready(cluster([node("n1", gpus=4)], [model("m", profile(gpus_per_node=4))]))
    found = what_if(state, Changes(catalog=Catalog(models=(model("m", profile(gpus_per_node=3)),))), NOW)
    assert [(move.to_nodes, move.downtime) for move in found.moves] == [(("n1",), True)]
    fewer = what_if(state, Changes(catalog=Catalog(models=(model("m", profile(gpus_per_node=4), replicas=0),))), NOW)
    assert [(stop.replica, stop.why) for stop in fewer.stops] == [(only(state).id, "0 replicas of m wanted")]


def test_what_finds_no_place_beside_it_gets_the_room_that_another_leaves() -> None:
    state = ready(
        cluster([node("n1", gpus=4)], [model("a", profile(gpus_per_node=1)), model("b", profile(gpus_per_node=3))])
    )
    turned = Catalog(models=(model("a", profile(gpus_per_node=3)), model("b", profile(gpus_per_node=1))))
    found = what_if(state, Changes(catalog=turned), NOW)
    assert [(move.model, move.downtime) for move in found.moves] == [("a", True), ("b", True)]
    both = Catalog(models=(model("a", profile(gpus_per_node=4)), model("b", profile(gpus_per_node=4))))
    found = what_if(state, Changes(catalog=both), NOW)
    assert found.moves == ()
    assert [(short.model, short.refusal.summary) for short in found.unplaced] == [
        ("a", "n1: 0 of 4 GPUs free, 4 needed"),
        ("b", "n1: 0 of 4 GPUs free, 4 needed"),
    ]


def test_what_is_on_its_way_without_the_change_is_not_put_down_to_it() -> None:
    state = ready(cluster(lab(), [TWO]))
    silent = with_node(state, "node02", heard_at_s=NOW.monotonic_s - 100)
    found = what_if(silent, Changes(add=(Addition(nodes=1, gpus_per_node=8),)), NOW)
    assert (found.moves, found.unplaced, found.new) == ((), (), ())


WRONG = [
    (Changes(), "nothing is supposed: name nodes or fabrics to lose, nodes to add, or a file with models"),
    (Changes(lose_nodes=("node2",)), "no node is named node2; did you mean node02?"),
    (Changes(lose_nodes=("x",)), "no node is named x; there is node01, node02, node03, node04"),
    (Changes(lose_fabrics=("ib-aa",)), "no fabric is named ib-aa; did you mean ib-a?"),
    (
        Changes(add=(Addition(nodes=0, gpus_per_node=8),)),
        "0×8 can't be added: 1 node or more is expected, and 0 GPUs or more on each, such as 2×8@ib-a",
    ),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_what_is_not_there_is_refused_with_the_nearest_name(changes: Changes, words: str) -> None:
    with pytest.raises(NotSupposable) as refused:
        what_if(cluster(lab(), [TWO]), changes, NOW)
    assert str(refused.value) == words


def test_an_empty_cluster_can_be_planned_for() -> None:
    found = what_if(cluster([], [TWO]), Changes(add=(Addition(nodes=4, gpus_per_node=8, fabric="ib-a"),)), NOW)
    assert [fit.to_nodes for fit in found.new] == [("new-1", "new-2"), ("new-3", "new-4")]


@settings(deadline=None, max_examples=40)
@given(clusters())
def test_nothing_changes_by_asking_and_the_same_question_has_the_same_answer(state: Cluster) -> None:
    after = apply(state, reconcile(state, NOW))
    changes = Changes(lose_nodes=(min(state.nodes),), add=(Addition(nodes=2, gpus_per_node=4, fabric="ib-a"),))
    found = what_if(after, changes, NOW)
    assert what_if(after, changes, NOW) == found
    assert after == apply(state, reconcile(state, NOW))
    for move in found.moves:
        assert min(state.nodes) not in move.to_nodes
    told = {move.replica for move in found.moves}
    uprooted = {
        replica.id
        for replica in after.replicas.values()
        if min(state.nodes) in [placement.node for placement in replica.placements]
    }
    short = sum(refused.replicas for refused in found.unplaced)
    assert len(uprooted - told) <= short
