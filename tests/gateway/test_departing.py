"""Replicas that leave the table: in peace (their requests finish), or gone (another replica answers)."""

from __future__ import annotations

import asyncio
import json

import pytest

from llmgw.cluster.model import Endpoint, Route, Traffic
from llmgw.gateway import leaving

from .client import Answer, Client, ask, request
from .conftest import House, endpoint
from .engine import COMPLETION, DONE, Call, Script, chunk, completion, deaf
from .test_failures import last_error, only_a_head, silent, streamed


async def either(call: Call) -> None:
    if json.loads(call.body).get("stream"):
        await streamed(call)
    else:
        await call.json(200, COMPLETION)


async def sent(house: House, count: int, *, stream: bool = False) -> list[Client]:
    """That many requests, each on a connection of its own."""
    clients = [await house.client() for _ in range(count)]
    for client in clients:
        await client.send(request(ask(stream=stream)))
    return clients


async def answers(clients: list[Client]) -> list[Answer]:
    return await asyncio.gather(*(client.answer() for client in clients))


# Gone


@pytest.mark.parametrize(("script", "stream"), [(silent, False), (silent, True), (only_a_head, True)])
async def test_a_black_hole_that_leaves_the_table_loses_no_request(house: House, script: Script, stream: bool) -> None:
    """A replica that accepts and never answers, as on a node that was cut off: others answer: the clients here
    wait for less than the gateway's own limits."""
    hole, up = await house.serve(script, either)
    clients = await sent(house, 40, stream=stream)
    await hole.received(15)
    await house.until(lambda: len(hole.calls) + len(up.calls) >= 40)
    house.say(Route(model="m", endpoints=(endpoint(up, 1),)))
    found = await answers(clients)
    assert [answer.status for answer in found] == [200] * 40
    assert all(answer.body.endswith(DONE) for answer in found) or not stream
    assert len(up.calls) == 40
    for call in hole.calls:
        await call.until_gone()
    await house.at_rest()
    assert house.gateway.meter.engine_errors["m", "gone"] == len(hole.calls)


async def test_requests_that_are_still_connecting_go_elsewhere(house: House) -> None:
    """A machine without power answers no connection attempt."""
    up = await house.engine(completion)
    async with deaf() as url:
        dead = Endpoint(replica="m-0", generation=1, url=url, api_key="k")
        await house.start(Route(model="m", endpoints=(dead, endpoint(up, 1))), timeouts={"connect_s": 60.0})
        clients = await sent(house, 10)
        line = house.gateway.router.lines["m"]
        await house.until(lambda: len(up.calls) + line.targets[0].in_flight == 10 and line.targets[0].in_flight >= 3)
        house.say(Route(model="m", endpoints=(endpoint(up, 1),)))
        assert [answer.status for answer in await answers(clients)] == [200] * 10
        await house.at_rest()
        assert not house.gateway.meter.engine_errors, "none of them had been sent"


async def test_where_nobody_else_serves_they_wait_beyond_the_limit_of_the_queue(house: House) -> None:
    """They had been let in: the queue's limit is for those that come new. The next generation answers."""
    (hole,) = await house.serve(silent, queue=2)
    clients = await sent(house, 8)
    await hole.received(8)
    house.say(Route(model="m", why_none="1 starting"))
    line = house.gateway.router.lines["m"]
    assert len(line.waiting) == 8
    assert (await house.ask()).status == 503, "who comes new is not let in"
    back = await house.engine(completion)
    house.say(Route(model="m", endpoints=(Endpoint(replica="m-0", generation=2, url=back.url, api_key="k"),)))
    assert [answer.status for answer in await answers(clients)] == [200] * 8
    await house.at_rest()


async def test_the_wait_for_another_is_counted_anew(house: House) -> None:
    """One that has waited for the first replica already does not have that held against it."""
    await house.start(Route(model="m"), hold_for_s=0.5)
    client = await house.client()
    await client.send(request(ask()))
    line = house.gateway.router.lines["m"]
    await house.until(lambda: len(line.waiting) == 1)
    (exchange,) = house.gateway.active
    await house.until(lambda: exchange._down_since)
    began = exchange._down_since
    exchange._down_since -= 0.4
    hole = await house.engine(silent)
    house.say(Route(model="m", endpoints=(endpoint(hole),)))
    await hole.received(1)
    house.say(Route(model="m"))
    assert len(line.waiting) == 1
    await house.until(lambda: exchange._down_since)
    assert exchange._down_since > began
    up = await house.engine(completion)
    house.say(Route(model="m", endpoints=(endpoint(up, 1),)))
    assert (await client.answer()).status == 200


async def test_a_prompt_that_hangs_engines_is_not_handed_round(house: House) -> None:
    engines = [await house.engine(silent) for _ in range(3)]
    each = [endpoint(engine, number) for number, engine in enumerate(engines)]
    await house.start(Route(model="m", endpoints=(each[0],)))
    client = await house.client()
    await client.send(request(ask()))
    await engines[0].received(1)
    house.say(Route(model="m", endpoints=(each[1],)))
    await engines[1].received(1)
    house.say(Route(model="m", endpoints=(each[2],)))
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (502, "engine_failed")
    assert "m-1" in answer.error["message"]
    assert not engines[2].calls
    await house.at_rest()


