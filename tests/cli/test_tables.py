"""How answers look at 80 and at 200 columns, and in a pipe: names stay whole, and nothing runs out of the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import typer

from llmgw.cli import drain_tables, node_tables, rows, tables, what_if
from llmgw.cluster import drain as draining
from llmgw.cluster.model import (
    Brake,
    Cluster,
    DrainState,
    Hca,
    MoveState,
    NodeState,
    Replica,
    ReplicaState,
)
from llmgw.control import views
from llmgw.control.drain_views import brake_view, drain_view
from tests.cluster_core.building import NOW, cluster, model, node, profile, ready, with_node

from .terminal import seen, widest

NAMES = [f"llmgw-node{number:02}" for number in range(1, 5)]
WORDS = "its stream broke 12 s ago; lost after 30 s of silence"


def answered(view: object) -> Any:
    """A view as it comes from the admin API."""
    return json.loads(msgspec.json.encode(view))


@pytest.fixture(scope="module")
def lab() -> Cluster:
    """Four nodes on two fabrics; a replica over two nodes, and one that finds no place. One node is suspect."""
    state = ready(
        cluster(
            [
                node(name, gpus=8, fabrics=("ib-a", "ib-b"), address=f"10.0.0.{number}", memory_gib=64)
                for number, name in enumerate(NAMES, 1)
            ],
            [
                model("qwen3-235b", profile("two-nodes", nodes=2, gpus_per_node=4)),
                model("too-large", profile("all", nodes=4, gpus_per_node=8)),
            ],
        )
    )
    described = state.nodes[NAMES[3]].inventory
    assert described is not None
    hcas = (described.hcas[0], Hca(name="mlx5_1", port=1, state="DOWN"))
    warning = "fabric ib-b: mlx5_1 port 1 is DOWN: no replica over several nodes is placed on it here"
    inventory = replace(described, hcas=hcas, warnings=(warning,))
    return with_node(state, NAMES[3], state=NodeState.SUSPECT, why=WORDS, inventory=inventory)


def spanning(lab: Cluster) -> Replica:
    return next(replica for replica in lab.replicas.values() if replica.model == "qwen3-235b")


def drain_of(lab: Cluster, **changes: Any) -> Any:
    drain = draining.plan(lab, NAMES[0], now=NOW)
    (move,) = drain.moves
    moved = replace(
        move,
        state=changes.pop("state", MoveState.FINISHING),
        replacement="qwen3-235b-zzzzz",
        why="finishes its requests in flight",
        seconds={"starting": 12.31, "shifting": 0.2, "finishing": 3.0},
        finished=20,
        broken=changes.pop("broken", 0),
    )
    return answered(drain_view(lab, replace(drain, state=DrainState.MOVING, moves=(moved,))))


def status_of(lab: Cluster, brake: Brake | None) -> dict[str, Any]:
    gateways = (
        views.GatewayView(id="cp1", address="127.0.0.1:3333", version="1", table_sent=7, table_acked=7, in_flight=3),
        views.GatewayView(
            id="cp2",
            address="127.0.0.1:4444",
            version="1",
            table_sent=7,
            table_acked=6,
            connected=False,
            may_send_for_s=12.3,
        ),
    )
    found: dict[str, Any] = answered(
        views.StatusView(
            cluster="lab",
            version="1",
            epoch=3,
            trouble=None,
            halting=False,
            table_version=7,
            nodes={"ready": 3, "suspect": 1},
            replicas={"ready": 1, "unplaced": 1},
            models_ready=1,
            models=2,
            gateways=gateways,
            brake=brake_view(brake),
        )
    )
    return {**found, "drains": [drain_of(lab)]}


BRAKE = Brake(
    since=NOW.wall_s,
    silent=tuple(NAMES[:3]),
    words="3 of 4 nodes are silent; if they are gone indeed: llmgw ctl brake release",
)


def shown(lab: Cluster) -> dict[str, Callable[[], object]]:
    """Everything that is shown, by name."""
    leaving = answered(views.replica_view(lab, replace(spanning(lab), state=ReplicaState.DRAINING), NOW, story=True))
    leaving["waits_for"] = ["gateway cp1 has not taken up the table without it yet, with 3 requests in flight"] * 2
    replicas = [answered(views.replica_view(lab, replica, NOW)) for replica in lab.replicas.values()]
    plan = answered(drain_view(lab, draining.plan(lab, NAMES[0], now=NOW), planned=True))
    return {
        "nodes": lambda: node_tables.nodes([answered(view) for view in views.node_views(lab, 1_000.0)]),
        "node": lambda: node_tables.node(answered(views.node_views(lab, 1_000.0)[3])),
        "replicas": lambda: tables.replicas(replicas),
        "replica": lambda: tables.replica(leaving),
        "why": lambda: tables.why(answered(views.why_view(lab, "too-large"))),
        "status": lambda: tables.status(status_of(lab, BRAKE)),
        "brake": lambda: tables.brake(status_of(lab, replace(BRAKE, released=True))),
        "plan": lambda: drain_tables.plan(plan, drain_tables.places_of(replicas)),
        "drains": lambda: drain_tables.drains([drain_of(lab), drain_of(lab)]),
        "report": lambda: drain_tables.report(drain_of(lab)),
    }


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_runs_out_of_the_terminal_and_names_stay_whole(
    lab: Cluster, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, prints in shown(lab).items():
        text = seen(monkeypatch, width, prints)
        assert text.strip(), what
        assert widest(text) <= width, f"{what}:\n{text}"
        for part in ("llmgw-\n", "qwen3-\n", "too-\n", "ib-\n"):
            assert part not in "\n".join(line.rstrip() for line in text.splitlines()), f"{what}:\n{text}"


def test_in_a_pipe_every_row_is_one_line(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("nodes", "replicas", "plan"):
        shown(lab)[what]()
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.isupper() or head.startswith("NODE"), what
        assert all(row.startswith(("llmgw-node", "qwen3", "too-large", "warning")) for row in rows), what


def test_nodes_say_their_fabrics_and_why_they_are_as_they_are(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    text = seen(monkeypatch, 200, shown(lab)["nodes"])
    (row,) = [line for line in text.splitlines() if line.startswith(NAMES[3])]
    assert "suspect" in row
    assert "ib-a, ib-b" in row
    assert WORDS in row
    (warning,) = [line for line in text.splitlines() if line.startswith("warning")]
    assert warning.endswith("fabric ib-b: mlx5_1 port 1 is DOWN: no replica over several nodes is placed on it here")


def test_a_replica_says_its_ranks_its_fabric_and_what_it_waits_for(
    lab: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(lab)["replica"]()
    said = capsys.readouterr().out
    first, second = (placement.node for placement in spanning(lab).placements)
    assert f"rank 0    {first} port 20000, GPUs 0, 1, 2, 3\n" in said
    assert f"rank 1    {second} port 20000, GPUs 0, 1, 2, 3\n" in said
    assert "fabric    ib-a, its ranks meet at 10.0.0.1:20050\n" in said
    assert "waits for gateway cp1 has not taken up the table without it yet, with 3 requests in flight\n" in said


def test_a_replica_says_how_busy_it_is_as_far_as_its_engine_tells(
    lab: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = answered(views.replica_view(lab, spanning(lab), NOW))
    busy["load"] = {"running": 3.0, "waiting": 1.0, "kv_used_ratio": 0.256, "prompt_tokens_total": 9120.0}
    busy["load"] |= {"generation_tokens_total": None}
    tables.replica(busy)
    said = capsys.readouterr().out
    assert "load      3 running, 1 waiting, 26% of its cache taken, 9.1k tokens read\n" in said
    busy["load"] = {**busy["load"], "waiting": None, "generation_tokens_total": 3_240_000.0}
    idle = {**busy, "load": None}
    text = seen(monkeypatch, 200, lambda: tables.replicas([busy, idle]))
    (heading, *lines) = [line.split() for line in text.splitlines()]
    where, tokens = heading.index("RUN/WAIT"), heading.index("TOKENS")
    assert [(line[where], line[tokens]) for line in lines[:2]] == [("3/?", "3.2M"), ("-", "-")]


def test_why_is_a_tree_of_profiles_fabrics_and_nodes(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    shown(lab)["why"]()
    lines = [line.replace("─", "").strip("│├└ ") for line in capsys.readouterr().out.splitlines()]
    profiles = [number for number, line in enumerate(lines) if line.startswith("profile all: ")]
    fabrics = [number for number, line in enumerate(lines) if line.startswith("fabric ib-")]
    nodes = [number for number, line in enumerate(lines) if line.startswith("llmgw-node")]
    assert len(profiles) == 1
    assert len(fabrics) == 2
    assert len(nodes) == 8
    assert profiles[0] < fabrics[0] < nodes[0] < nodes[3] < fabrics[1] < nodes[4]


def test_the_brake_is_the_first_thing_that_the_status_says(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    tables.status(status_of(lab, BRAKE))
    said = capsys.readouterr().out
    first, silent, returns, *rest = said.splitlines()
    assert first.startswith("BRAKE     on for ")
    assert first.endswith(BRAKE.words)
    assert silent.split(": ")[1] == ", ".join(NAMES[:3])
    assert returns.strip() == "it comes off by itself as they return"
    assert said.count("llmgw ctl brake release") == 1
    assert "cp2 (not connected, and may send by its last table for 12 s more)" in "\n".join(rest)
    tables.status(status_of(lab, None))
    assert "BRAKE" not in capsys.readouterr().out


def test_a_released_brake_does_not_ask_to_be_released(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    tables.status(status_of(lab, replace(BRAKE, released=True)))
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("BRAKE     released: silent nodes are judged as ever")
    assert ", ".join(NAMES[:3]) in first
    assert "ctl brake release" not in first


def test_the_status_names_models_that_lack_replicas(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    answer = status_of(lab, None)
    tables.status(answer)
    assert "models    1 of 2 ready\n" in capsys.readouterr().out
    tables.status({**answer, "lacking": {"b": 2, "a": 1}})
    assert (
        "models    1 of 2 ready; replicas that are missing: 1 of a, 2 of b (llmgw ctl why MODEL)\n"
        in capsys.readouterr().out
    )
    tables.status({**answer, "lacking": {f"m{number}": 1 for number in range(9)}})
    said = capsys.readouterr().out
    assert "1 of m4, and of 4 models more (" in said
    assert "m5" not in said


def test_an_engine_that_was_rolled_back_stands_in_the_status(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = "from b10991 to b10068: m-abcde failed 3 times in a row"
    tables.status({**status_of(lab, None), "rolled_back": {"llamacpp": words}})
    said = capsys.readouterr().out
    assert f"engine    llamacpp is rolled back {words}\n" in said


def test_a_replica_says_on_which_version_of_its_engine_it_runs(
    lab: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = spanning(lab)
    assert replica.profile is not None
    versioned = replace(replica, profile=replace(replica.profile, engine="llamacpp", engine_version="b10991"))
    tables.replica(answered(views.replica_view(lab, versioned, NOW)))
    assert "profile two-nodes (llamacpp b10991)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "words", "said"),
    [
        ("downloading", "downloading l.tar.gz (16 MB, 42 %)", "llamacpp b10991: downloading l.tar.gz (16 MB, 42 %)"),
        ("failed", "--version: killed by SIGILL", "llamacpp b10991: failed: --version: killed by SIGILL"),
        ("wanted", "", "llamacpp b10991: wanted"),
        ("installed", "", "llamacpp b10991"),
    ],
)
def test_how_far_an_engine_is_on_a_node_is_said_once(
    lab: Cluster, capsys: pytest.CaptureFixture[str], state: str, words: str, said: str
) -> None:
    view = answered(views.node_views(lab, 1_000.0)[0])
    engine = {"name": "llamacpp", "version": "b10991", "state": state, "words": words, "named": False}
    node_tables.nodes([{**view, "engines": [engine]}])
    row = capsys.readouterr().out.splitlines()[1]
    assert row.endswith(said)


def test_a_drain_is_said_once_in_the_status(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    answer = status_of(lab, None)
    drain = {**answer["drains"][0], "why": "0 of 2 replicas moved; m-a is finishing"}
    tables.status({**answer, "drains": [drain, {**drain, "state": "done", "why": "2 replicas moved"}]})
    said = capsys.readouterr().out
    assert f"drain     {NAMES[0]}: 0 of 2 replicas moved; m-a is finishing\n" in said
    assert f"drain     {NAMES[0]} is drained: 2 replicas moved\n" in said


def test_a_node_that_is_still_silent_is_said_to_be_silent_for_as_long(
    lab: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    node = replace(lab.nodes[NAMES[3]], state=NodeState.LOST, why="silent for 31 s", heard_at_s=400.0)
    node_tables.nodes([answered(views.node_view(node, 1_000.0))])
    node_tables.node(answered(views.node_view(node, 1_000.0)))
    said = capsys.readouterr().out
    assert said.count("silent for 600 s") == 3, said
    assert "31 s" not in said


def test_a_node_says_what_is_held_on_it_and_by_whom(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    held = spanning(lab)
    first = next(view for view in views.node_views(lab, 1_000.0) if view.id == held.placements[0].node)
    assert first.inventory is not None
    shards = {each.shard: each for each in first.held}
    assert shards[held.shard_id(0)].gpus == held.placements[0].gpus
    assert first.gpus_free == len(first.inventory.gpus) - sum(len(each.gpus) for each in first.held)
    assert first.held == views.held_on(lab, first.id)
    node_tables.nodes([answered(first)])
    node_tables.node(answered(first))
    said = capsys.readouterr().out
    assert f"{first.gpus_free} of {len(first.inventory.gpus)}" in said
    assert f"for {held.shard_id(0)}, ports from {held.placements[0].port}" in " ".join(said.split())


def test_a_broken_stream_stands_in_the_report(lab: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    drain = drain_of(lab, state=MoveState.MOVED, broken=2)
    drain_tables.report({**drain, "why": "1 replica moved, 20 requests finished, 2 broken"})
    said = capsys.readouterr().out
    assert f"{NAMES[0]} is drained: 1 replica moved, 20 requests finished, 2 broken\n" in said
    assert "starting 12.3, shifting 0.2, finishing 3.0" in said


def test_news_of_a_drain_is_told_once(lab: Cluster) -> None:
    told: dict[str, tuple[str, ...]] = {}
    view = drain_of(lab)
    (line,) = drain_tables.news(view, told)
    assert "finishing  finishes its requests in flight" in line.plain
    view["moves"][0]["why"] = "finishes 3 requests in flight"
    assert not list(drain_tables.news(view, told)), "what counts down is no news"
    view["moves"][0].update(state="moved", why="qwen3-235b-zzzzz took over")
    (line,) = drain_tables.news(view, told)
    assert line.plain.endswith("moved  qwen3-235b-zzzzz took over")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2x8@ib-a", {"nodes": 2, "gpus": 8, "fabric": "ib-a"}),
        ("2×8@ib-a", {"nodes": 2, "gpus": 8, "fabric": "ib-a"}),
        ("1X4", {"nodes": 1, "gpus": 4, "fabric": None}),
        ("16*8", {"nodes": 16, "gpus": 8, "fabric": None}),
        (" 2 x 8 @ ib-a ", {"nodes": 2, "gpus": 8, "fabric": "ib-a"}),
        ("3x0", {"nodes": 3, "gpus": 0, "fabric": None}),
    ],
)
def test_nodes_to_add_as_people_write_them(text: str, expected: dict[str, object]) -> None:
    assert what_if.added_nodes(text) == expected


@pytest.mark.parametrize("text", ["", "8", "x8", "2x", "0x8", "2x8@", "2x8 ib-a", "-1x8", "2x8x8", "two x 8"])
def test_nodes_to_add_that_make_no_sense(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 2x8@ib-a or 4x8"):
        what_if.added_nodes(text)


def test_what_an_indented_line_goes_on_with_is_indented_more() -> None:
    assert rows.wrapped("  a b", 4, hang=True) == ["  a", "      b"]
    assert rows.wrapped("aa bb", 4, hang=True) == ["aa", "bb"]
    assert rows.wrapped("  a b", 4) == ["  a", "b"]
