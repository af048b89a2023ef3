"""What the writer of a file may have meant."""

from __future__ import annotations

import difflib
from functools import lru_cache

_LONGEST_WORD = 40


def plain_form(word: str) -> str:
    """What is left of a key where writings differ: ``gpusPerNode``, ``gpus-per-node`` and ``gpus_per_node``."""
    return word.replace("_", "").replace("-", "").replace(" ", "").lower()


@lru_cache(maxsize=1024)
def close_to(word: str, choices: tuple[str, ...]) -> str | None:
    """The choice that looks most like ``word``, if any does."""
    if len(word) > _LONGEST_WORD:
        return None
    forms = {plain_form(choice): choice for choice in choices}
    close = difflib.get_close_matches(plain_form(word), forms, n=1, cutoff=0.7)
    return forms[close[0]] if close else None
