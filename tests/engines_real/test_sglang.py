"""The real SGLang server on processors, with kernels that compute nothing: its installation, its API and its stop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.lab import alive
from tests.cluster.streams import ask, start_streams
from tests.engines_real import SGLANG_LOCK, SGLANG_VERSION
from tests.engines_real.cluster import MODEL, RealLab, eventually
from tests.engines_real.figures import Figures, megabytes, resident_megabytes

pytestmark = pytest.mark.timeout(3000)

ON_A_PROCESSOR = (
    *("--load-format", "dummy", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-radix-cache"),
    *("--max-total-tokens", "4096"),
)

MODELS = f"""\
models:
  - name: tiny
    source: {MODEL}
    profiles:
      - engine: sglang
        memory: 5GiB
        context: 2048
        parallel: 4
        args: [{", ".join(f'"{each}"' for each in ON_A_PROCESSOR)}]
"""


def engines() -> str:
    sha256 = hashlib.sha256(SGLANG_LOCK.read_bytes()).hexdigest()
    sglang = f"{{version: {SGLANG_VERSION}, source: {{url: '{SGLANG_LOCK.as_uri()}', sha256: {sha256}}}}}"
    # What nobody asks for is removed, and the tests after this one use it.
    return f"{{vllm: {{version: 0.32.0}}, sglang: {sglang}}}"


def test_installed_from_a_lock_of_the_operators_own_served_and_drained(
    build: Callable[[str, str], RealLab], engines_dir: Path, figures: Figures
) -> None:
    lab = build(MODELS, engines())
    lab.server()
    began = time.monotonic()
    before = megabytes(engines_dir)
    lab.agent("node01")
    print(*lab.installed("node01", "sglang", SGLANG_VERSION, 1500), sep="\n")
    figures.add(f"SGLang {SGLANG_VERSION} installed and proved by an agent", f"{time.monotonic() - began:.1f} s")
    figures.add("what it takes beside vLLM", f"{megabytes(engines_dir) - before} MB")

    began = time.monotonic()
    first = lab.ready("tiny", 900)
    figures.add("SGLang from there to ready, the one token included", f"{time.monotonic() - began:.1f} s")
    figures.add("resident memory of its processes", f"{resident_megabytes(first['pids'][0])} MB")
    key = lab.key()
    answer = ask(lab, key, model="tiny")
    assert answer.status_code == 200, answer.text
    eventually(lambda: lab.replica("tiny")["load"], "it tells how busy it is", 60)

    lab.agent("node02")
    lab.installed("node02", "sglang", SGLANG_VERSION, 600)
    streams = start_streams(lab, key, 1, 300, "tiny")
    with figures.timed("a drain of SGLang under an open stream, replacement first"), lab.admin() as client:
        client.post("nodes/node01/drain", {})
        eventually(lambda: all(each["id"] != first["id"] for each in lab.get("replicas")), "it has stopped", 900)
    streams[0].join(600)
    assert streams[0].done, streams[0].error
    assert not alive(first["pids"][0])
    assert ask(lab, key, model="tiny").status_code == 200
