"""The real vLLM over two nodes, each in a network namespace of its own, half of each of the model's layers on each.

vLLM 0.32 does not run pipelines on processors: its second rank fails an assertion at the first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.net.lab import NetLab
from tests.cluster.net.reference import nodes_of
from tests.cluster.streams import ask
from tests.engines_real.cluster import MODEL, eventually
from tests.engines_real.figures import Figures

pytestmark = pytest.mark.timeout(3000)

MODELS = f"""\
models:
  - name: wide
    source: {MODEL}
    profiles:
      - engine: vllm
        nodes: 2
        tensor_parallel: 2
        memory: 5GiB
        context: 512
        parallel: 4
        args: ["--dtype", "float32", "--enforce-eager", "--load-format", "dummy"]
"""


def test_two_nodes_answer_as_one_and_fall_as_one(
    build_net: Callable[[str, str], NetLab], engines_dir: Path, figures: Figures
) -> None:
    installed = sorted(engines_dir.glob("vllm/0.32.0-cpu-*/bin/vllm"))
    if not installed:
        pytest.skip("vLLM 0.32.0 is not installed: these machines reach no index; run test_vllm.py first")
    lab = build_net(MODELS, "{}")
    wanted = lab.without_models()
    lab.server()
    for name in ("node01", "node02"):
        lab.node(name, gpus=0, fabric="ib-a", extra=f"engines: {{vllm: {{bin: {installed[0]}}}}}\n")
        lab.agent(name)
    nodes = ["ready", "ready"]
    eventually(lambda: [node["state"] for node in lab.get("nodes")] == nodes, "both have proved their engine", 600)
    lab.with_models(wanted)
    began = time.monotonic()

    def ready() -> bool:
        (found,) = lab.get("replicas")
        return bool(found["state"] == "ready")

    try:
        eventually(ready, "the replica over two nodes is ready", 900)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{lab.get('replicas')}\n{lab.logs()}") from None
    figures.add("vLLM over two nodes (mp), from the start to one token", f"{time.monotonic() - began:.1f} s")
    (first,) = lab.get("replicas")
    key = lab.key()
    answer = ask(lab, key, model="wide")
    assert answer.status_code == 200, answer.text

    _, worker = nodes_of(first)
    lab.machines[worker].run("kill", "-9", str(first["pids"][1]))

    def again() -> bool:
        (found,) = lab.get("replicas")
        return bool(found["state"] == "ready" and found["generation"] > first["generation"])

    with figures.timed("rebuilt whole after its second rank was killed"):
        eventually(again, "the next generation is ready", 900)
    assert ask(lab, key, model="wide").status_code == 200
