"""A table that can't be renewed names ports that other engines have by now: they refuse the replica's key."""

from __future__ import annotations

import asyncio

import pytest

from llmgw.cluster.model import Route
from llmgw.gateway.target import Target

from .client import ask, request
from .conftest import House, endpoint
from .engine import COMPLETION, Call, completion
from .test_failures import streamed


async def another(call: Call) -> None:
    await call.json(401, {"error": "Unauthorized"})


def targets(house: House) -> list[Target]:
    return house.gateway.router.lines["m"].targets


@pytest.mark.parametrize("stream", [False, True])
async def test_the_replicas_that_are_left_answer(house: House, stream: bool) -> None:
    other, up = await house.serve(another, streamed if stream else completion)
    for _ in range(20):
        assert (await house.ask(ask(stream=stream))).status == 200
    assert len(up.calls) == 20
    assert 1 <= len(other.calls) < 10, "it is left alone, longer each time"
    assert house.gateway.meter.engine_errors == {("m", "key_refused"): len(other.calls)}
    assert house.gateway.meter.retries["m"] == len(other.calls)
    await house.at_rest()


async def test_a_refusal_brings_no_replica_back(house: House) -> None:
    other, _ = await house.serve(another, completion)
    left_alone = targets(house)[0]
    for count in (1, 2, 3):
        left_alone.cooling_until = 0.0
        while len(other.calls) < count:
            assert (await house.ask()).status == 200
        assert left_alone.failures == count
    assert not targets(house)[1].failures


async def test_each_is_asked_once_and_the_last_refusal_is_told(house: House) -> None:
    engines = await house.serve(another, another, another)
    answer = await house.ask()
    assert (answer.status, answer.error["code"]) == (502, "engine_key_refused")
    assert "refused the key" in answer.error["message"]
    assert [len(engine.calls) for engine in engines] == [1, 1, 1]
    assert house.gateway.meter.engine_errors == {("m", "key_refused"): 3}
    await house.at_rest()


async def test_one_that_is_full_is_waited_for(house: House) -> None:
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    other, up = await house.engine(another), await house.engine(slow)
    serves = endpoint(up, 1, max_concurrency=1)
    await house.start(Route(model="m", endpoints=(serves,)), queue=0)
    first, second = await house.client(), await house.client()
    await first.send(request(ask()))
    await up.received(1)
    house.say(Route(model="m", endpoints=(endpoint(other, 0), serves)))
    await second.send(request(ask()))
    await house.until(lambda: house.gateway.router.lines["m"].waiting)
    assert len(other.calls) == 1, "it had been let in, and waits though none may"
    go.set()
    assert [(await client.answer()).status for client in (first, second)] == [200, 200]
    assert len(other.calls) == 1
    await house.at_rest()


async def test_the_next_table_is_waited_for_where_this_one_names_none(house: House) -> None:
    async def leaves(call: Call) -> None:
        house.say(Route(model="m", draining=("m-0",)))
        await another(call)

    await house.serve(leaves)
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: house.gateway.router.lines["m"].waiting)
    up = await house.engine(completion)
    house.say(Route(model="m", endpoints=(endpoint(up, 1),)))
    assert (await client.answer()).status == 200


@pytest.mark.parametrize("first", ["full", "refused"])
async def test_a_replica_that_was_full_is_what_the_client_hears_of(house: House, first: str) -> None:
    """It may ask that one again soon, which an answer of a refused key would deny."""
    asked: list[str] = []

    async def full(call: Call) -> None:
        asked.append("full")
        await call.json(429, {"error": {"message": "full"}})

    async def refused(call: Call) -> None:
        asked.append("refused")
        await another(call)

    await house.serve(full, refused)
    house.gateway.router.lines["m"].turn = 1 if first == "full" else 0
    answer = await house.ask()
    assert (answer.status, answer.json()) == (429, {"error": {"message": "full"}})
    assert (asked[0], len(asked)) == (first, 2)
    await house.at_rest()


@pytest.mark.parametrize("body", [b"", b"10000\r\n" + b"x" * 0x10000 + b"\r\n" + b"10000\r\n"], ids=["none", "large"])
async def test_the_head_of_a_refusal_is_enough(house: House, body: bytes) -> None:
    async def unending(call: Call) -> None:
        await call.send(b"HTTP/1.1 401 X\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        await call.until_gone()

    other, up = await house.serve(unending, completion)
    for _ in range(4):
        assert (await house.ask()).status == 200
    await other.calls[0].until_gone()
    assert len(up.calls) == 4
    await house.at_rest()
