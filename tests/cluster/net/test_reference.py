"""The reference case: a node loses its power, and its replica is rebuilt on the fabric where it fits whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.net.lab import NetLab
from tests.cluster.net.load import Load
from tests.cluster.net.reference import QUICK, Reference, models

pytestmark = pytest.mark.timeout(240)


def test_power_off_at_default_settings(build: Callable[..., NetLab], llama: tuple[Path, Path]) -> None:
    """Ready again on the other fabric; no request is lost before its first token; a real engine serves throughout."""
    program, gguf = llama
    case = Reference.start(build(models(gguf)), program)
    case.lab.ready("real")
    case.only_leaders_listen()
    case.served()
    with (
        Load(case.lab, case.key, "wide", clients=4, tokens=60) as load,
        Load(case.lab, case.key, "real", 2, 20) as real,
    ):
        case.failed_over(load=load, within_s=60)
    assert not load.failed, load.words()
    assert not real.failed, real.words()
    case.only_leaders_listen()


def test_power_off_with_a_short_patience(build: Callable[..., NetLab]) -> None:
    case = Reference.start(build(models(), extra=QUICK))
    with Load(case.lab, case.key, "wide", clients=4, tokens=60) as load:
        case.failed_over(load=load, within_s=30)
    assert not load.failed, load.words()
