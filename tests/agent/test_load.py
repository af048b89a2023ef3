"""An agent asks its engines how busy they are, with the replica's key, and is not troubled by what it can't read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from llmgw.agent.load import LoadReader
from llmgw.agent.probe import EngineClient
from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard, Load, Placement, ShardState
from tests.agent.node import DEADLINE_S, Node, opened, sim
from tests.engines.recorded import ADAPTERS, METRICS, recorded

KEY = "key-of-the-replica"


@asynccontextmanager
async def told(text: str, *, status: int = 200) -> AsyncIterator[str]:
    """host:port of a server whose metrics are this text, for whoever has the key."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        return web.Response(text=text, status=status)

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def shard(engine: str) -> DesiredShard:
    return DesiredShard(
        id="m-abcde/0",
        generation=1,
        rank=0,
        model="m",
        aliases=(),
        task="generate",
        source=None,
        profile=Profile(name="p", engine=engine),  # type: ignore[arg-type]
        placement=Placement(node="n1", port=1),
        api_key=KEY,
    )


@asynccontextmanager
async def reader(engine: str) -> AsyncIterator[LoadReader]:
    client = EngineClient()
    try:
        yield LoadReader(ADAPTERS[engine], shard(engine), client)
    finally:
        await client.close()


@pytest.mark.parametrize(("name", "expected"), METRICS.items())
async def test_recorded_metrics(name: str, expected: Load) -> None:
    async with told(recorded(name)) as endpoint, reader(name.partition("-")[0]) as reading:
        with capture_logs() as logs:
            assert await reading.look(endpoint) == expected
        assert logs == []


async def test_what_is_missing_is_said_once_and_never_0() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
    async with told(text) as endpoint, reader("vllm") as reading:
        with capture_logs() as logs:
            looks = [await reading.look(endpoint) for _ in range(3)]
    assert looks == [Load(running=2.0)] * 3
    missing = [entry["reason"] for entry in logs]
    assert len(missing) == len(set(missing)) == 4
    assert "/metrics has no vllm:kv_cache_usage_perc, under no name that is known" in missing


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", 501, "/metrics answered 501"),
        ("llmgw_sim_requests_running many\n", 200, "answered what is no Prometheus text"),
    ],
)
async def test_what_can_not_be_read_is_not_known_and_said_once(text: str, status: int, words: str) -> None:
    async with told(text, status=status) as endpoint, reader("sim") as reading:
        with capture_logs() as logs:
            assert [await reading.look(endpoint) for _ in range(3)] == [None] * 3
    (entry,) = logs
    assert words in entry["reason"]


async def test_nobody_there_is_not_known() -> None:
    async with told("") as endpoint:
        pass
    async with reader("sim") as reading:
        with capture_logs() as logs:
            assert await reading.look(endpoint) is None
    assert "no metrics" in logs[0]["reason"]


async def test_a_shard_that_serves_tells_how_busy_it_is(tmp_path: Path) -> None:
    """Two requests at an engine with one slot: one runs, one waits; then both are counted, and nothing runs."""
    wanted = sim(token_interval_s=0.2)
    wanted = replace(wanted, profile=replace(wanted.profile, parallel=1))
    async with opened(tmp_path) as node, aiohttp.ClientSession() as http:
        node.want(wanted)
        found = await node.one(ShardState.READY)
        await load_is(node, lambda load: load.running == 0 and load.generation_tokens_total == 1)
        asked = [asyncio.ensure_future(ask(http, found.endpoint, tokens=10)) for _ in range(2)]
        await load_is(node, lambda load: (load.running, load.waiting) == (1, 1))
        await asyncio.gather(*asked)
        idle = await load_is(node, lambda load: load.running == 0)
        assert (idle.waiting, idle.kv_used_ratio) == (0, None)
        assert idle.generation_tokens_total == 21, "one of them proved the shard"
        assert (idle.prompt_tokens_total or 0) > 2
        node.want()
        await node.none()
        assert node.converge.loads() == {}


async def ask(http: aiohttp.ClientSession, endpoint: str | None, *, tokens: int) -> None:
    body = {"model": "m", "prompt": "Hello there", "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": "Bearer secret-of-the-replica", "content-type": "application/json"}
    async with http.post(f"http://{endpoint}/v1/completions", data=json.dumps(body), headers=headers) as answer:
        assert answer.status == 200, await answer.text()


async def load_is(node: Node, check: Callable[[Load], bool]) -> Load:
    """The load of the only shard, once it is so."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for load in node.converge.loads().values():
                if check(load):
                    return load
            await asyncio.sleep(0.02)
