"""Many agents that dial at once, as after a power failure: all are in, with one session each, nobody tries twice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from .ends import DEADLINE_S, Pki
from .test_link import greet, raw

AGENTS = 100


async def test_a_hundred_agents_dial_at_once(serve, pki: Pki):
    server, told = await serve(heartbeat_s=5.0)
    files = [await asyncio.to_thread(pki.node, f"crowd-{number:03}") for number in range(AGENTS)]
    async with AsyncExitStack() as stack:
        gate = asyncio.Event()

        async def dial(number: int) -> None:
            await gate.wait()
            ws = await stack.enter_async_context(raw(server, files[number]))
            await greet(ws, f"crowd-{number:03}")

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for number in range(AGENTS):
                group.create_task(dial(number))
            gate.set()
        assert len(await told.wait("welcomed", AGENTS)) == AGENTS
        assert len({peer.id for (peer,) in told.of("welcomed")}) == AGENTS
        assert (told.of("closed"), told.of("refused")) == ([], [])