async def test_a_stream_that_has_begun_is_left_until_its_connection_ends(house: House) -> None:
    """What is cut off from the control plane may well be answering still."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await go.wait()
        await call.piece(chunk("two") + DONE)
        await call.end()

    first, second = await house.serve(script, script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    house.say(Route(model="m"))
    go.set()
    assert await client.piece() == chunk("one")
    assert await client.piece() == chunk("two") + DONE
    assert await client.piece() == b""
    assert len(first.calls) + len(second.calls) == 1
    await house.at_rest()


async def test_a_stream_of_one_that_is_gone_ends_by_its_silence(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.until_gone()

    await house.serve(script, timeouts={"between_tokens_s": 0.1})
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    house.say(Route(model="m"))
    assert await client.piece() == chunk("one")
    assert last_error(await client.piece())["code"] == "timeout"
    assert house.gateway.traffic()["m-0"] == Traffic(broken=1)


async def test_a_pooled_connection_that_breaks_as_its_replica_leaves(house: House) -> None:
    """It is not tried again at a replica that the table names no longer."""
    answered = 0

    async def script(call: Call) -> None:
        nonlocal answered
        answered += 1
        if answered == 1:
            await call.json(200, COMPLETION)
        else:
            await go.wait()
            call.close()

    go = asyncio.Event()
    leaves, up = await house.serve(script, completion, endpoint={"max_concurrency": 1})
    await answers(await sent(house, 2))
    clients = await sent(house, 1)
    await house.until(lambda: len(leaves.calls) + len(up.calls) == 3)
    if len(leaves.calls) < 2:
        clients += await sent(house, 1)
    await leaves.received(2)
    house.say(Route(model="m", endpoints=(endpoint(up, 1),), draining=("m-0",)))
    go.set()
    assert {answer.status for answer in await answers(clients)} == {200}
    assert len(leaves.calls) == 2
    await house.at_rest()


# In peace


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_a_draining_replica_are_left_to_finish(house: House, stream: bool) -> None:
    """Answered or not: none is moved, none is broken."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        begins = stream and len(leaves.calls) % 2
        if begins:
            await call.stream()
            await call.piece(chunk("one"))
        await go.wait()
        if begins:
            await call.piece(DONE)
            await call.end()
        else:
            await either(call)

    leaves = await house.engine(script)
    up = await house.engine(either)
    await house.start(Route(model="m", endpoints=(endpoint(leaves),)))
    clients = await sent(house, 20, stream=stream)
    await leaves.received(20)
    for _ in range(3):  # tables come and go meanwhile
        house.say(Route(model="m", endpoints=(endpoint(up, 1),), draining=("m-0",)))
    assert house.gateway.traffic()["m-0"] == Traffic(in_flight=20)
    late = await sent(house, 5)
    assert [answer.status for answer in await answers(late)] == [200] * 5
    assert len(up.calls) == 5
    go.set()
    found = await answers(clients)
    assert [answer.status for answer in found] == [200] * 20
    assert not any(b'"error"' in answer.body for answer in found)
    assert (len(leaves.calls), len(up.calls)) == (20, 5)
    assert house.gateway.traffic()["m-0"] == Traffic(finished=20)
    assert not house.gateway.meter.engine_errors
    await house.at_rest()


async def test_one_that_fails_while_it_drains_is_gone(house: House) -> None:
    hole, up = await house.engine(silent), await house.engine(completion)
    await house.start(Route(model="m", endpoints=(endpoint(hole),)))
    clients = await sent(house, 5)
    await hole.received(5)
    house.say(Route(model="m", endpoints=(endpoint(up, 1),), draining=("m-0",)))
    assert not up.calls
    house.say(Route(model="m", endpoints=(endpoint(up, 1),)))
    assert [answer.status for answer in await answers(clients)] == [200] * 5
    await house.at_rest()


async def test_who_has_no_other_replica_may_still_reach_the_draining_one(house: House) -> None:
    """Scaled to zero between the choice of a replica and the sending: it was dispatched by the older table."""
    (engine,) = await house.serve(completion)
    client = await house.client()
    connects = asyncio.Event()
    connect = house.gateway.connector.connect
    held = []

    def later(*how: object) -> None:
        held.append(how)
        connects.set()

    house.gateway.connector.connect = later  # type: ignore[method-assign]
    await client.send(request(ask()))
    async with asyncio.timeout(5):
        await connects.wait()
    house.say(Route(model="m", draining=("m-0",)))
    assert house.gateway.traffic()["m-0"] == Traffic(in_flight=1)
    connect(*held[0])  # type: ignore[arg-type]
    assert (await client.answer()).status == 200
    assert len(engine.calls) == 1


