"""Engines by name."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.engines.base import Engine
from llmgw.engines.llamacpp import LlamaCpp
from llmgw.engines.sglang import Sglang
from llmgw.engines.sim import Sim
from llmgw.engines.vllm import Vllm

ENGINES: Mapping[str, Engine] = {"llamacpp": LlamaCpp(), "sim": Sim()}
"""The engines that this build runs."""

LAUNCHABLE: Mapping[str, Engine] = {**ENGINES, "vllm": Vllm(), "sglang": Sglang()}
"""The engines whose command lines are known. Those that are not in ENGINES are installed and started by nobody yet."""


class EngineNotRun(Exception):
    """The engine is known by name and this build does not run it; the message says which it does."""


def engine(name: str) -> Engine:
    """The engine called ``name``. Raises EngineNotRun, in words, for any that this build does not run."""
    try:
        return ENGINES[name]
    except KeyError:
        raise EngineNotRun(f"{name} is not run by this build yet; {' and '.join(ENGINES)} are") from None
