"""What is placed where, worked out from what was known of another cluster, is what it would be from nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.cluster.holdings import Holdings
from llmgw.cluster.model import Placement, Replica, ReplicaState

PLACEMENTS = st.lists(
    st.builds(Placement, node=st.sampled_from(("n1", "n2", "n3")), port=st.sampled_from((20000, 20100))), max_size=3
)
REPLICAS = st.builds(
    Replica,
    id=st.just(""),
    model=st.sampled_from(("a", "b")),
    state=st.sampled_from((ReplicaState.READY, ReplicaState.FAILED)),
    since=st.just(0.0),
    generation=st.integers(1, 2),
    placements=PLACEMENTS.map(tuple),
)
CHANGES = st.lists(st.tuples(st.integers(0, 30), st.one_of(st.none(), REPLICAS)), max_size=4)


def contents(found: Holdings) -> tuple[object, ...]:
    by_node = {node_id: sorted(held, key=str) for node_id, held in found.by_node.items() if held}
    by_model = {model: dict(counts) for model, counts in found.by_model.items() if counts}
    return dict(found.replicas), by_node, by_model


def from_nothing(replicas: dict[str, Replica]) -> tuple[object, ...]:
    Holdings.forget()
    return contents(Holdings.of(replicas))


@settings(deadline=None, max_examples=40)
@given(st.lists(REPLICAS, min_size=25, max_size=31), st.lists(CHANGES, max_size=5))
def test_a_few_changes_at_a_time(begun: list[Replica], steps: list[list[tuple[int, Replica | None]]]) -> None:
    replicas = {f"r{number}": replace(replica, id=f"r{number}") for number, replica in enumerate(begun)}
    Holdings.forget()
    found = Holdings.of(replicas)
    for changes in steps:
        for number, replica in changes:
            if replica is None:
                replicas.pop(f"r{number}", None)
            else:
                replicas[f"r{number}"] = replace(replica, id=f"r{number}")
        before = contents(found)
        following = Holdings.of(replicas)
        assert contents(found) == before, "what was said before has been changed"
        expected = from_nothing(replicas)
        assert contents(following) == expected
        Holdings.forget(following)
        found = following


def test_what_did_not_change_is_not_worked_out_again() -> None:
    replicas = {
        f"r{number}": Replica(
            id=f"r{number}",
            model="m",
            state=ReplicaState.READY,
            since=0.0,
            placements=(Placement(node=f"n{number}", port=20000),),
        )
        for number in range(20)
    }
    first = Holdings.of(replicas)
    replicas["r3"] = replace(replicas["r3"], placements=(Placement(node="n4", port=20100),))
    second = Holdings.of(replicas)
    assert second.by_node["n5"] is first.by_node["n5"]
    assert [held[0] for held in second.by_node["n4"]] == ["r4", "r3"]
    assert second.by_node["n3"] == ()
    assert second.by_model["m"] == {**dict.fromkeys((f"n{number}" for number in range(20) if number != 3), 1), "n4": 2}
