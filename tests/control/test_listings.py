"""Lists answer at once, whoever is dead: what they say of him is that nothing was heard, not that all is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.control.clock import Time
from tests.control.floor import open_floor

AT_ONCE_S = 5.0
"""On a machine that does nothing else it is hundredths; whoever asked the agent would wait for twice as long."""
LISTS = (
    "status",
    "nodes",
    "nodes/n1",
    "models",
    "models/m/why",
    "replicas",
    "engines",
    "drains",
    "events",
    "keys",
)


@pytest.mark.parametrize("how", ["falls silent", "its stream breaks"])
async def test_every_list_answers_at_once_while_an_agent_is_dead(tmp_path: Path, how: str) -> None:
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        dead, other = floor.join("n1"), floor.join("n2")
        await floor.obey(dead, other)
        if how == "its stream breaks":
            floor.desk.on_closed(dead, "the connection broke")
        # Nobody takes from its connection what is sent to it: neither what it should run nor that its logs are wanted.
        for expected in ("suspect", "lost"):
            for _ in range(60):
                clock.move(1)
                floor.beat(other)
                await floor.settled()
                if floor.plane.cluster.nodes["n1"].state == expected:
                    break
            for path in LISTS:
                async with asyncio.timeout(AT_ONCE_S):
                    assert (await client.get(f"/api/v1/{path}")).status_code == 200
            found = {node["id"]: node for node in (await client.get("/api/v1/nodes")).json()}
            assert found["n2"]["state"] == "ready"
            assert found["n1"]["state"] == expected
            assert "silent for" in found["n1"]["why"] or "stream" in found["n1"]["why"]
        shown = (await client.get("/api/v1/replicas")).json()
        assert not [replica for replica in shown if replica["state"] == "ready" and on(replica) != {"n2"}]


def on(replica: Mapping[str, Any]) -> set[str]:
    return {placement["node"] for placement in replica["placements"]}
