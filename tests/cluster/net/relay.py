"""A slow road: a TCP relay that passes every byte on, later. This kernel has no netem."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class Relay:
    """``with Relay(host, target, delay_s) as relay``: dial ``host``:``relay.port`` to get to ``target``, slowly."""

    def __init__(self, host: str, target: tuple[str, int], delay_s: float) -> None:
        self.port = 0
        self._host, self._target, self._delay_s = host, target, delay_s
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._relay, self._host, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._end.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each piece goes out ``delay_s`` after it came in, in order, however many are on the way."""
        loop = asyncio.get_running_loop()
        road: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while True:
                due_s, piece = await road.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if not piece:
                    writer.close()
                    return
                writer.write(piece)
                await writer.drain()

        arriving = asyncio.ensure_future(arrive())
        try:
            while piece := await reader.read(65536):
                road.put_nowait((loop.time() + self._delay_s, piece))
        except OSError:
            pass
        finally:
            road.put_nowait((loop.time() + self._delay_s, b""))
            await arriving
