"""The simulated engine as clients see it, over real sockets, with the official client where it applies."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from .conftest import KEY, Running, Start

HEADERS = {"Authorization": f"Bearer {KEY}"}
DEADLINE_S = 20.0


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        yield session


def client(sim: Running, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{sim.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)


async def stats_when(
    http: aiohttp.ClientSession, sim: Running, true: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The stats, as soon as they are as wished."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get(f"{sim.url}/sim/stats") as answer:
                stats: dict[str, Any] = await answer.json()
            if true(stats):
                return stats
            await asyncio.sleep(0.01)


def hello(**options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **options}


def test_the_official_client_chats_streams_and_embeds(start: Start) -> None:
    sim = start("--alias", "other")
    with client(sim) as api:
        whole = api.chat.completions.create(**hello(max_tokens=5))
        text = whole.choices[0].message.content
        assert text is not None
        assert len(text.split()) == 5
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        assert whole.model == "m"

        with api.chat.completions.create(**hello(max_tokens=5), stream=True) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "length"
        assert all(chunk.usage is None for chunk in chunks)

        asked = hello(max_tokens=5, stream_options={"include_usage": True})
        with api.chat.completions.create(**asked, stream=True) as stream:
            last = list(stream)[-1]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.total_tokens == last.usage.prompt_tokens + 5

        vectors = api.embeddings.create(model="other", input=["a", "b"]).data
        assert [len(item.embedding) for item in vectors] == [64, 64]
        as_floats = api.embeddings.create(model="m", input="a", encoding_format="float").data[0].embedding
        assert vectors[0].embedding == pytest.approx(as_floats, abs=1e-6)

        assert [model.id for model in api.models.list()] == ["m"]
        assert api.completions.create(model="m", prompt="x", max_tokens=3).choices[0].finish_reason == "length"


def test_text_depends_on_the_prompt_alone(start: Start) -> None:
    said = []
    for _ in range(2):
        with client(start()) as api:
            said.append(api.chat.completions.create(**hello()).choices[0])
    assert said[0].message.content == said[1].message.content
    assert said[0].finish_reason == "stop"


def test_a_wrong_key_and_a_wrong_model(start: Start) -> None:
    sim = start()
    with client(sim, "wrong") as api, pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        api.models.list()
    with client(sim) as api, pytest.raises(openai.NotFoundError, match="'nope' is not served here"):
        api.completions.create(model="nope", prompt="x")


async def test_errors_have_the_engines_shape(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--context", "8")
    chat = f"{sim.url}/v1/chat/completions"
    for data, message in (
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"messages": 7}', "Expected 'messages' to be an array"),
        (b'{"messages": [], "model": "m"}', "at least one object"),
        (json.dumps(hello(n=2)).encode(), "one choice only"),
        (json.dumps(hello(tools=[{}])).encode(), "does not know 'tools'"),
        (json.dumps(hello(max_tokens="9")).encode(), "Expected 'max_tokens'"),
        (json.dumps({"messages": [{"role": "user", "content": "a " * 20}]}).encode(), "exceeds the available context"),
    ):
        async with http.post(chat, data=data, headers=HEADERS) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["code"] == 400
        assert message in error["message"]
    async with http.get(f"{sim.url}/nope", headers=HEADERS) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["type"] == "not_found_error"
    async with http.get(f"{sim.url}/metrics") as answer:
        assert answer.status == 401


async def test_raw_stream_ends_with_done(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start()
    body = hello(stream=True, max_tokens=2, stop=["zzz"])
    async with http.post(f"{sim.url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
        assert answer.content_type == "text/event-stream"
        raw = await answer.read()
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


async def test_loading_is_503_as_the_engine_says_it(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--load-time", "0.5")
    async with http.get(f"{sim.url}/health") as answer:
        assert answer.status == 503
        assert await answer.json() == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get(f"{sim.url}/health") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.02)


async def test_a_client_that_goes_stops_its_generation(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--token-interval", "0.02")
    body = hello(stream=True, max_tokens=100_000, ignore_eos=True)
    async with http.post(f"{sim.url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
        await answer.content.readline()
        assert (await stats_when(http, sim, lambda stats: stats["active"] == 1))["cancelled"] == 0
    stats = await stats_when(http, sim, lambda stats: stats["active"] == 0)
    assert stats["cancelled"] == 1
    assert stats["tokens"] < 1000
    async with http.get(f"{sim.url}/metrics", headers=HEADERS) as answer:
        assert "llmgw_sim_requests_cancelled_total 1" in await answer.text()


async def test_parallel_makes_others_wait(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--parallel", "1", "--token-interval", "0.05")
    url = f"{sim.url}/v1/completions"
    endless = {"prompt": "x", "stream": True, "max_tokens": 100_000, "ignore_eos": True}
    short = {"prompt": "x", "max_tokens": 1}
    async with http.post(url, json=endless, headers=HEADERS) as first:
        await first.content.readline()
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(http.post(url, json=short, headers=HEADERS).__aenter__())
            await stats_when(http, sim, lambda stats: stats["active"] == 2)
            assert not second.done()
            first.close()
    answer = second.result()
    assert answer.status == 200
    answer.release()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_is_quick_even_with_a_stream_open(
    start: Start, http: aiohttp.ClientSession, number: signal.Signals
) -> None:
    sim = start("--token-interval", "0.02")
    body = hello(stream=True, max_tokens=100_000, ignore_eos=True)
    async with http.post(f"{sim.url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
        await answer.content.readline()
        sim.process.send_signal(number)
        status = await asyncio.to_thread(sim.process.wait, DEADLINE_S)
    assert status == 0


def test_a_taken_port_is_said_with_status_1(start: Start) -> None:
    port = start().url.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "llmgw.simulator", "--port", port],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert second.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in second.stderr
