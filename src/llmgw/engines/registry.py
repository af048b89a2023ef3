"""Engines by name."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.engines.base import Engine
from llmgw.engines.llamacpp import LlamaCpp
from llmgw.engines.sim import Sim

ENGINES: Mapping[str, Engine] = {"llamacpp": LlamaCpp(), "sim": Sim()}
"""The engines that this build runs."""


class EngineNotRun(Exception):
    """The engine is known by name and this build does not run it; the message says which it does."""


def engine(name: str) -> Engine:
    """The engine called ``name``. Raises EngineNotRun, in words, for any that this build does not run."""
    try:
        return ENGINES[name]
    except KeyError:
        raise EngineNotRun(f"{name} is not run by this build yet; {' and '.join(ENGINES)} are") from None
