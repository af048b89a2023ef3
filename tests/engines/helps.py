"""Helps that real builds of engines printed, whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .shards import help_of

_HERE = Path(__file__).parent / "help"


def recorded(name: str) -> str:
    return (_HERE / f"{name}.txt").read_text()


WHOLE: Mapping[str, tuple[str, str, str]] = {
    "llamacpp-b10068": ("llamacpp", "b10068", help_of("b10068")),
    "llamacpp-b11434": ("llamacpp", "b11434", help_of("b11434")),
    "vllm-0.31.0": ("vllm", "0.31.0+cpu", recorded("vllm-0.31.0")),
    "vllm-0.32.0": ("vllm", "0.32.0+cpu", recorded("vllm-0.32.0")),
    "sglang-0.5.23": ("sglang", "0.5.23", recorded("sglang-0.5.23")),
}
"""Engine, version and text."""

OTHERS: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {"ggml-rpc-server": recorded("ggml-rpc-server-b10068")},
    "vllm": {
        "ray start": recorded("ray-2.60.0-start"),
        "ray health-check": recorded("ray-2.60.0-health-check"),
    },
    "sglang": {},
}


def renamed(help_text: str, flag: str, new: str) -> str:
    """As if the engine had given this very flag another name, everywhere."""
    return re.sub(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", new, help_text)
