"""A client that leaves: the engine must not work on for nobody. Whoever waits here gives up long before the gateway's
own limits would end the call."""

from __future__ import annotations

import asyncio
import json

import pytest

from llmgw.cluster.model import Route

from .client import Client, ask, request
from .conftest import House, endpoint
from .engine import COMPLETION, DONE, Call, chunk


async def silent(call: Call) -> None:
    await call.until_gone()


async def endless(call: Call) -> None:
    await call.stream()
    await call.piece(chunk("one"))
    await call.until_gone()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_within_a_stream(house: House, path: str) -> None:
    (engine,) = await house.serve(endless)
    client = await Client.open(house.gateway.port)
    await client.send(request(ask(stream=True), path=path))
    await client.head()
    await client.piece()
    call = await engine.call()
    await client.close()
    await call.until_gone()
    await house.at_rest()


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_byte(house: House, stream: bool) -> None:
    (engine,) = await house.serve(silent)
    client = await Client.open(house.gateway.port)
    await client.send(request(ask(stream=stream)))
    call = await engine.call()
    await client.close()
    await call.until_gone()
    await house.at_rest()
    assert house.gateway.meter.models["m"].statuses[0] == 1


async def test_by_a_reset(house: House) -> None:
    (engine,) = await house.serve(endless)
    client = await Client.open(house.gateway.port)
    await client.send(request(ask(stream=True)))
    await client.head()
    call = await engine.call()
    client.writer.transport.abort()
    await call.until_gone()
    await house.at_rest()


async def test_eight_at_once(house: House) -> None:
    (engine,) = await house.serve(silent)
    clients = [await Client.open(house.gateway.port) for _ in range(8)]
    for client in clients:
        await client.send(request(ask()))
    await engine.received(8)
    for client in clients:
        await client.close()
    for call in engine.calls:
        await call.until_gone()
    await house.at_rest()


async def test_while_it_takes_its_answer_slowly(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        while not call.gone.is_set():
            await call.piece(chunk("x" * 60_000))

    (engine,) = await house.serve(script)
    client = await Client.open(house.gateway.port)
    await client.send(request(ask(stream=True)))
    await client.head()
    (connection,) = house.gateway.connections
    await house.until(lambda: connection.paused)
    client.writer.transport.abort()
    await house.at_rest()
    await engine.calls[0].until_gone()


async def test_a_client_that_takes_nothing_is_given_up(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        while not call.gone.is_set():
            await call.piece(chunk("x" * 60_000))

    (engine,) = await house.serve(script, timeouts={"client_stall_s": 0.1})
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await house.at_rest()
    await engine.calls[0].until_gone()


async def test_from_the_queue(house: House) -> None:
    """At a limit of one: of three that wait, two leave. The engine hears of those that stayed only."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    (engine,) = await house.serve(script, endpoint={"max_concurrency": 1})
    clients = [await Client.open(house.gateway.port) for _ in range(4)]
    line = house.gateway.router.lines["m"]
    for number, client in enumerate(clients):
        await client.send(request(ask(user=str(number))))
        await house.until(lambda count=number: len(line.waiting) == count and line.in_flight == 1)
    for client in (clients[1], clients[3]):
        await client.close()
    await house.until(lambda: len(line.waiting) == 1)
    go.set()
    for client in (clients[0], clients[2]):
        assert (await client.answer()).status == 200
        await client.close()
    assert [json.loads(call.body)["user"] for call in engine.calls] == ["0", "2"]
    await house.at_rest()


async def test_one_that_leaves_does_not_harm_another(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await go.wait()
        await call.piece(DONE)
        await call.end()

    await house.serve(script, endpoint={"max_concurrency": 1})
    stays = await house.client()
    await stays.send(request(ask(stream=True)))
    await stays.head()
    leaves = await Client.open(house.gateway.port)
    await leaves.send(request(ask(stream=True)))
    line = house.gateway.router.lines["m"]
    await house.until(lambda: len(line.waiting) == 1)
    await leaves.close()
    await house.until(lambda: not line.waiting)
    go.set()
    assert await stays.piece() == chunk("one")
    assert await stays.piece() == DONE


async def test_while_its_model_loads(house: House) -> None:
    await house.start(Route(model="m", why_none="loading"))
    client = await Client.open(house.gateway.port)
    await client.send(request(ask()))
    line = house.gateway.router.lines["m"]
    await house.until(lambda: len(line.waiting) == 1)
    await client.close()
    await house.at_rest()
    engine = await house.engine()
    house.say(Route(model="m", endpoints=(endpoint(engine),)))
    assert (await house.ask()).status == 200
    assert len(engine.calls) == 1
