"""The real llama.cpp over two nodes: half of the model's layers on each, and neither does without the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import eventually
from tests.cluster.net.lab import Inside, NetLab
from tests.cluster.net.reference import nodes_of
from tests.cluster.streams import ask

pytestmark = pytest.mark.timeout(240)

SPREAD = """\
models:
  - name: spread
    source: file://{gguf}
    profiles: [{{engine: llamacpp, nodes: 2, memory: 256MiB, context: 512, args: ["--ignore-eos"]}}]
"""


def spread(build: Callable[..., NetLab], llama: tuple[Path, Path]) -> tuple[NetLab, dict[str, Inside]]:
    """Two nodes on a fabric; the model's file is where both could read it, and one does."""
    program, gguf = llama
    lab = build(SPREAD.format(gguf=gguf))
    wanted = lab.without_models()
    lab.server()
    agents = {}
    for name in ("node01", "node02"):
        extra = f"heartbeat_interval: 500ms\nengines: {{llamacpp: {{bin: {program}}}}}\n"
        lab.node(name, gpus=0, fabric="ib-a", extra=extra)
        agents[name] = lab.agent(name)
    lab.with_models(wanted)
    return lab, agents


def whole(lab: NetLab, after: int = 0) -> dict[str, Any]:
    """The replica, once a generation after that one is ready."""

    def check() -> dict[str, Any] | None:
        (found,) = lab.get("replicas")
        return found if found["state"] == "ready" and found["generation"] > after else None

    try:
        return eventually(check, f"a generation after {after} is ready", 90)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{lab.get('replicas')}\n{lab.logs()}") from None


def served(lab: NetLab, key: str) -> str:
    answer = ask(lab, key, model="spread")
    assert answer.status_code == 200, answer.text
    return answer.text


def _tokens(lab: NetLab, replica: dict[str, Any]) -> float:
    load = lab.get(f"replicas/{replica['id']}")["load"]
    return float(load["generation_tokens_total"]) if load else 0.0


def test_two_nodes_answer_as_one_and_fall_as_one(build: Callable[..., NetLab], llama: tuple[Path, Path]) -> None:
    lab, agents = spread(build, llama)
    first = whole(lab)
    key = lab.key()
    served(lab, key)
    leader, worker = nodes_of(first)

    # The leader takes requests; the worker opens one port, for its layers; rank 0's own server is on loopback alone.
    assert {*lab.machines[worker].listening()} == {first["placements"][1]["port"]}
    http = first["placements"][0]["port"]
    assert {*lab.machines[leader].listening()} == {http, http + 1}

    (model,) = lab.get("models")
    assert "llamacpp over several nodes is experimental" in model["why"]
    eventually(lambda: _tokens(lab, first) > 1, "it tells of more tokens than the one that proved it", 30)

    # An agent that starts anew takes up what runs, on either side.
    for node in (leader, worker):
        agents[node].kill()
        agents[node] = lab.agent(node)
    eventually(lambda: all(node["state"] == "ready" for node in lab.get("nodes")), "both agents are back", 30)
    assert whole(lab)["pids"] == first["pids"]

    # A worker that dies leaves a leader that says it is well until it is asked something: the whole goes.
    lab.machines[worker].run("kill", "-9", str(first["pids"][1]))
    second = whole(lab, after=first["generation"])
    assert not set(second["pids"]) & set(first["pids"])
    served(lab, key)
