"""Engines as a table: version by version, and what is amiss where."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from llmgw.cli import engines
from llmgw.cluster.catalog import Catalog, EngineSpec
from llmgw.cluster.engines import roll_back, with_file
from llmgw.cluster.model import Cluster, EngineOnNode, EngineState
from llmgw.cluster.reconcile import apply
from llmgw.control.engine_views import engine_views
from tests.cluster_core.building import GIB, NOW, cluster, engine, model, node, profile, ready, with_node

from .terminal import seen, widest

OLD = EngineSpec(name="llamacpp", version="b10068", source="index")
NEW = replace(OLD, version="b10991", source="github")
DOWNLOADING = "downloading llama-b10991-bin-ubuntu-x64.tar.gz (16 MB, 42 %)"


def installed(version: str, **changes: Any) -> EngineOnNode:
    return replace(engine("llamacpp", version=version), **changes)


@pytest.fixture(scope="module")
def lab() -> Cluster:
    """Five nodes in the middle of an upgrade: on one the new version is, on one it fails, two download, one is silent
    about it, and one has a program of its own."""
    new = [
        installed("b10991"),
        installed("b10991", state=EngineState.FAILED, words="proving: killed by SIGILL at its first token"),
        installed("b10991", state=EngineState.DOWNLOADING, words=DOWNLOADING),
        installed("b10991", state=EngineState.DOWNLOADING, words=DOWNLOADING),
    ]
    nodes = [node(f"n{number}", engines=(installed("b10068"), each)) for number, each in enumerate(new, 1)]
    nodes.append(node("n5", engines=(installed("b10068"),)))
    nodes.append(node("n6", engines=(installed("b9000", named=True),)))
    spec = model("chat", profile(engine="llamacpp", memory_bytes=GIB), source="/m.gguf", replicas=2)
    before, _ = with_file(cluster(nodes), Catalog(models=(spec,), engines=(OLD,)), NOW)
    after, _ = with_file(ready(before), Catalog(models=(spec,), engines=(NEW,)), NOW)
    return after


def answer(lab: Cluster) -> Any:
    return json.loads(msgspec.json.encode(engine_views(lab)))


def test_each_version_says_how_it_stands_and_on_how_many_nodes_it_is(lab: Cluster) -> None:
    rows = [(view.version, view.standing, view.installed, view.wanted, view.replicas) for view in engine_views(lab)]
    assert rows == [
        ("b10991", "in effect", 1, 5, 0),
        ("b10068", "previous", 5, 5, 2),
        ("b9000", "own program", 1, 1, 0),
    ]
    effective, before, _ = engine_views(lab)
    assert (effective.source, effective.since, before.since) == ("github", "2023-11-14T22:13:20.000Z", None)
    assert [(each.node, each.state) for each in effective.nodes if each.state != "installed"] == [
        ("n2", "failed"),
        ("n3", "downloading"),
        ("n4", "downloading"),
        ("n5", "not reported"),
    ]


def test_one_that_was_rolled_back_says_why(lab: Cluster) -> None:
    rolled = apply(lab, roll_back(lab, "llamacpp", "chat-abcde failed 3 times in a row", NOW))
    assert [(view.version, view.standing, view.why) for view in engine_views(rolled)][:2] == [
        ("b10068", "in effect", ""),
        ("b10991", "rolled back", "chat-abcde failed 3 times in a row"),
    ]


def test_replicas_are_counted_by_what_their_node_runs_them_with(lab: Cluster) -> None:
    on = next(replica.placements[0].node for replica in lab.replicas.values())
    elsewhere = with_node(lab, on, engines=(installed("b9000", named=True),))
    counted = {(view.version, view.standing): view.replicas for view in engine_views(elsewhere)}
    assert counted["b9000", "own program"] == 1
    assert counted["b10068", "previous"] == 1


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_runs_out_of_the_terminal(lab: Cluster, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    rolled = apply(lab, roll_back(lab, "llamacpp", "chat-abcde failed 3 times in a row: " + "words " * 20, NOW))
    text = seen(monkeypatch, width, lambda: engines.table(answer(rolled)))
    assert widest(text) <= width
    assert "rolled back" in text


def test_what_several_nodes_say_alike_is_said_once(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    engines.table(answer(lab))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ENGINE", "VERSION", "STANDING", "NODES", "REPLICAS", "WORDS"]
    assert lines[1].count(DOWNLOADING) == 1
    assert f"n3, n4: {DOWNLOADING}" in lines[1]
    assert "n2: failed: proving: killed by SIGILL at its first token" in lines[1]
    assert "n5: has said nothing of it yet" in lines[1]
    assert "1 of 5" in lines[1]


def test_many_nodes_that_say_the_same_are_counted(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"state": "waiting", "words": "waiting for another apt-get to finish"}
    view = {**answer(lab)[0], "nodes": [{"node": f"n{number}", **words} for number in range(9)]}
    engines.table([view])
    assert "n0, n1, n2, 6 more: waiting for another apt-get to finish" in capsys.readouterr().out


def test_without_engines_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    engines.table([])
    assert "no engine" in capsys.readouterr().out
