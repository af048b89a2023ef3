"""Which place is the best, and what a replica gets there."""

from __future__ import annotations

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.model import Cluster, Vitals
from llmgw.cluster.placement import Before, Placed, Planner, place

from .building import GIB, NOW, cluster, engine, gpu, model, node, only, profile, ready, settled, with_node


def where(state: Cluster, spec: ModelSpec) -> str:
    placed = place(state, spec, NOW)
    assert isinstance(placed, Placed)
    return placed.placements[0].node


def test_a_node_that_holds_the_weights_comes_first() -> None:
    spec = model("m", profile(engine="llamacpp", gpus_per_node=1), source="/m.gguf")
    nodes = [node("a", gpus=1), node("b", gpus=8, weights=("/m.gguf",))]
    assert where(cluster(nodes, [spec]), spec) == "b"


def test_then_the_fewest_gpus_stranded() -> None:
    four = model("m", profile(gpus_per_node=4))
    nodes = [node("a", gpus=5), node("b", gpus=6), node("c", gpus=8)]
    assert where(cluster(nodes), four) == "c"
    assert where(cluster(nodes[:2]), four) == "a"
    assert where(cluster([node("a", gpus=2, memory_gib=64), node("b")]), model("m", profile(memory_bytes=GIB))) == "b"


def test_what_is_stranded_hangs_on_what_the_catalog_asks_for() -> None:
    four, whole = model("m", profile(gpus_per_node=4), replicas=2), model("w", profile(gpus_per_node=8), replicas=0)
    nodes = [node("a", gpus=8), node("b", gpus=8)]
    spread = settled(cluster(nodes, [four]))
    assert sorted(replica.placements[0].node for replica in spread.replicas.values()) == ["a", "b"]
    packed = settled(cluster(nodes, [four, whole]))
    assert [replica.placements[0].node for replica in packed.replicas.values()] == ["a", "a"]


def test_then_fewer_replicas_of_the_same_model() -> None:
    spec = model("m", profile(memory_bytes=GIB))
    state = settled(cluster([node("a", memory_gib=16), node("b", memory_gib=8)], [spec]))
    assert only(state).placements[0].node == "a"
    assert where(state, spec) == "b"
    assert where(state, model("other", profile(memory_bytes=GIB))) == "a"


def test_then_fewer_free_gpus_then_more_free_memory_then_the_name() -> None:
    one = model("m", profile(gpus_per_node=1))
    assert where(cluster([node("a", gpus=4), node("b", gpus=3)]), one) == "b"
    assert where(cluster([node("a", memory_gib=8), node("b", memory_gib=16)]), model()) == "b"
    assert where(cluster([node("b"), node("a")]), model()) == "a"


def test_profiles_are_tried_in_order() -> None:
    spec = model("m", profile("big", gpus_per_node=4), profile("small", gpus_per_node=1), profile("cpu"), replicas=4)
    state = settled(cluster([node("a", gpus=5), node("b")], [spec]))
    used = sorted(
        (replica.profile.name, replica.placements[0].node) for replica in state.replicas.values() if replica.profile
    )
    assert used == [("big", "a"), ("cpu", "b"), ("cpu", "b"), ("small", "a")]


def test_a_shard_gets_exactly_the_gpus_of_its_profile_by_uuid() -> None:
    spec = model("m", profile(gpus_per_node=3), replicas=2)
    state = settled(
        cluster([node("a", gpus=[gpu(i, problem="GPU is lost" if i == 1 else None) for i in range(8)])], [spec])
    )
    held = sorted(replica.placements[0].gpu_uuids for replica in state.replicas.values())
    assert held == [("GPU-0", "GPU-2", "GPU-3"), ("GPU-4", "GPU-5", "GPU-6")]


def test_memory_is_what_the_heartbeat_says_last() -> None:
    spec = model("m", profile(memory_bytes=12 * GIB))
    state = settled(cluster([node("a", memory_gib=8)], [spec]))
    assert only(state).why == "a: 7.5 GiB of memory free, 12 GiB needed"
    vitals = Vitals(memory_bytes=32 * GIB, memory_available_bytes=GIB, disk_bytes=0, disk_free_bytes=0)
    state = settled(with_node(state, "a", vitals=vitals))
    assert only(state).placements[0].memory_bytes == 12 * GIB


def test_blocks_of_ports_do_not_overlap_also_after_the_range_was_moved() -> None:
    state = ready(cluster([node("a", ports="20000-20999")], [model("m", replicas=2)]))
    moved = node("a", ports="20050-20999", shards=state.nodes["a"].shards)
    placed = place(with_node(state, "a", inventory=moved.inventory), model("n"), NOW)
    assert isinstance(placed, Placed)
    assert placed.placements[0].port == 20250


def test_two_replicas_of_one_step_do_not_take_the_same_place() -> None:
    specs = [model("a", profile(gpus_per_node=2), replicas=2), model("b", profile(gpus_per_node=1), replicas=9)]
    state = settled(cluster([node("n1", gpus=4), node("n2", gpus=4)], specs))
    held = [
        (placement.node, uuid)
        for replica in state.replicas.values()
        for placement in replica.placements
        for uuid in placement.gpu_uuids
    ]
    assert len(held) == len(set(held)) == 8
    assert (
        sum(
            replica.why == "2 nodes: 2 short of GPUs; nearest n1: 0 of 4 GPUs free, 1 needed"
            for replica in state.replicas.values()
        )
        == 5
    )


def test_what_goes_back_to_its_old_node_counts_for_those_placed_after_it() -> None:
    spec = model("m", profile(gpus_per_node=1))
    planner = Planner(cluster([node("a", gpus=4), node("b", gpus=3)], [spec]))
    places = [planner.find(spec)]
    places += [planner.find(spec, Before(("a",))) for _ in range(3)]
    places.append(planner.find(spec))
    assert [placed.placements[0].node for placed in places if placed is not None] == ["b", "a", "a", "a", "b"]


def test_an_engine_that_is_there_but_not_usable_is_no_engine() -> None:
    spec = model("m", profile(engine="llamacpp"), source="/m")
    assert where(cluster([node("a", engines=()), node("b", engines=(engine("llamacpp"),))]), spec) == "b"


def test_where_one_failed_too_often_is_left_for_where_it_failed_less() -> None:
    state = cluster([node("a"), node("b"), node("c")])

    def goes(failed_on: dict[str, int]) -> tuple[str, int]:
        placed = Planner(state).find(model("m"), Before(("b",), 20000, failed_on))
        assert placed is not None
        return placed.placements[0].node, placed.placements[0].port

    assert goes({"b": 2}) == ("b", 20100)
    assert goes({"b": 3}) == ("a", 20000)
    assert goes({"b": 3, "a": 2}) == ("c", 20000)
    assert goes({"b": 4, "a": 4, "c": 3}) == ("c", 20000)
    # Where it failed no less, it stays, and goes on to the next ports.
    assert goes({"b": 3, "a": 3, "c": 3}) == ("b", 20100)
