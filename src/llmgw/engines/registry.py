"""Engines by name."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.engines.base import Engine
from llmgw.engines.llamacpp import LlamaCpp
from llmgw.engines.sglang import Sglang
from llmgw.engines.sim import Sim
from llmgw.engines.vllm import Vllm

ENGINES: Mapping[str, Engine] = {"llamacpp": LlamaCpp(), "sim": Sim(), "vllm": Vllm(), "sglang": Sglang()}


class EngineNotRun(Exception):
    """No engine of that name is known; the message says which are."""


def engine(name: str) -> Engine:
    """The engine called ``name``. Raises EngineNotRun, in words."""
    try:
        return ENGINES[name]
    except KeyError:
        raise EngineNotRun(f"{name} is no engine that this build runs; {', '.join(ENGINES)} are") from None
