"""A node that is cut off serves on; when it is back there are as many replicas as wanted, and nothing was restarted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.net.lab import NetLab
from tests.cluster.net.reference import QUICK, partitioned

pytestmark = pytest.mark.timeout(240)


def test_cut_off_until_it_was_replaced(build: Callable[..., NetLab]) -> None:
    partitioned(build, extra=QUICK, until_replaced=True)


def test_cut_off_and_back_before_its_replacement_is_ready(build: Callable[..., NetLab]) -> None:
    """The replacement is called off, and the original is the same process as before."""
    partitioned(build, extra=QUICK, until_replaced=False)
