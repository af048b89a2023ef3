"""What the simulated engine says on its output, for people and for whoever waits for it."""

from __future__ import annotations

import sys


def say(words: str) -> None:
    print(f"llmgw-sim: {words}", flush=True)


def complain(words: str) -> None:
    print(f"llmgw-sim: {words}", file=sys.stderr, flush=True)
