"""Changes of a node, with old and new value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.cluster.model import Cpu, EngineState, Fabric, Gpu, Hca, Inventory, PortRange
from llmgw.cluster.news import engine_news, inventory_news, now_qualifies

from .building import GIB, NOW, cluster, engine, gpu, inventory, model, node, profile, ready, with_node

OLD = replace(
    inventory(gpus=2, memory_gib=16, labels={"rack": "r11"}),
    hcas=(Hca(name="mlx5_0", port=1, state="ACTIVE"),),
    fabrics=(Fabric(name="ib-a", hcas=("mlx5_0",)),),
    warnings=("no AVX2",),
)
CHANGES: list[tuple[Inventory, tuple[str, ...]]] = [
    (OLD, ()),
    (replace(OLD, memory_bytes=32 * GIB), ("memory 16 GiB -> 32 GiB",)),
    (replace(OLD, driver="550.54"), ("driver none -> 550.54",)),
    (replace(OLD, kernel="6.1.1"), ("kernel 6.1.0 -> 6.1.1",)),
    (replace(OLD, mgmt_addr="10.0.0.2"), ("management address 127.0.0.1 -> 10.0.0.2",)),
    (replace(OLD, ports=PortRange(1000, 2000)), ("ports 20000-29999 -> 1000-2000",)),
    (
        replace(OLD, cpu=Cpu(model="EPYC", architecture="x86_64", cores=16, extensions=("avx2",))),
        ("CPU cores 8 -> 16", "CPU extensions avx2 fma -> avx2"),
    ),
    (replace(OLD, labels={"rack": "r12", "disk": "nvme"}), ("label disk none -> nvme", "label rack r11 -> r12")),
    (replace(OLD, hcas=(Hca(name="mlx5_0", port=1, state="DOWN"),)), ("adapter mlx5_0/1 ACTIVE -> DOWN",)),
    (replace(OLD, fabrics=()), ("fabric ib-a mlx5_0 -> none",)),
    (replace(OLD, warnings=("hot",)), ("warning: hot", "no longer warns: no AVX2")),
    (replace(OLD, gpus=(gpu(0),)), ("GPUs 2 -> 1", "GPU 1 (H200, GPU-1) is gone")),
    (replace(OLD, gpus=(gpu(0), gpu(1), gpu(2))), ("GPUs 2 -> 3", "GPU 2 (H200, GPU-2) is new")),
    (
        replace(OLD, gpus=(gpu(0), gpu(1, problem="GPU is lost"))),
        ("GPU 1 (H200, GPU-1): usable -> GPU is lost",),
    ),
    (replace(OLD, gpus=(gpu(0), gpu(1, memory_bytes=None))), ("GPU 1 (H200, GPU-1): memory 141 GiB -> not said",)),
    (
        replace(OLD, gpus=(Gpu(index=1, uuid="GPU-0", name="H200", memory_bytes=141 * GIB), gpu(1))),
        ("GPU 1 (H200, GPU-0): index 0 -> 1",),
    ),
]


@pytest.mark.parametrize(("new", "words"), CHANGES)
def test_what_changed_is_said_with_both_values(new: Inventory, words: tuple[str, ...]) -> None:
    assert inventory_news("n1", OLD, new) == tuple(f"node n1: {said}" for said in words)


def test_a_first_description_is_no_news() -> None:
    assert inventory_news("n1", None, OLD) == ()


def test_engines_come_change_and_go() -> None:
    there, wanted = engine("llamacpp"), engine("llamacpp", EngineState.DOWNLOADING, "42 %")
    assert engine_news((), (there,)) == ("engine llamacpp 1.0 none -> installed",)
    assert engine_news((wanted,), (there,)) == ("engine llamacpp 1.0 downloading -> installed",)
    assert engine_news((there,), (wanted,)) == ("engine llamacpp 1.0 installed -> downloading: 42 %",)
    assert engine_news((there,), ()) == ("engine llamacpp 1.0 installed -> gone",)


def test_versions_of_an_engine_stand_side_by_side_and_have_news_of_their_own() -> None:
    old, new = engine("llamacpp"), engine("llamacpp", EngineState.FAILED, "SIGILL", version="1.1")
    assert engine_news((old,), (old, new)) == ("engine llamacpp 1.1 none -> failed: SIGILL",)
    assert engine_news((old, new), (old, replace(new, state=EngineState.INSTALLED, words=""))) == (
        "engine llamacpp 1.1 failed -> installed",
    )


def test_a_program_of_the_nodes_own_is_the_same_one_at_another_version() -> None:
    before = engine("llamacpp", named=True)
    after = replace(before, version="1.1", words="engines.llamacpp.bin")
    assert engine_news((before,), (after,)) == ("engine llamacpp 1.0 installed -> 1.1 installed: engines.llamacpp.bin",)


def test_progress_is_no_news() -> None:
    before, after = (engine("llamacpp", EngineState.DOWNLOADING, words) for words in ("41 %", "42 %"))
    assert engine_news((before,), (after,)) == ()
    assert engine_news((after,), (engine("llamacpp", EngineState.PROVING),)) == ()


def test_a_failure_is_told_once_however_often_it_is_tried_again() -> None:
    trying = engine("llamacpp", EngineState.DOWNLOADING)
    failed = replace(engine("llamacpp", EngineState.FAILED, "no route; next try in 60 s"), failed="no route")
    assert engine_news((trying,), (failed,)) == (
        "engine llamacpp 1.0 downloading -> failed: no route; next try in 60 s",
    )
    again = replace(trying, failed="no route")
    assert engine_news((failed,), (again,)) == ()
    assert engine_news((again,), (replace(failed, words="no route; next try in 120 s"),)) == ()
    other = replace(failed, words="no room; next try in 240 s", failed="no room")
    assert engine_news((again,), (other,)) == ("engine llamacpp 1.0 downloading -> failed: no room; next try in 240 s",)


LLAMA = model("chat", profile(engine="llamacpp", memory_bytes=20 * GIB, node_selector={"rack": "r1"}), source="/m")


def test_a_node_that_was_given_what_it_lacked_now_qualifies() -> None:
    labels = {"rack": "r1"}
    fits = cluster([node("n1", memory_gib=32, labels=labels)], [LLAMA])
    lacks = [
        node("n1", memory_gib=16, labels=labels),
        node("n1", memory_gib=32),
        node("n1", memory_gib=32, labels=labels, engines=()),
        node("n1", memory_gib=32, labels=labels, probed=False),
        node("n1", memory_gib=32, labels=labels, ports="1-10"),
        node("n1", inventory=None),
    ]
    for lacking in lacks:
        before = cluster([lacking], [LLAMA])
        assert now_qualifies(before, fits, "n1", NOW) == ("node n1 now qualifies for chat",)
        assert now_qualifies(fits, before, "n1", NOW) == ()
    assert now_qualifies(fits, fits, "n1", NOW) == ()
    assert now_qualifies(cluster([], [LLAMA]), fits, "n1", NOW) == ("node n1 now qualifies for chat",)
    assert now_qualifies(fits, cluster([], [LLAMA]), "n1", NOW) == ()


def test_gpus_that_work_again_qualify_whatever_is_placed() -> None:
    spec = model("m", profile(gpus_per_node=2))
    after = ready(cluster([node("n1", gpus=2)], [spec]))
    broken = node("n1", gpus=[gpu(0), gpu(1, problem="GPU is lost")]).inventory
    assert now_qualifies(with_node(after, "n1", inventory=broken), after, "n1", NOW) == ("node n1 now qualifies for m",)


def test_what_is_not_built_qualifies_nobody() -> None:
    spec = model("m", profile(nodes=2))
    assert now_qualifies(cluster([], [spec]), cluster([node("n1")], [spec]), "n1", NOW) == ()
