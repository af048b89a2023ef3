"""How busy replicas are: told with heartbeats, kept in memory alone, shown and scraped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from llmgw.cluster.model import Load
from llmgw.link.messages import Heartbeat
from llmgw.link.server import Peer
from tests.control.floor import VITALS, ControlFloor, open_floor

BUSY = Load(running=3.0, waiting=1.0, prompt_tokens_total=9000.0, generation_tokens_total=512.0)


def beat(floor: ControlFloor, peer: Peer, loads: dict[str, Load]) -> None:
    vitals = replace(VITALS, loads=loads)
    floor.desk.on_heartbeat(peer, Heartbeat(epoch=floor.plane.epoch, session=peer.session, sent_at=0.0, vitals=vitals))


async def scraped(client: httpx2.AsyncClient) -> dict[str, float]:
    """By metric, of the only replica that there are any of."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    found = [sample for family in families for sample in family.samples if "replica" in sample.labels]
    assert len({tuple(sample.labels.items()) for sample in found}) <= 1
    return {sample.name: sample.value for sample in found}


async def load_of(client: httpx2.AsyncClient, replica: str) -> dict[str, Any] | None:
    """As the list has it, and the replica by itself."""
    (listed,) = [each["load"] for each in (await client.get("/api/v1/replicas")).json() if each["id"] == replica]
    alone = (await client.get(f"/api/v1/replicas/{replica}")).json()["load"]
    assert listed == alone
    return dict(listed) if listed is not None else None


async def test_the_load_of_a_heartbeat_is_shown_and_scraped_until_its_node_is_gone(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        peer = floor.join("n1")
        await floor.obey(peer)
        replica = min(floor.plane.cluster.replicas)
        assert await load_of(client, replica) is None
        assert await scraped(client) == {}

        beat(floor, peer, {f"{replica}/0": BUSY, "another/0": Load(running=9.0)})
        await floor.settled()
        assert await load_of(client, replica) == {
            "running": 3.0,
            "waiting": 1.0,
            "kv_used_ratio": None,
            "prompt_tokens_total": 9000.0,
            "generation_tokens_total": 512.0,
        }
        assert await scraped(client) == {
            "llmgw_replica_requests_running": 3.0,
            "llmgw_replica_requests_waiting": 1.0,
            "llmgw_replica_prompt_tokens_total": 9000.0,
            "llmgw_replica_generation_tokens_total": 512.0,
        }, "what the engine does not tell is not 0"

        floor.desk.on_closed(peer, "the connection broke")
        await floor.settled()
        assert await load_of(client, replica) is None
        assert await scraped(client) == {}
