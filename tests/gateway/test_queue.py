"""Who gets which replica, who waits, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.cluster.model import Endpoint, Route
from llmgw.gateway.exchange import Exchange
from llmgw.gateway.routing import Line, Router
from llmgw.gateway.target import Target

from .client import Answer, Client, ask, request
from .conftest import House, endpoint
from .engine import COMPLETION, DONE, Call, chunk, completion


class Nobody:
    """A waiter that is never sent off."""

    def __init__(self) -> None:
        self.not_before: dict[Target, float] | None = None

    def dispatch(self, target: Target, now: float) -> None:
        raise AssertionError

    def expire(self, now: float, busy: bool) -> bool:
        return False

    def removed(self) -> None:
        raise AssertionError


def line_of(*endpoints: Endpoint, limit: int = 10) -> Line:
    line = Line(Route(model="m"), limit)
    line.update(Route(model="m", endpoints=endpoints))
    return line


def at(number: int, **more: object) -> Endpoint:
    return Endpoint(
        replica=f"m-{number}",
        generation=1,
        url=f"http://127.0.0.1:{number + 1}",
        api_key="",
        **more,  # type: ignore[arg-type]
    )


def take(line: Line) -> Target | None:
    target = line.choose(Nobody(), 0.0)
    if target is not None:
        target.take(0.0)
    return target


def test_ties_go_round() -> None:
    line = line_of(*(at(number) for number in range(4)))
    chosen = []
    for _ in range(8):
        target = line.choose(Nobody(), 0.0)
        assert target is not None
        chosen.append(target.endpoint.replica)
    assert Counter(chosen) == {f"m-{number}": 2 for number in range(4)}


def test_the_least_busy_first() -> None:
    line = line_of(at(0), at(1), at(2))
    for target, load in zip(line.targets, (3, 0, 2), strict=True):
        target.in_flight = load
    for _ in range(2):
        assert take(line) is line.targets[1]
    take(line)
    assert sorted(target.in_flight for target in line.targets) == [2, 3, 3]


def test_suspects_last_but_not_never() -> None:
    line = line_of(at(0, preferred=False), at(1, max_concurrency=2))
    suspect, preferred = line.targets
    assert [take(line) for _ in range(4)] == [preferred, preferred, suspect, suspect]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 4))), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_limits_are_kept_and_load_is_even(shapes: list[tuple[bool, int | None]], requests: int) -> None:
    line = line_of(*(at(n, preferred=preferred, max_concurrency=most) for n, (preferred, most) in enumerate(shapes)))
    for _ in range(requests):
        if take(line) is None:
            break
    counts = [(t.in_flight, t.endpoint.max_concurrency, t.endpoint.preferred) for t in line.targets]
    assert all(most is None or count <= most for count, most, _ in counts)
    free = [count for count, most, preferred in counts if (most is None or count < most) and preferred]
    assert not free or max(free) - min(free) <= 1
    if free:
        assert all(count == 0 for count, _, preferred in counts if not preferred)
    if sum(count for count, _, _ in counts) < requests:
        assert all(most is not None and count == most for count, most, _ in counts)


def test_counts_survive_a_new_table() -> None:
    router = Router(10)
    route = Route(model="m", endpoints=(at(0), at(1)))
    router.update([route], {"m": route})
    target = take(router.lines["m"])
    assert target is not None
    fewer = Route(model="m", endpoints=(at(0, preferred=False), at(1)))
    router.update([fewer], {"m": fewer})
    assert target in router.lines["m"].targets
    assert router.lines["m"].in_flight == 1
    router.update([], {})
    assert target.gone
    target.release()
    assert target.in_flight == 0


def test_one_that_failed_is_not_up_until_it_answers() -> None:
    """Nor while somebody tries it: a connection that nobody takes lasts longer than it is left alone."""
    line = line_of(at(0, max_concurrency=1))
    (target,) = line.targets
    assert line.busy
    target.unreachable(0.0)
    assert not line.busy
    waiter = Nobody()
    assert line.choose(waiter, 2.0) is target
    target.take(2.0)
    assert line.choose(waiter, 4.0) is None
    assert not line.busy
    target.answered()
    assert line.busy


async def test_one_whose_answers_go_on_is_up_though_another_request_failed_there(house: House) -> None:
    """Full of streams, it is sent nothing new that it could answer."""
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if len(engine.calls) > 1:
            call.reset()
            return
        await call.stream()
        while not go_on.is_set():
            await call.piece(chunk("more"))
            await asyncio.sleep(0.01)
        await call.piece(DONE)

    (engine,) = await house.serve(script, endpoint={"max_concurrency": 2})
    streaming, failing = await house.client(), await house.client()
    await streaming.send(request(ask(stream=True)))
    await streaming.head()
    line = house.gateway.router.lines["m"]
    (target,) = line.targets
    await failing.send(request(ask()))
    await house.until(lambda: target.failures)
    await house.until(lambda: line.busy)
    assert target.failures, "nothing new was answered"
    go_on.set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_a_burst_is_spread(house: House, path: str) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    engines = await house.serve(script, script)
    clients = [await house.client() for _ in range(8)]
    for client in clients:
        await client.send(request(ask(), path=path))
    await asyncio.gather(*(engine.received(4) for engine in engines))
    go.set()
    assert [(await client.answer()).status for client in clients] == [200] * 8
    assert [len(engine.calls) for engine in engines] == [4, 4]


async def test_a_hundred_over_eight(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    engines = await house.serve(*[script] * 8)
    clients = [await house.client() for _ in range(100)]
    for client in clients:
        await client.send(request(ask()))
    await house.until(lambda: sum(len(engine.calls) for engine in engines) == 100)
    assert all(12 <= len(engine.calls) <= 13 for engine in engines)
    go.set()
    await asyncio.gather(*(client.answer() for client in clients))


async def test_ten_at_a_limit_of_four(house: House) -> None:
    most = running = 0

    async def script(call: Call) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await call.stream()
        await call.piece(chunk("one"))
        await call.piece(DONE)
        running -= 1
        await call.end()

    await house.serve(script, endpoint={"max_concurrency": 4}, queue=100)
    answers = await asyncio.gather(*(house.ask(ask(stream=True)) for _ in range(10)))
    assert [answer.status for answer in answers] == [200] * 10
    assert most <= 4
    await house.at_rest()


async def full_house(house: House, queue: int, **settings: object) -> tuple[asyncio.Event, list[Client]]:
    """One replica that takes one request, with as many waiting as may."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    await house.serve(script, endpoint={"max_concurrency": 1}, queue=queue, **settings)
    clients = [await house.client() for _ in range(queue + 1)]
    line = house.gateway.router.lines["m"]
    for number, client in enumerate(clients):
        await client.send(request(ask()))
        await house.until(lambda count=number: line.in_flight == 1 and len(line.waiting) == count)
    return go, clients