async def test_requests_of_a_model_that_is_served_no_longer_finish(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    (engine,) = await house.serve(script)
    clients = await sent(house, 3)
    await engine.received(3)
    house.say(Route(model="n"))
    assert (await house.ask()).status == 404
    go.set()
    assert [answer.status for answer in await answers(clients)] == [200] * 3
    assert house.gateway.traffic()["m-0"] == Traffic(finished=3)


async def test_requests_of_a_model_that_is_served_no_longer_end_with_its_engine(house: House) -> None:
    (engine,) = await house.serve(silent)
    (client,) = await sent(house, 1)
    await engine.received(1)
    house.say(Route(model="n"))
    engine.calls[0].reset()
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    await house.at_rest()


# Counted


async def test_what_is_counted(house: House) -> None:
    """Finished and broken since the replica left; a client that leaves is neither."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        what = json.loads(call.body)["user"]
        if what in ("breaks", "leaves"):
            await call.stream()
            await call.piece(chunk("one"))
        await go.wait()
        if what == "breaks":
            call.reset()
        elif what == "leaves":
            await call.until_gone()
        elif what == "refused":
            await call.json(400, {"error": {"message": "no"}})
        else:
            await either(call)

    leaves, up = await house.engine(script), await house.engine(completion)
    await house.start(Route(model="m", endpoints=(endpoint(leaves),)))
    clients = {}
    for what in ("finishes", "refused", "breaks", "leaves"):
        clients[what] = await Client.open(house.gateway.port)
        await clients[what].send(request(ask(stream=what in ("breaks", "leaves"), user=what)))
    await leaves.received(4)
    assert house.gateway.traffic() == {"m-0": Traffic(in_flight=4)}, "told of those in the table too"
    for what in ("breaks", "leaves"):
        await clients[what].head()
    house.say(Route(model="m", endpoints=(endpoint(up, 1),), draining=("m-0",)))
    assert house.gateway.traffic() == {"m-0": Traffic(in_flight=4)}
    await clients["leaves"].close()
    await house.until(lambda: house.gateway.traffic()["m-0"] == Traffic(in_flight=3))
    go.set()
    for what in ("finishes", "refused"):
        await clients[what].answer()
    assert last_error((await clients["breaks"].piece() + await clients["breaks"].piece())[-400:])["code"]
    await house.until(lambda: house.gateway.traffic()["m-0"] == Traffic(finished=2, broken=1))
    assert house.gateway.departures.in_flight == 0
    for client in clients.values():
        await client.close()


async def test_a_replica_that_comes_back_is_counted_anew(house: House) -> None:
    (engine,) = await house.serve(completion)
    there = Route(model="m", endpoints=(endpoint(engine),))
    await house.ask()
    house.say(Route(model="m", draining=("m-0",)))
    assert house.gateway.traffic() == {"m-0": Traffic()}
    house.say(there)
    assert house.gateway.traffic() == {}
    house.say(Route(model="m", draining=("m-0",)))
    assert house.gateway.traffic() == {"m-0": Traffic()}


async def test_a_stream_of_a_former_generation_is_counted_with_its_replica(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.until_gone()

    old, new = await house.engine(script), await house.engine(completion)
    await house.start(Route(model="m", endpoints=(endpoint(old),)))
    (client,) = await sent(house, 1, stream=True)
    await client.head()
    house.say(Route(model="m", endpoints=(Endpoint(replica="m-0", generation=2, url=new.url, api_key="k"),)))
    assert house.gateway.departures.traffic() == {}, "it has not left the table"
    house.say(Route(model="m", draining=("m-0",)))
    assert house.gateway.traffic() == {"m-0": Traffic(in_flight=1)}
    await client.close()
    await house.until(lambda: house.gateway.traffic() == {"m-0": Traffic()})


async def test_it_is_told_of_a_while_longer_and_then_forgotten(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = await house.serve(completion)
    house.say(Route(model="m"))
    departures = house.gateway.departures
    departures.told()
    departures.told()
    assert departures.traffic() == {"m-0": Traffic()}
    monkeypatch.setattr(leaving, "TOLD_FOR_S", 0.0)
    departures.told()
    assert departures.traffic() == {}
    assert not engine.calls


async def test_nothing_is_left_of_a_thousand_departures(house: House) -> None:
    engine = await house.engine(completion)
    await house.start(Route(model="m"))
    for number in range(1_000):
        house.say(Route(model="m", endpoints=(endpoint(engine, number),)))
        if number % 100 == 0:
            assert (await house.ask()).status == 200
    assert not house.gateway.departures.targets
    assert set(house.gateway.traffic()) == {f"m-{number}" for number in range(999)}


# Suspects


async def test_from_the_moment_a_node_is_suspect_others_are_preferred(house: House) -> None:
    """Requests to a machine without power must not time out one by one until it is called lost."""
    hole, up = await house.serve(silent, completion)
    stuck = await sent(house, 6)
    await house.until(lambda: len(hole.calls) + len(up.calls) >= 6)
    before = len(hole.calls)
    house.say(Route(model="m", endpoints=(endpoint(hole, 0, preferred=False), endpoint(up, 1))))
    found = await answers(await sent(house, 30))
    assert [answer.status for answer in found] == [200] * 30
    assert len(hole.calls) == before
    assert stuck
