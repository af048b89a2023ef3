"""Metrics of real engines, as they told them: see ``metrics/``. Each had answered one request, and vLLM and SGLang were
at work on another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmgw.cluster.model import Load
from llmgw.engines.base import Engine
from llmgw.engines.llamacpp import LlamaCpp
from llmgw.engines.sglang import Sglang
from llmgw.engines.sim import Sim
from llmgw.engines.vllm import Vllm

HERE = Path(__file__).parent / "metrics"

ADAPTERS: Mapping[str, Engine] = {"llamacpp": LlamaCpp(), "vllm": Vllm(), "sglang": Sglang(), "sim": Sim()}

METRICS: Mapping[str, Load] = {
    "llamacpp-b10068": Load(running=0, waiting=0, prompt_tokens_total=7, generation_tokens_total=1),
    "vllm-0.32.0": Load(
        running=1,
        waiting=0,
        kv_used_ratio=0.0001220852154804053,
        prompt_tokens_total=12,
        generation_tokens_total=70,
    ),
    "sglang-0.5.23": Load(running=1, waiting=0, kv_used_ratio=0.05, prompt_tokens_total=34, generation_tokens_total=24),
}
"""What the load in each file is."""


def recorded(name: str) -> str:
    return (HERE / f"{name}.txt").read_text()
