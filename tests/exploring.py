"""How far tests by chance go. The suite takes the same examples every time: what it says of a change, it says of that
change alone. ``LLMGW_EXPLORE=N`` takes others, and N times as many of what plays long histories."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("LLMGW_EXPLORE", "0"))


def examples(in_the_suite: int) -> int:
    return in_the_suite * max(TIMES, 1)
