"""``ctl why MODEL``."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.explain import why
from llmgw.cluster.model import Exit, ReplicaState, ShardState

from .building import cluster, gpu, later, model, node, only, profile, ready, reported, settled, with_catalog, with_node


def test_all_is_well() -> None:
    explanation = why(ready(cluster([node("n1")], [model("m", replicas=2)])), "m")
    assert (explanation.wanted, explanation.ready, explanation.refusal) == (2, 2, None)
    assert explanation.summary == "2 of 2 replicas ready"
    assert [replica.why for replica in explanation.replicas] == ["ready on n1", "ready on n1"]


def test_a_refusal_is_whole() -> None:
    state = settled(cluster([node("n1", gpus=1)], [model("m", profile(gpus_per_node=1), replicas=2)]))
    explanation = why(state, "m")
    unplaced = next(replica for replica in explanation.replicas if replica.state is ReplicaState.UNPLACED)
    assert unplaced.why == "n1: 0 of 1 GPU free, 1 needed"
    assert explanation.summary == f"0 of 2 replicas ready, 1 placing, 1 unplaced; {unplaced.id}: {unplaced.why}"
    assert explanation.refusal is not None
    assert [str(refused) for refused in explanation.refusal.profiles[0].nodes] == [unplaced.why]


def test_the_summary_tells_of_one_that_lacks_something_rather_than_of_one_on_its_way() -> None:
    state = settled(cluster([node("n1", gpus=1)], [model("m", profile(gpus_per_node=1), replicas=3)]))
    assert "GPU free, 1 needed" in why(state, "m").summary


def test_an_alias_is_explained_as_its_model() -> None:
    state = ready(cluster([node("n1")], [model("m", aliases=("default",))]))
    assert why(state, "default").model == "m"


def test_a_name_that_is_not_known_gets_the_nearest_one() -> None:
    state = cluster([], [model("qwen3-32b", aliases=("default",))])
    assert why(state, "qwen3-23b").summary == "no model is named qwen3-23b; did you mean qwen3-32b?"
    assert why(state, "x").summary == "no model is named x; there is qwen3-32b, default"
    assert why(cluster(), "x").summary == "no model is named x: the catalog is empty"


def test_a_failed_replica_says_what_happened_and_when_it_is_tried_again() -> None:
    state = ready(cluster([node("n1")], [model()]))
    state = settled(reported(state, ShardState.FAILED, exit=Exit(status=3, last_lines=("bad magic",))))
    (replica,) = why(state, "m").replicas
    assert replica.why == (
        f"shard {replica.id}/0 on n1 exited with status 3; last lines: bad magic; "
        "waits until n1 has ended generation 1; "
        "generation 2 starts at 2023-11-14 22:13:21 UTC (failure 1 in a row)"
    )


def test_a_stopping_replica_says_for_whom_it_waits() -> None:
    state = settled(replace(ready(cluster([node("n1")], [model()])), scale={"m": 0}))
    assert why(state, "m").replicas[0].why == "0 replicas of m wanted (by ctl scale); waits until n1 has stopped it"
    state = settled(with_node(state, "n1", session=None), later(1))
    assert why(state, "m").replicas[0].why.endswith("waits until n1 (not connected) has stopped it")
    assert why(state, "m").summary.startswith("0 of 0 replicas ready (by ctl scale; the catalog says 1), 1 stopping")


def test_a_ready_replica_tells_what_is_wrong_with_its_node() -> None:
    state = ready(cluster([node("n1", gpus=1)], [model("m", profile(gpus_per_node=1))]))
    state = with_node(state, "n1", inventory=node("n1", gpus=[gpu(0, problem="GPU is lost")]).inventory)
    assert why(state, "m").replicas[0].why == "ready on n1; GPU 0 of n1: GPU is lost"
    state = settled(with_node(state, "n1", session=None), later(1))
    assert "node n1 is suspect: its stream is closed" in why(state, "m").replicas[0].why


def test_what_a_lost_node_may_bring_back_is_said() -> None:
    state = settled(ready(cluster([node("n1")], [model()])), later(31))
    words = {line.state: line.why for line in why(state, "m").replicas}
    assert words[ReplicaState.UNPLACED] == "n1: lost since 2023-11-14 22:13:51 UTC: silent for 31 s"
    assert words[ReplicaState.FAILED] == (
        "node n1 lost: silent for 31 s; "
        "generation 1 is taken up again if its node returns with it while it is still missed"
    )


def test_a_changed_catalog_is_never_passed_over_in_silence() -> None:
    before = ready(cluster([node("n1")], [model("m", profile(), aliases=("a",), source="/w")]))
    name = only(before).id
    changes = [
        (model("m", profile(), aliases=("b",), source="/w"), "aliases"),
        (model("m", profile(), aliases=("a",), source="/v"), "source"),
        (model("m", profile(), aliases=("a",), source="/w", task="embed"), "task"),
        (model("m", profile(context=4096), aliases=("a",), source="/w"), "profile p"),
        (model("m", profile("q"), aliases=("a",), source="/w"), "profile p, which is gone"),
    ]
    for changed, what in changes:
        explanation = why(with_catalog(before, changed), "m")
        assert explanation.replicas[0].outdated == (
            f"{name} runs as the catalog was before ({what} changed since): a replacement is made next"
        )
        assert explanation.replicas[0].outdated in explanation.summary
    more = model("m", profile(), profile("other"), aliases=("a",), source="/w", replicas=5)
    assert why(with_catalog(before, more), "m").replicas[0].outdated == ""


def test_before_the_first_step() -> None:
    assert why(cluster([], [model()]), "m").summary == "0 of 1 replica ready, 1 not made yet"


def test_a_model_that_left_the_catalog_and_a_cluster_that_stops() -> None:
    state = settled(with_catalog(ready(cluster([node("n1")], [model()]))))
    assert why(state, "m").summary.startswith("0 of 0 replicas ready (m is not in the catalog), 1 stopping")
    state = settled(replace(ready(cluster([node("n1")], [model()])), halting=True))
    assert why(state, "m").summary.startswith("0 of 0 replicas ready (the cluster is being stopped), 1 stopping")


def test_explaining_changes_nothing() -> None:
    state = settled(cluster([node("n1", gpus=1)], [model("m", profile(gpus_per_node=1), replicas=2)]))
    assert why(state, "m") == why(state, "m")
