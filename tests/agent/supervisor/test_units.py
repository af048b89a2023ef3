"""Engines in units of their own, on a node whose init is systemd: a container booted from an overlay of `/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.process import units
from tests.agent.booted import Node, booted

from .conftest import needs_root

SCRIPT = Path(__file__).with_name("in_a_unit.py")


def agent(node: Node, part: str) -> list[dict[str, object]]:
    """Run an agent as a service of its own, whose whole control group ends with it."""
    unit = f"--unit=agent-{part}"
    said = node.run("systemd-run", "--wait", "--pipe", "--quiet", unit, sys.executable, "-B", str(SCRIPT), part)
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with booted(tmp_path) as node:
        yield node


@needs_root
def test_engines_have_units_that_outlive_the_agents(node: Node) -> None:
    (first,) = agent(node, "first")
    pids, groups = first["pids"], first["groups"]
    assert isinstance(pids, dict)
    assert isinstance(groups, dict)
    assert first["warnings"] == []
    assert sorted(pids) == ["counting/0", "counting/0/ray", "orphan/0", "stubborn/0"]
    assert "/system.slice/agent-first.service" in str(first["own"])
    for shard_id, group in groups.items():
        assert f"/llmgw.slice/llmgw-shard-{shard_id.replace('/', '-')}-" in group
    assert 0 not in first["users"]  # type: ignore[operator]
    assert len(first["units"]) == 4  # type: ignore[arg-type]  # the one that ended is gone by itself

    adopted, stopped = agent(node, "second")
    assert adopted["pids"] == pids
    assert adopted["ended"] == {"crashing/0": [7, ["bye"]]}
    assert stopped == {
        "step": "stopped",
        "orphan": "ended unseen",
        "counting": "SIGTERM",
        "stubborn": "SIGKILL",
        "left": [],
        "output_complete": True,
        "units": [],
    }


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("shard", "smol-abcde/0", "a1b2"), "llmgw-shard-smol-abcde-0-a1b2.service"),
        (("shard", "Ünï/0 ;x", "1"), "llmgw-shard--n-0-x-1.service"),
        (("gateway",), "llmgw-gateway.service"),
    ],
)
def test_units_have_names_that_systemd_takes(parts: tuple[str, ...], name: str) -> None:
    assert units.unit_name(*parts) == name
