from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from llmgw.link.server import LinkServer

from .ends import End, Pki, Recorder, make_end, make_server


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("lab"))


@pytest.fixture
async def serve(pki: Pki) -> AsyncIterator[Callable[..., Awaitable[tuple[LinkServer, Recorder]]]]:
    """Starts servers on loopback; they are stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> tuple[LinkServer, Recorder]:
            recorder = Recorder()
            server = make_server(pki, recorder, **options)
            await server.start()
            stack.push_async_callback(server.stop)
            return server, recorder

        yield start


@pytest.fixture
async def dial(pki: Pki) -> AsyncIterator[Callable[..., End]]:
    """Starts clients; they are stopped at the end."""
    ends: list[End] = []

    def start(port: int, id: str, **options: Any) -> End:
        servers = options.pop("servers", [f"https://127.0.0.1:{port}"])
        end = make_end(servers, options.pop("tls", None) or pki.node(id), id, **options)
        end.client.start()
        ends.append(end)
        return end

    yield start
    for end in ends:
        await asyncio.to_thread(end.client.stop)


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The control plane's own loop."""
    return uvloop.EventLoopPolicy()
