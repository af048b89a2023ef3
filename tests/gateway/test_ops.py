"""What operators see: metrics, health and readiness."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmgw.gateway.gateway import Gateway, StartError
from llmgw.gateway.ops import OpsServer, readiness
from llmgw.gateway.settings import GatewaySettings

from .client import Client, ask, request
from .conftest import House
from .engine import DONE, Call, chunk, completion


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def samples(ops: OpsServer, http: aiohttp.ClientSession) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with http.get(f"http://127.0.0.1:{ops.port}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
async def ops(house: House) -> AsyncIterator[OpsServer]:
    async def script(call: Call) -> None:
        if b'"stream":true' in call.body.replace(b" ", b""):
            await call.stream()
            await call.piece(chunk("one") + DONE)
            await call.end()
        else:
            await completion(call)

    await house.serve(script)
    server = OpsServer(house.gateway, "127.0.0.1", 0)
    await server.start()
    yield server
    await server.stop()


async def test_requests_are_counted(house: House, ops: OpsServer, http: aiohttp.ClientSession) -> None:
    for _ in range(3):
        await house.ask()
    await house.ask(ask(stream=True))
    await house.ask(b"{")
    seen = await samples(ops, http)
    assert seen["llmgw_gateway_requests_total", (("model", "m"), ("status", "2xx"))] == 4
    assert seen["llmgw_gateway_requests_total", (("model", "other"), ("status", "4xx"))] == 1
    assert seen["llmgw_gateway_request_duration_seconds_count", (("model", "m"),)] == 4
    assert seen["llmgw_gateway_first_byte_seconds_count", (("model", "m"),)] == 1
    assert seen["llmgw_gateway_in_flight", (("model", "m"),)] == 0
    assert seen["llmgw_gateway_queue_depth", (("model", "m"),)] == 0
    assert seen["llmgw_gateway_ready_replicas", (("model", "m"),)] == 1
    assert seen["llmgw_gateway_connected", ()] == 0


async def test_in_flight_and_waiting(house: House, ops: OpsServer, http: aiohttp.ClientSession) -> None:
    async def silent(call: Call) -> None:
        await call.until_gone()

    house.engines[0].script = silent
    clients = [await Client.open(house.gateway.port) for _ in range(3)]
    for client in clients:
        await client.send(request(ask()))
    await house.engines[0].received(3)
    assert (await samples(ops, http))["llmgw_gateway_in_flight", (("model", "m"),)] == 3
    for client in clients:
        await client.close()
    await house.at_rest()
    seen = await samples(ops, http)
    assert seen["llmgw_gateway_in_flight", (("model", "m"),)] == 0
    assert seen["llmgw_gateway_requests_total", (("model", "m"), ("status", "client_gone"))] == 3


async def test_clients_can_not_make_series(house: House, ops: OpsServer, http: aiohttp.ClientSession) -> None:
    await house.ask()
    await house.ask(ask(model="nobody"))
    before = await samples(ops, http)
    client = await house.client()
    many = 2_000
    for number in range(many):
        await client.send(request(ask(model=f"model-{number}")) + request(b"", method="GET", path=f"/v1/x{number}"))
        assert (await client.answer()).status == (await client.answer()).status == 404
    after = await samples(ops, http)
    own = [key for key in after if key[0].startswith("llmgw_")]
    assert set(own) == {key for key in before if key[0].startswith("llmgw_")}
    other = "llmgw_gateway_requests_total", (("model", "other"), ("status", "4xx"))
    assert after[other] - before[other] == 2 * many
    assert ("llmgw_gateway_requests_total", (("model", "other"), ("status", "2xx"))) not in after


async def test_health(ops: OpsServer, http: aiohttp.ClientSession) -> None:
    async with http.get(f"http://127.0.0.1:{ops.port}/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_readiness_without_a_table(house: House, ops: OpsServer, http: aiohttp.ClientSession) -> None:
    house.gateway.standing.words = "10.0.0.140:7443: connection refused"
    async with http.get(f"http://127.0.0.1:{ops.port}/readyz") as response:
        facts = await response.json()
        assert (response.status, facts["ready"]) == (503, False)
        assert facts["words"] == "no routing table yet: 10.0.0.140:7443: connection refused"


def test_readiness_in_words(tmp_path: Path) -> None:
    gateway = Gateway(GatewaySettings(id="g", state_dir=tmp_path))
    standing = gateway.standing
    now = time.time()
    standing.version, standing.applied_at, standing.connected, standing.lease_s = 7, now, True, 30.0
    assert readiness(gateway, now + 900)[1]["words"] == "serving"
    standing.connected, standing.words = False, "connection refused"
    ready, facts = readiness(gateway, now + 10)
    assert ready
    assert (facts["words"], facts["stale_since"]) == ("serving; the control plane is away: connection refused", None)
    ready, facts = readiness(gateway, now + 900)
    assert ready, "what a stale table names may well be up"
    assert facts["stale_since"] is not None
    assert str(facts["words"]).startswith("serving from the table last received, not renewed since 20")
    standing.from_file = True
    assert "the table kept on disk" in str(readiness(gateway, now + 1)[1]["words"])
    gateway.stopping = True
    assert readiness(gateway, now)[0] is False


async def test_a_taken_port_says_so(house: House, ops: OpsServer) -> None:
    other = OpsServer(house.gateway, "127.0.0.1", ops.port)
    with pytest.raises(StartError, match=r"listen\.metrics"):
        await other.start()
