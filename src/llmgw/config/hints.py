"""What the writer of a file may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def plain_form(word: str) -> str:
    """What is left of a key where writings differ: ``gpusPerNode``, ``gpus-per-node`` and ``gpus_per_node``."""
    return word.replace("_", "").replace("-", "").replace(" ", "").lower()


def close_to(word: str, choices: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The choice that looks most like ``word``, if any does."""
    if len(word) > 64:
        return None
    forms = {plain_form(choice): choice for choice in choices}
    close = difflib.get_close_matches(plain_form(word), forms, n=1, cutoff=cutoff)
    return forms[close[0]] if close else None
