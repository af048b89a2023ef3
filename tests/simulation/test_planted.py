"""Faults that are put into the code are found, each within a few seeds."""

from __future__ import annotations

import pytest

from .planted import FAULTS, Planted, find
from .run import quiet

WITHIN = range(1, 61)
RARE = {
    "draining-nodes",
    "generation",
    "released",
    "lost-answer",
    "unheard",
    "fence",
    "not-caught-up",
    "older-leader",
    "fabrics",
    "verdict",
}
"""Those that take more time than a quick test has; ``make simulate-planted`` looks for them too."""


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name not in RARE], ids=lambda fault: fault.name)
def test_the_simulation_finds_it(fault: Planted) -> None:
    quiet()
    found = find(fault, WITHIN, 1000)
    assert found is not None, f"not found: {fault.words}"


def test_there_are_ten_and_more_of_them() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 10
