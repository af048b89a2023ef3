"""Engines that refuse, break, fall silent or lie: another replica, or an error that says so. Never a false success."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from llmgw.cluster.model import Endpoint, Route
from llmgw.gateway import target
from llmgw.gateway.relay import LAST_CHUNK, framed
from llmgw.gateway.routing import Line
from llmgw.gateway.upstream import Connector

from .client import Client, Torn, ask, request
from .conftest import House, endpoint
from .engine import COMPLETION, DONE, SSE_HEAD, Call, Engine, Script, chunk, completion, deaf


def events(body: bytes) -> list[bytes]:
    """The stream's events, each of which must be whole."""
    assert body.endswith(b"\n\n")
    return body[:-2].split(b"\n\n")


def last_error(body: bytes) -> dict[str, str]:
    last = events(body)[-1]
    assert last.startswith(b"data: ")
    return dict(json.loads(last[6:])["error"])


async def reset(call: Call) -> None:
    call.reset()


async def silent(call: Call) -> None:
    await call.until_gone()


async def only_a_head(call: Call) -> None:
    await call.stream()
    await call.until_gone()


async def streamed(call: Call) -> None:
    await call.stream()
    await call.piece(chunk("whole", finish="stop"))
    await call.piece(DONE)
    await call.end()


# Before the first byte: another replica


async def test_a_replica_that_refuses_connections_is_passed_over(house: House) -> None:
    down, up = await house.serve(completion, completion)
    await down.stop()
    for _ in range(20):
        assert (await house.ask()).status == 200
    assert len(up.calls) == 20
    errors = house.gateway.meter.engine_errors["m", "unreachable"]
    assert 1 <= errors <= 2
    await house.at_rest()