def retry_after(answer: Answer) -> int:
    return int(answer.headers["retry-after"])


async def test_beyond_the_queue(house: House) -> None:
    go, clients = await full_house(house, 2)
    answer = await house.ask()
    assert (answer.status, answer.error["code"]) == (429, "queue_full")
    assert retry_after(answer) >= 1
    assert "2 requests wait" in answer.error["message"]
    go.set()
    assert [(await client.answer()).status for client in clients] == [200] * 3
    await house.at_rest()


async def test_waiting_for_a_free_replica_ends(house: House) -> None:
    go, clients = await full_house(house, 1, timeouts={"queue_s": 0.1})
    answer = await clients[1].answer()
    assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
    assert retry_after(answer) >= 1
    go.set()
    assert (await clients[0].answer()).status == 200
    await house.at_rest()


def waiting(house: House) -> list[Exchange]:
    return [each for each in house.gateway.router.lines["m"].waiting if isinstance(each, Exchange)]


async def test_the_hold_counts_from_when_none_was_up(house: House) -> None:
    """Those that queued for longer than that behind a full replica outwait its restart."""
    _, clients = await full_house(house, 3, hold_for_s=30.0)
    queued = waiting(house)
    for exchange in queued:
        exchange._waiting_since -= 40.0
    house.say(Route(model="m", why_none="m-0 restarts"))
    await house.until(lambda: all(exchange._down_since for exchange in queued))
    assert len(waiting(house)) == 4
    back = await house.engine(completion)
    house.say(Route(model="m", endpoints=(endpoint(back, 1),)))
    assert [(await client.answer()).status for client in clients] == [200] * 4
    await house.at_rest()


