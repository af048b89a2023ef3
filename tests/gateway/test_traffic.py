"""What the control plane is told of requests in flight, over the real stream: with each table, and as they end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from llmgw.cluster.model import Route, Traffic
from llmgw.gateway.feed import REPORTED_EVERY_S
from llmgw.link.messages import Routes

from .client import Client, ask, request
from .conftest import endpoint, table, until
from .engine import COMPLETION, DONE, Call, Engine, chunk, completion
from .test_feed import ControlPlane, pki, running, settings

__all__ = ["pki"]


class Gate:
    """An engine's script that answers when let through, one request per turn, or all from ``open`` on."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(0)

    def open(self, count: int) -> None:
        for _ in range(count):
            self.turns.release()

    async def __call__(self, call: Call) -> None:
        await self.turns.acquire()
        await call.json(200, COMPLETION)


def both(version: int, leaves: Engine, stays: Engine) -> Routes:
    return table([Route(model="m", endpoints=(endpoint(leaves, 0), endpoint(stays, 1)))], version)


def draining(version: int, stays: Engine) -> Routes:
    return table([Route(model="m", endpoints=(endpoint(stays, 1),), draining=("m-0",))], version)


async def test_the_count_is_told_with_the_table_and_until_it_is_zero(pki: Path, tmp_path: Path) -> None:
    gate = Gate()
    async with Engine(gate) as leaves, Engine(completion) as stays:
        plane = ControlPlane(pki, table([Route(model="m", endpoints=(endpoint(leaves),))], 1))
        await plane.server.start()
        async with running(settings(pki, tmp_path, plane.server.port)) as (gateway, _):
            await plane.until_acked(1)
            clients = [await Client.open(gateway.port) for _ in range(3)]
            for client in clients:
                await client.send(request(ask()))
            await leaves.received(3)
            plane.say(draining(2, stays))
            await plane.until_acked(2)
            assert plane.acks[-1].traffic == {"m-0": Traffic(in_flight=3)}
            for ended in (1, 2, 3):
                gate.open(1)
                wanted = Traffic(in_flight=3 - ended, finished=ended)
                await plane.until(
                    lambda wanted=wanted: plane.reports and plane.reports[-1].replicas.get("m-0") == wanted
                )
            plane.say(draining(3, stays))
            await plane.until_acked(3)
            assert plane.acks[-1].traffic == {"m-0": Traffic(finished=3)}, "told of a while longer"
            for client in clients:
                await client.close()
        await plane.server.stop()


async def test_reports_are_few_while_many_end_and_the_last_comes_at_once(pki: Path, tmp_path: Path) -> None:
    many, gate = 400, Gate()
    async with Engine(gate) as leaves, Engine(completion) as stays:
        plane = ControlPlane(pki, table([Route(model="m", endpoints=(endpoint(leaves),))], 1))
        await plane.server.start()
        async with running(settings(pki, tmp_path, plane.server.port)) as (gateway, _):
            await plane.until_acked(1)
            clients = [await Client.open(gateway.port) for _ in range(many)]
            for client in clients:
                await client.send(request(ask()))
            await leaves.received(many)
            plane.say(draining(2, stays))
            await plane.until_acked(2)
            before, began = len(plane.reports), time.monotonic()
            for _ in range(many // 4):
                gate.open(4)
            for client in clients:
                await client.answer()
            await plane.until(lambda: plane.reports[-1].replicas.get("m-0") == Traffic(finished=many))
            lasted = time.monotonic() - began
            assert len(plane.reports) - before <= lasted / REPORTED_EVERY_S + 2
            for client in clients:
                await client.close()
        await plane.server.stop()


async def test_a_control_plane_that_was_restarted_is_told_all_of_it_again(pki: Path, tmp_path: Path) -> None:
    """Also what ended while it was away, and before it is told of a table."""

    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await go.wait()
        await call.piece(DONE)
        await call.end()

    go = asyncio.Event()
    async with Engine(script) as leaves, Engine(completion) as stays:
        plane = ControlPlane(pki, table([Route(model="m", endpoints=(endpoint(leaves),))], 1))
        await plane.server.start()
        async with running(settings(pki, tmp_path, plane.server.port)) as (gateway, _):
            await plane.until_acked(1)
            clients = [await Client.open(gateway.port) for _ in range(2)]
            for client in clients:
                await client.send(request(ask(stream=True)))
                await client.head()
            plane.say(draining(2, stays))
            await plane.until_acked(2)
            await plane.server.stop()
            await until(lambda: not gateway.standing.connected)
            go.set()
            for client in clients:
                assert [await client.piece() for _ in range(3)] == [chunk("one"), DONE, b""]
            back = ControlPlane(pki, draining(3, stays), plane.server.port)
            await back.server.start()
            await back.until(lambda: back.acks and back.reports)
            assert back.acks[0].traffic == {"m-0": Traffic(finished=2)}
            assert back.reports[0].replicas == {"m-0": Traffic(finished=2)}
            await back.server.stop()
            for client in clients:
                await client.close()


@pytest.mark.parametrize("limit", [None, 8])
async def test_of_a_thousand_racing_requests_none_reaches_a_replica_after_the_acknowledgement(
    pki: Path, tmp_path: Path, limit: int | None
) -> None:
    """A replica is marked as draining under load: what reaches it afterwards had been counted in the
    acknowledgement, and what was asked for afterwards does not reach it at all."""
    acknowledged = False
    late: list[str] = []

    async def script(call: Call) -> None:
        if call.header("x-after-ack"):
            late.append(call.head.decode())
        await call.json(200, COMPLETION)

    async with Engine(script) as leaves, Engine(completion) as stays:
        frame = table(
            [
                Route(
                    model="m",
                    endpoints=(
                        endpoint(leaves, 0, max_concurrency=limit),
                        endpoint(stays, 1, max_concurrency=limit),
                    ),
                )
            ],
            1,
        )
        plane = ControlPlane(pki, frame)
        await plane.server.start()
        how = settings(pki, tmp_path, plane.server.port)
        async with running(how) as (gateway, _):
            await plane.until_acked(1)
            statuses: list[int] = []

            async def load() -> None:
                async with await Client.open(gateway.port) as client:
                    for _ in range(25):
                        headers = ("x-after-ack: yes",) if acknowledged else ()
                        statuses.append((await client.ask(ask(), headers=headers)).status)

            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for _ in range(40):
                    tasks.create_task(load())
                await leaves.received(100)
                plane.say(
                    table(
                        [Route(model="m", endpoints=(endpoint(stays, 1, max_concurrency=limit),), draining=("m-0",))],
                        2,
                    )
                )
                await plane.until_acked(2)
                acknowledged = True
                served = len(leaves.calls)
            assert statuses == [200] * 1_000
            assert not late
            assert len(leaves.calls) - served <= plane.acks[-1].traffic["m-0"].in_flight
            assert len(leaves.calls) + len(stays.calls) == 1_000
            assert not gateway.meter.engine_errors
        await plane.server.stop()
