"""Programs that lie about on a machine: named to people, and never used unasked."""

from __future__ import annotations

import shutil

_PROGRAMS = {"llamacpp": ("llama-server", "engines.llamacpp.bin"), "vllm": ("vllm", "engines.vllm.bin")}


def lies_on_path(engine: str) -> str:
    """Words that name a program of this engine on PATH; empty where there is none."""
    name, key = _PROGRAMS.get(engine, ("", ""))
    found = shutil.which(name) if name else None
    if found is None:
        return ""
    return f"{name} was found at {found} and is not used: {key} in the agent's file would name it"
