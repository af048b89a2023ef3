"""An engine's program, as the agent starts it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import llmgw
from llmgw.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    argv: tuple[str, ...]
    version: str
    help_text: str
    reads: tuple[Path, ...]
    """Files and folders that it must be able to read, whoever runs it."""


def simulator() -> Program:
    """The simulated engine: this very Python, and this very llmgw."""
    places = [Path(sys.prefix), Path(sys.base_prefix), Path(llmgw.__file__).resolve().parent]
    # Never all of sys.path: its first entry may be the folder that somebody happened to stand in.
    places += [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return Program(
        argv=(sys.executable, "-m", "llmgw.simulator"), version=VERSION, help_text="", reads=_outermost(places)
    )


def _outermost(places: list[Path]) -> tuple[Path, ...]:
    """The folders without those that lie in another of them."""
    kept: list[Path] = []
    for place in sorted(set(places), key=lambda place: len(place.parts)):
        if not any(place.is_relative_to(outer) for outer in kept):
            kept.append(place)
    return tuple(kept)