async def test_a_replica_that_takes_no_connection_is_passed_over_and_left_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has no power, and the table names it still."""
    for name in ("COOLING_FIRST_S", "COOLING_MOST_S"):  # longer than this test may take
        monkeypatch.setattr(target, name, 3_600.0)
    up = await house.serve(completion, completion, timeouts={"engine_idle_s": 3_600.0})
    for _ in range(4):  # so that both have a connection, made without haste: the short limit is for the other one
        assert (await house.ask()).status == 200
    house.gateway.connector = Connector(0.1)
    async with deaf() as url:
        hole = Endpoint(replica="m-2", generation=1, url=url, api_key="k")
        house.say(Route(model="m", endpoints=(*(endpoint(engine, number) for number, engine in enumerate(up)), hole)))
        away = house.gateway.router.lines["m"].targets[2]
        for tries in (1, 2, 3):
            for _ in range(60):
                assert (await house.ask()).status == 200
            assert house.gateway.meter.engine_errors == {("m", "unreachable"): tries}
            assert away.failures == tries
            away.cooling_until = 0.0
        assert sum(len(engine.calls) for engine in up) == 184
        assert [engine.connections for engine in up] == [1, 1]
        await house.at_rest()


async def test_a_burst_that_a_replica_without_power_has_swallowed_is_answered_by_others(house: House) -> None:
    """Those that are connecting have been let in: they wait for another beyond the limit of the queue."""

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    go = asyncio.Event()
    up = [await house.engine(script), await house.engine(script)]
    async with deaf() as url:
        hole = Endpoint(replica="m-0", generation=1, url=url, api_key="k")
        others = [endpoint(engine, number, max_concurrency=1) for number, engine in enumerate(up, 1)]
        await house.start(Route(model="m", endpoints=(hole, *others)), queue=2, timeouts={"connect_s": 60.0})
        line = house.gateway.router.lines["m"]
        asked = [asyncio.ensure_future(house.ask()) for _ in range(60)]
        await house.until(lambda: [target.in_flight for target in line.targets] == [58, 1, 1])
        for exchange in list(house.gateway.active):  # as its connector says when the time is over
            if exchange._connecting:
                exchange.unreachable(line.targets[0], "no connection within 60 s")
        assert len(line.waiting) == 58
        assert (await house.ask()).status == 429, "who comes new is not let in"
        go.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 60
        assert sum(len(engine.calls) for engine in up) == 60
        await house.at_rest()


async def test_where_the_only_replica_takes_no_connection_the_answer_says_so(house: House) -> None:
    async with deaf() as url:
        hole = Endpoint(replica="m-0", generation=1, url=url, api_key="k")
        await house.start(Route(model="m", endpoints=(hole,)), timeouts={"connect_s": 0.1}, hold_for_s=0.1)
        answer = await house.ask()
        assert (answer.status, answer.error["code"]) == (503, "no_ready_replica")
        assert answer.error["message"].endswith(": replica m-0: no connection within 0.1 s")
        await house.at_rest()


async def test_while_one_tries_whether_a_replica_is_back_no_other_does(house: House) -> None:
    """Though the attempt takes longer than the first pause: each more would wait out ``connect_s`` as well."""
    async with deaf() as url:
        hole = Endpoint(replica="m-0", generation=1, url=url, api_key="k")
        await house.start(Route(model="m", endpoints=(hole,)), timeouts={"connect_s": 60.0})
        line = house.gateway.router.lines["m"]
        (away,) = line.targets
        away.unreachable(0.0)
        away.cooling_until = 0.0
        before = time.monotonic()
        async with await house.client() as client:
            await client.send(request(ask()))
            await house.until(lambda: away.in_flight == 1)
            (exchange,) = house.gateway.active
            await house.until(lambda: exchange._connecting)
            assert line.choose(exchange, before + 59.0) is None
        await house.at_rest()


async def test_a_replica_that_takes_a_connection_again_is_held_back_no_longer_than_before(house: House) -> None:
    (engine,) = await house.serve(silent, timeouts={"connect_s": 60.0})
    line = house.gateway.router.lines["m"]
    (back,) = line.targets
    back.unreachable(0.0)
    back.cooling_until = 0.0
    client = await house.client()
    await client.send(request(ask()))
    await engine.received(1)
    (exchange,) = house.gateway.active
    assert line.choose(exchange, time.monotonic() + target.COOLING_FIRST_S) is back


def test_a_replica_that_stays_away_is_tried_ever_more_rarely() -> None:
    line = Line(Route(model="m"), 10)
    line.update(Route(model="m", endpoints=(Endpoint(replica="m-0", generation=1, url="http://a:1", api_key="k"),)))
    (away,) = line.targets
    pauses = []
    for _ in range(6):
        away.unreachable(100.0)
        pauses.append(away.cooling_until - 100.0)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    away.answered()
    away.unreachable(100.0)
    assert away.cooling_until == 101.0, "its answer has made up for them"


async def test_a_reset_before_the_head_goes_to_another_replica(house: House) -> None:
    hits: list[str] = []

    async def first_breaks(call: Call) -> None:
        hits.append("broken")
        call.reset()

    await house.serve(first_breaks, completion)
    for _ in range(4):
        assert (await house.ask()).status == 200
    assert hits == ["broken"]


async def test_a_prompt_that_kills_engines_is_not_handed_round(house: House) -> None:
    engines = await house.serve(reset, reset, reset, reset)
    answer = await house.ask()
    assert (answer.status, answer.error["code"]) == (502, "engine_failed")
    assert answer.headers["x-should-retry"] == "false"
    assert sum(len(engine.calls) for engine in engines) == 2


async def test_the_only_replica_may_come_back(house: House) -> None:
    (engine,) = await house.serve(completion)
    await engine.stop()
    async with await Client.open(house.gateway.port) as client:
        await client.send(request(ask()))
        await house.until(lambda: house.gateway.meter.engine_errors["m", "unreachable"] > 0)
        await engine.start()
        assert (await client.answer()).status == 200


async def test_another_generation_wakes_who_waits(house: House) -> None:
    await house.start(Route(model="m", why_none="replica m-abcde is loading the model"))
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: len(house.gateway.router.lines["m"].waiting) == 1)
    engine = await house.engine()
    house.say(Route(model="m", endpoints=(endpoint(engine),)))
    assert (await client.answer()).status == 200
    await house.at_rest()


async def test_a_503_goes_to_another_replica(house: House) -> None:
    loading, up = await house.serve(
        lambda call: call.json(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
        completion,
    )
    for _ in range(6):
        assert (await house.ask()).status == 200
    assert len(up.calls) == 6
    assert loading.calls


async def test_a_model_that_is_still_loading_is_waited_for(house: House) -> None:
    answers = iter([503, 503])

    async def script(call: Call) -> None:
        if next(answers, None):
            await call.json(503, {"error": {"message": "Loading model"}})
        else:
            await call.json(200, COMPLETION)

    (engine,) = await house.serve(script)
    assert (await house.ask()).status == 200
    assert len(engine.calls) == 3


async def test_a_503_that_stays_is_passed_on(house: House) -> None:
    await house.serve(lambda call: call.json(503, {"error": {"message": "Loading model"}}), timeouts={"queue_s": 0.1})
    answer = await house.ask()
    assert answer.status == 503
    assert answer.json() == {"error": {"message": "Loading model"}}
    assert int(answer.headers["retry-after"]) >= 1
    await house.at_rest()


async def test_a_429_goes_to_another_replica_and_counts_against_nobody(house: House) -> None:
    full, up = await house.serve(lambda call: call.json(429, {"error": {"message": "full"}}), completion)
    for _ in range(8):
        assert (await house.ask()).status == 200
    assert len(up.calls) == 8
    assert len(full.calls) >= 3
    assert all(not target.failures for target in house.gateway.router.lines["m"].targets)


async def test_a_429_that_nobody_takes_is_passed_on_once(house: House) -> None:
    engines = await house.serve(*[lambda call: call.json(429, {"error": {"message": "full"}}, b"Retry-After: 7")] * 2)
    answer = await house.ask()
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"error": {"message": "full"}}
    assert [len(engine.calls) for engine in engines] == [1, 1]


async def test_a_429_without_retry_after_gets_one(house: House) -> None:
    await house.serve(lambda call: call.json(429, {"error": {"message": "full"}}))
    assert int((await house.ask()).headers["retry-after"]) >= 1


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_a_pooled_connection_that_the_engine_has_closed(house: House, how: str) -> None:
    """The engine closes an idle connection just when it is used again: the second request on it gets nothing."""
    used: dict[int, int] = {}

    async def script(call: Call) -> None:
        used[call.connection] = used.get(call.connection, 0) + 1
        if used[call.connection] == 1:
            await call.json(200, COMPLETION)
        elif how == "reset":
            call.reset()
        else:
            call.close()

    (engine,) = await house.serve(script)
    for _ in range(50):
        assert (await house.ask()).status == 200
    assert not house.gateway.meter.engine_errors
    assert all(not target.failures for target in house.gateway.router.lines["m"].targets)
    assert len(engine.calls) == 99


async def test_a_connection_closed_while_idle_is_forgotten(house: House) -> None:
    async def script(call: Call) -> None:
        await call.json(200, COMPLETION)
        call.close()

    (engine,) = await house.serve(script)
    for _ in range(20):
        assert (await house.ask()).status == 200
        await house.until(lambda: not house.gateway.router.lines["m"].targets[0].idle)
    assert len(engine.calls) == 20


async def test_a_reset_is_no_success(house: House) -> None:
    await house.serve(reset)
    answer = await house.ask()
    assert answer.status == 502
    assert "m-0" in answer.error["message"]


# What engines refuse is the client's to read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 413, 422, 500])
async def test_an_engines_error_is_passed_on_once_and_unchanged(house: House, status: int, stream: bool) -> None:
    body = b'{"error": {"message": "maximum context length is 8 tokens", "type": "x", "param": null, "code": 7}}'
    (engine,) = await house.serve(lambda call: call.answer(status, body))
    answer = await house.ask(ask(stream=stream))
    assert (answer.status, answer.body) == (status, body)
    assert len(engine.calls) == 1
    await house.at_rest()


async def test_refusals_do_not_put_a_replica_aside(house: House) -> None:
    replies = iter([400] * 10 + [500] * 10)

    async def script(call: Call) -> None:
        status = next(replies, 200)
        await call.json(status, COMPLETION if status == 200 else {"error": {"message": "no"}})

    await house.serve(script)
    for _ in range(20):
        assert (await house.ask()).status in (400, 500)
    assert (await house.ask()).status == 200


async def test_the_older_error_form_is_put_into_the_one_that_clients_know(house: House) -> None:
    old = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    await house.serve(lambda call: call.json(400, old))
    answer = await house.ask()
    assert answer.status == 400
    assert answer.json() == {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}


async def test_the_older_error_form_within_a_stream(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("a"))
        await call.piece(b'data: {"object":"error","message":"out of memory","type":"X","code":500}\n\n')
        await call.piece(DONE)
        await call.end()

    await house.serve(script)
    body = (await house.ask(ask(stream=True))).body
    error = {"error": {"message": "out of memory", "type": "X", "param": None, "code": 500}}
    assert events(body) == [chunk("a")[:-2], b"data: " + json.dumps(error, separators=(",", ":")).encode(), DONE[:-2]]


async def test_a_large_error_is_passed_on_whole(house: House) -> None:
    body = b'{"error": {"message": "%b"}}' % (b"x" * 200_000)
    await house.serve(lambda call: call.answer(500, body))
    answer = await house.ask()
    assert (answer.status, answer.body) == (500, body)


async def test_the_engine_refuses_the_gateways_own_key(house: House) -> None:
    await house.serve(lambda call: call.json(401, {"error": "Unauthorized"}))
    answer = await house.ask()
    assert (answer.status, answer.error["code"]) == (502, "engine_key_refused")


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
    ids=["another protocol", "two lengths", "a head without end", "an upgrade"],
)
async def test_what_is_not_http_is_an_engine_failure(house: House, garbage: bytes) -> None:
    (engine,) = await house.serve(lambda call: call.send(garbage))
    answer = await house.ask()
    assert answer.status == 502
    assert len(engine.calls) == 2
    await house.at_rest()


async def test_a_second_answer_spoils_the_connection_only(house: House) -> None:
    async def script(call: Call) -> None:
        one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        await call.send(one + one.replace(b"{}", b"[]"))

    (engine,) = await house.serve(script)
    client = await house.client()
    for _ in range(3):
        assert (await client.ask(ask())).body == b"{}"
    assert engine.connections == 3


# After the first byte: said in the stream, never repeated


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_an_engine_that_dies_within_a_stream(house: House, how: str) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.piece(chunk("two"))
        await passed.wait()
        call.reset() if how == "reset" else call.close()

    passed = asyncio.Event()
    engines = await house.serve(script, script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    got = b""
    while len(got) < len(chunk("one") + chunk("two")):
        got += await client.piece()
    assert got == chunk("one") + chunk("two")
    passed.set()
    error = last_error(await client.piece())
    assert error["code"] == "engine_failed"
    assert error["type"] == "server_error"
    assert await client.piece() == b""
    assert sum(len(engine.calls) for engine in engines) == 1
    assert (await client.ask(method="GET", path="/v1/models")).status == 200, "the client's connection is whole"
    assert house.gateway.meter.models["m"].truncated == 1
    await house.at_rest()


async def test_a_part_of_an_event_does_not_spoil_the_error(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one") + b'data: {"choi')
        await asyncio.wait_for(half_read.wait(), 5)
        call.reset()

    half_read = asyncio.Event()
    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    assert await client.piece() == chunk("one")
    half_read.set()
    assert last_error(await client.piece())["code"] == "engine_failed"


async def test_an_engine_that_dies_within_an_http_chunk(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.send(b"1000\r\n" + chunk("one"))
        await seen.wait()
        call.reset()

    seen = asyncio.Event()
    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    assert await client.piece() == chunk("one")
    seen.set()
    assert last_error(await client.piece())["code"] == "engine_failed"
    assert await client.piece() == b""


async def test_an_event_too_large_to_hold_is_ended_before_the_error(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(b"data: " + b"x" * 100_000)
        await seen.wait()
        call.reset()

    seen = asyncio.Event()
    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    got = await client.piece()
    seen.set()
    while piece := await client.piece():
        got += piece
    assert len(events(got)) == 2
    assert last_error(got)["code"] == "engine_failed"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(chunk("", None), id="role only"),
        pytest.param(chunk("one") + chunk("two"), id="no finish_reason"),
        pytest.param(chunk("one")[:-1], id="no last blank line"),
        pytest.param(chunk('"finish_reason": "stop"'), id="finish_reason within the text"),
        pytest.param(chunk("data: [DONE]"), id="[DONE] within the text"),
    ],
)
@pytest.mark.parametrize("length", ["chunked", "close"])
async def test_a_clean_but_early_end_is_no_success(house: House, sent: bytes, length: str) -> None:
    async def script(call: Call) -> None:
        if length == "chunked":
            await call.stream()
            if sent:
                await call.piece(sent)
            await call.end()
        else:
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sent)
            call.close()

    await house.serve(script)
    body = (await house.ask(ask(stream=True))).body
    assert last_error(body)["code"] == "truncated"
    assert b"[DONE]\n\n" not in body
    assert body.startswith(sent)
    assert house.gateway.meter.models["m"].truncated == 1


async def test_a_finish_reason_without_done_is_an_end(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.piece(chunk("", finish="length"))
        await call.piece(b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n')
        await call.end()

    await house.serve(script)
    body = (await house.ask(ask(stream=True))).body
    assert b'"error"' not in body
    assert len(events(body)) == 3


async def test_an_error_of_the_engines_own_is_not_doubled(house: House) -> None:
    own = b'data: {"error": {"message": "out of memory", "type": "x", "param": null, "code": null}}\n\n'

    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one") + own)
        await call.end()

    await house.serve(script)
    assert (await house.ask(ask(stream=True))).body == chunk("one") + own


@pytest.mark.parametrize("head", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
async def test_a_plain_answer_that_is_cut_is_not_whole(house: House, head: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b\r\n\r\n" % head)
        await call.send(b'8\r\n{"a": "b\r\n' if b"chunked" in head else b'{"a": "b')
        call.close()

    (engine,) = await house.serve(script)
    with pytest.raises(Torn) as torn:
        await house.ask()
    assert torn.value.so_far == b'{"a": "b'
    assert len(engine.calls) == 1
    await house.at_rest()


# Time


LIMIT_S = 0.05
PLAIN = json.dumps(COMPLETION).encode()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        pytest.param(SSE_HEAD, framed(chunk("slow", finish="stop") + DONE) + LAST_CHUNK, id="stream"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PLAIN), PLAIN, id="plain"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", framed(PLAIN) + LAST_CHUNK, id="plain chunked"
        ),
    ],
)
async def test_a_slow_first_token_is_waited_for(house: House, head: bytes, body: bytes) -> None:
    """Before the head and behind it: ``first_token_s`` and ``total_s`` bound it, a plain answer the latter alone."""

    async def script(call: Call) -> None:
        await head_due.wait()
        await call.send(head)
        await body_due.wait()
        await call.send(body)  # in one piece: from here on silence counts

    head_due, body_due = asyncio.Event(), asyncio.Event()
    stream = head is SSE_HEAD
    (engine,) = await house.serve(script, timeouts={"connect_s": LIMIT_S})
    client = await house.client()
    await client.send(request(ask(stream=stream)))
    await engine.received(1)
    gateway = house.gateway
    # Only now: no client must hurry to send its request.
    short = ("between_tokens_s", "client_stall_s", "engine_idle_s", "keep_alive_s", "head_s", "body_stall_s", "queue_s")
    if not stream:
        short += ("first_token_s",)
    timeouts = replace(gateway.timeouts, **dict.fromkeys(short, LIMIT_S))
    gateway.take_limits(replace(gateway.settings, timeouts=timeouts, hold_for_s=LIMIT_S))
    (exchange,) = gateway.active
    await house.limits_looked_at_for(10 * LIMIT_S)
    head_due.set()
    await house.until(lambda: exchange._held or exchange._relay is not None)
    await house.limits_looked_at_for(10 * LIMIT_S)
    body_due.set()
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, chunk("slow", finish="stop") + DONE if stream else PLAIN)
    assert len(engine.calls) == 1
    await house.at_rest()


ABOVE_TOTAL = dict.fromkeys(
    ("queue_s", "first_token_s", "between_tokens_s", "connect_s", "body_stall_s", "client_stall_s"), 7_200.0
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["waiting", "connecting", "at the engine", "behind the head"])
async def test_the_total_is_half_an_hour_and_not_less(house: House, where: str, stream: bool) -> None:
    """Wherever the request is; the clock of the check is ours."""
    how: dict[str, Any] = {"timeouts": ABOVE_TOTAL, "hold_for_s": 7_200.0}
    async with deaf() as url:
        if where == "waiting":
            await house.start(Route(model="m"), **how)
        elif where == "connecting":
            hole = Endpoint(replica="m-0", generation=1, url=url, api_key="k")
            await house.start(Route(model="m", endpoints=(hole,)), **how)
        else:
            await house.serve(silent if where == "at the engine" else only_a_head, **how)
        client = await house.client()
        before = time.monotonic()
        await client.send(request(ask(stream=stream)))
        await house.until(lambda: house.gateway.active)
        (exchange,) = house.gateway.active
        after = time.monotonic()
        reached = {
            "waiting": lambda: exchange in house.gateway.router.lines["m"].waiting,
            "connecting": lambda: exchange._connecting,
            "at the engine": lambda: house.engines[0].calls,
            "behind the head": lambda: exchange._held or exchange._relay is not None,
        }
        await house.until(reached[where])
        exchange.check(before + 1_799.0)
        assert house.gateway.active == {exchange}
        exchange.check(after + 1_800.0)
        assert not house.gateway.active
        if where == "behind the head" and not stream:
            with pytest.raises(Torn):  # its own head has gone to the client
                await client.answer()
            return
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert "its limit of 1800 s is over" in answer.error["message"]
        await house.at_rest()


async def test_a_stream_under_way_ends_at_the_total_and_not_before(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.until_gone()

    await house.serve(script, timeouts=ABOVE_TOTAL)
    client = await house.client()
    before = time.monotonic()
    await client.send(request(ask(stream=True)))
    await client.head()
    after = time.monotonic()
    assert await client.piece() == chunk("one")
    (exchange,) = house.gateway.active
    exchange.check(before + 1_799.0)
    assert house.gateway.active == {exchange}
    exchange.check(after + 1_800.0)
    error = last_error(await client.piece())
    assert error["code"] == "timeout"
    assert "its limit of 1800 s is over" in error["message"]
    await house.at_rest()


@pytest.mark.parametrize("script", [silent, only_a_head])
async def test_the_first_byte_of_a_stream_has_ten_minutes_and_not_less(house: House, script: Script) -> None:
    (engine,) = await house.serve(script)
    client = await house.client()
    before = time.monotonic()
    await client.send(request(ask(stream=True)))
    await engine.received(1)
    after = time.monotonic()
    (exchange,) = house.gateway.active
    await house.until(lambda: exchange._held or script is silent)
    exchange.check(before + 599.0)
    assert house.gateway.active == {exchange}
    exchange.check(after + 600.0)
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert "no first byte within 600 s" in answer.error["message"]
    await house.at_rest()


async def test_silence_within_a_stream_may_last_a_minute_and_not_less(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        for text in ("one", "two"):
            await due.acquire()
            await call.piece(chunk(text))
        await call.until_gone()

    due = asyncio.Semaphore(1)
    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    assert await client.piece() == chunk("one")
    (exchange,) = house.gateway.active
    before = time.monotonic()
    due.release()
    assert await client.piece() == chunk("two")
    await house.until(lambda: not exchange.stirred)  # a check of the gateway's own has seen it
    after = time.monotonic()
    exchange.check(before + 59.0)
    assert house.gateway.active == {exchange}
    exchange.check(after + 60.0)
    error = last_error(await client.piece())
    assert error["code"] == "timeout"
    assert "nothing for 60 s" in error["message"]
    await house.at_rest()


async def test_a_silent_engine_is_given_up_and_another_answers(house: House) -> None:
    first, second = await house.serve(silent, streamed, timeouts={"first_token_s": 0.1})
    for _ in range(4):
        answer = await house.ask(ask(stream=True))
        assert answer.body.endswith(DONE)
    assert len(first.calls) == 1
    assert len(second.calls) == 4
    await first.calls[0].until_gone()


async def test_silence_ends_in_a_504(house: House) -> None:
    engines = await house.serve(silent, silent, silent, timeouts={"first_token_s": 0.1})
    answer = await house.ask(ask(stream=True))
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert sum(len(engine.calls) for engine in engines) == 2
    await house.at_rest()


async def test_a_plain_call_ends_within_the_total(house: House) -> None:
    (engine,) = await house.serve(silent, timeouts={"total_s": 0.1})
    assert (await house.ask()).status == 504
    await engine.calls[0].until_gone()
    await house.at_rest()


async def test_silence_within_a_stream(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await call.until_gone()

    (engine,) = await house.serve(script, timeouts={"between_tokens_s": 0.1})
    body = (await house.ask(ask(stream=True))).body
    assert body.startswith(chunk("one"))
    assert last_error(body)["code"] == "timeout"
    await engine.calls[0].until_gone()


async def test_a_head_without_a_first_token(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.until_gone()

    first, second = await house.serve(script, streamed, timeouts={"first_token_s": 0.1, "between_tokens_s": 60.0})
    for _ in range(4):
        assert (await house.ask(ask(stream=True))).body.endswith(DONE)
    assert len(first.calls) == 1
    await first.calls[0].until_gone()
    await second.stop()
    house.say(Route(model="m", endpoints=(endpoint(first, 2),)))
    answer = await house.ask(ask(stream=True))
    assert (answer.status, answer.error["code"]) == (504, "timeout")


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_an_engine_that_dies_between_head_and_first_token(house: House, how: str) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        call.reset() if how == "reset" else call.close()

    breaks, up = await house.serve(script, streamed)
    for _ in range(4):
        answer = await house.ask(ask(stream=True))
        assert (answer.status, answer.body[-len(DONE) :]) == (200, DONE)
    assert len(breaks.calls) == 1
    assert len(up.calls) == 4
    await house.at_rest()


async def test_a_stream_that_goes_on_for_ever(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        while not call.gone.is_set():
            await call.piece(chunk("again"))
            await asyncio.wait({asyncio.ensure_future(call.gone.wait())}, timeout=0.01)

    await house.serve(script, timeouts={"total_s": 0.3})
    assert last_error((await house.ask(ask(stream=True))).body)["code"] == "timeout"


async def test_a_hung_replica_does_not_slow_the_others(house: House) -> None:
    hung, up = await house.serve(silent, completion)
    async with await Client.open(house.gateway.port) as stuck:
        await stuck.send(request(ask()))
        await house.until(lambda: len(hung.calls) + len(up.calls) == 1)
        if up.calls:
            await stuck.answer()
            await stuck.send(request(ask()))
            await hung.call()
        async with asyncio.timeout(5):
            for _ in range(20):
                assert (await house.ask()).status == 200


# Churn


async def test_every_request_ends_while_replicas_come_and_go(house: House) -> None:
    """Replicas are added, removed, killed and started under load; each request gets its answer or an error."""

    async def script(call: Call) -> None:
        if json.loads(call.body).get("stream"):
            await streamed(call)
        else:
            await call.json(200, COMPLETION)

    pool = [await house.engine(script) for _ in range(3)]
    await house.start(
        Route(model="m", endpoints=tuple(endpoint(engine, n) for n, engine in enumerate(pool))),
        timeouts={"total_s": 5.0, "queue_s": 5.0},
        hold_for_s=5.0,
    )
    statuses: list[int] = []
    over = asyncio.Event()

    async def load(number: int) -> None:
        async with await Client.open(house.gateway.port) as client:
            for count in range(60):
                answer = await client.ask(ask(stream=bool((number + count) % 2)))
                assert answer.status != 200 or answer.body
                statuses.append(answer.status)
                if answer.headers.get("connection") == "close":
                    return

    async def churn() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            victim: Engine = pool[turn % 3]
            keep = tuple(endpoint(engine, n) for n, engine in enumerate(pool) if engine is not victim)
            house.say(Route(model="m", endpoints=keep))
            await victim.stop()
            await victim.start()
            house.say(Route(model="m", endpoints=tuple(endpoint(engine, n) for n, engine in enumerate(pool))))
            await asyncio.wait({asyncio.ensure_future(over.wait())}, timeout=0.02)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        churning = tasks.create_task(churn())
        async with asyncio.TaskGroup() as loads:
            for number in range(8):
                loads.create_task(load(number))
        over.set()
        await churning
    assert len(statuses) == 8 * 60
    assert statuses.count(200) > 400
    assert set(statuses) <= {200, 502, 503}
    await house.at_rest()