async def test_the_hold_counts_anew_once_one_is_up(house: House) -> None:
    go, clients = await full_house(house, 1, hold_for_s=30.0)
    (exchange,) = waiting(house)
    target = house.gateway.router.lines["m"].targets[0]
    target.failures = 1
    await house.until(lambda: exchange._down_since)
    exchange._down_since -= 20.0
    target.failures = 0
    await house.until(lambda: exchange._busy_since)
    assert not exchange._down_since
    exchange._busy_since -= 20.0
    target.failures = 1
    await house.until(lambda: exchange._down_since)
    assert not exchange._busy_since
    exchange._down_since -= 30.0
    answer = await clients[1].answer()
    assert (answer.status, answer.error["code"]) == (503, "no_ready_replica")
    go.set()
    assert (await clients[0].answer()).status == 200
    await house.at_rest()


async def test_looking_whether_one_is_back_does_not_prolong_the_hold(house: House) -> None:
    (engine,) = await house.serve(completion, hold_for_s=30.0)
    await engine.stop()
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: waiting(house))
    (exchange,) = waiting(house)
    await house.until(lambda: exchange._down_since)
    began = exchange._down_since
    errors = house.gateway.meter.engine_errors
    for failures in (2, 3):
        house.gateway.router.lines["m"].targets[0].cooling_until = 0.0
        await house.until(lambda count=failures: errors["m", "unreachable"] >= count)
        await house.until(lambda: waiting(house))
        assert exchange._down_since == began
    exchange._down_since -= 30.0
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (503, "no_ready_replica")
    await house.at_rest()


async def test_first_come_first_served(house: House) -> None:
    go, clients = await full_house(house, 5)
    go.set()
    order: list[int] = []

    async def wait(number: int) -> None:
        await clients[number].answer()
        order.append(number)

    await asyncio.gather(*(wait(number) for number in range(6)))
    assert order == sorted(order)


async def test_no_replica_says_why(house: House) -> None:
    await house.start(Route(model="m", why_none="no node has 4 free GPUs"), hold_for_s=0.1)
    started = time.monotonic()
    answer = await house.ask()
    assert time.monotonic() - started >= 0.1
    assert (answer.status, answer.error["code"]) == (503, "no_ready_replica")
    assert retry_after(answer) >= 1
    assert "no node has 4 free GPUs" in answer.error["message"]
    await house.at_rest()


async def test_no_replica_and_no_room_to_wait(house: House) -> None:
    await house.start(Route(model="m", why_none="loading"), queue=0)
    answer = await house.ask()
    assert (answer.status, answer.error["code"]) == (503, "no_ready_replica")
    assert "loading" in answer.error["message"]


async def test_replicas_that_cannot_be_reached_are_named(house: House) -> None:
    (engine,) = await house.serve(completion, hold_for_s=0.2)
    await engine.stop()
    answer = await house.ask()
    assert answer.status == 503
    assert "replica m-0: connection refused" in answer.error["message"]
    assert "127.0.0.1" not in answer.error["message"], "addresses of engines are not the client's business"


async def test_a_model_that_is_removed_while_it_is_waited_for(house: House) -> None:
    await house.start(Route(model="m"))
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: len(house.gateway.router.lines["m"].waiting) == 1)
    house.say()
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    await house.at_rest()


async def test_what_is_in_flight_outlives_the_table_that_named_it(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await go.wait()
        await call.piece(DONE)
        await call.end()

    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    assert await client.piece() == chunk("one")
    other = await house.engine()
    house.say(Route(model="m", endpoints=(endpoint(other, 1),)))
    assert (await house.ask()).status == 200
    go.set()
    assert await client.piece() == DONE
    assert len(other.calls) == 1


async def test_two_thousand_idle_streams(house: House) -> None:
    go = asyncio.Event()
    open_at_engine = 0

    async def script(call: Call) -> None:
        nonlocal open_at_engine
        await call.stream()
        open_at_engine += 1
        await go.wait()
        await call.piece(chunk("one") + DONE)
        await call.end()

    await house.serve(script, script)
    clients = [await house.client() for _ in range(2_000)]
    for client in clients:
        await client.send(request(ask(stream=True)))
    await house.until(lambda: open_at_engine == 2_000)
    assert len(house.gateway.active) == 2_000
    go.set()
    for client in clients:
        assert (await client.answer()).body == chunk("one") + DONE
    await house.at_rest()
