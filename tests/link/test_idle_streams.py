"""What stands between an agent and its control plane, and cuts what it takes for idle, finds nothing to cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

HEARTBEAT_S = 0.15
IDLE_S = 12 * HEARTBEAT_S
"""The ratio of the usual minute of proxies and load balancers to a heartbeat of 5 s."""


class CuttingProxy:
    """Passes bytes on, and closes both connections once either way has carried none for IDLE_S: some watch what the
    client sends, and some what the server does."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows: list[asyncio.Task[None]] = []
        self.port = 0
        self.cut = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[CuttingProxy]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for flow in self._flows:
                flow.cancel()
            await asyncio.gather(*self._flows, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._flows += [
            asyncio.ensure_future(self._pump(reader, far_writer)),
            asyncio.ensure_future(self._pump(far_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    data = await reader.read(65536)
                if not data:
                    return
                writer.write(data)
        except TimeoutError:
            self.cut += 1
        finally:
            writer.transport.abort()


async def test_a_proxy_that_cuts_idle_streams_never_sees_one(serve, dial):
    server, told = await serve(heartbeat_s=HEARTBEAT_S)
    async with CuttingProxy(server.port).open() as proxy:
        end = dial(proxy.port, "a", heartbeat_s=HEARTBEAT_S)
        await end.connected()
        await told.wait("heartbeat", 2 * round(IDLE_S / HEARTBEAT_S))
        assert proxy.cut == 0
        assert [entry[0] for entry in told.told if entry[0] in ("welcomed", "closed")] == ["welcomed"]
        assert end.client.state.session == 1


async def test_who_is_cut_all_the_same_is_back_at_once_as_it_was(serve, dial):
    """Where the heartbeat is too slow for such a proxy: it is in again long before its silence counts for anything."""
    server, told = await serve(heartbeat_s=20 * IDLE_S)
    async with CuttingProxy(server.port).open() as proxy:
        dial(proxy.port, "a")
        (first,), (second,) = (await told.wait("welcomed", 2))[:2]
        assert proxy.cut >= 1
        assert first.hello.instance == second.hello.instance
        assert (first.session, second.session) == (1, 2)
        assert told.of("refused") == []
        assert told.of("closed")[0][1] == "the connection broke"
