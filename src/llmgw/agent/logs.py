"""Answers requests for a shard's output: its tail, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmgw.agent.supervisor import Supervisor, SupervisorError
from llmgw.link.messages import LogLines, LogsCancel, LogsRequest


class LogReader:
    """Owns one task per reading. All calls on the agent's own loop."""

    def __init__(self, supervisor: Supervisor, send: Callable[[LogLines], None]) -> None:
        self._supervisor = supervisor
        self._send = send
        self._readings: dict[str, asyncio.Task[None]] = {}

    def take(self, frame: LogsRequest | LogsCancel) -> None:
        if isinstance(frame, LogsCancel):
            if task := self._readings.pop(frame.id, None):
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._read(frame), name=f"logs of {frame.shard}")
        self._readings[frame.id] = task
        task.add_done_callback(lambda _: self._readings.pop(frame.id, None))

    async def close(self) -> None:
        tasks = list(self._readings.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request: LogsRequest) -> None:
        try:
            if request.follow:
                await self._follow(request)
            else:
                lines = await asyncio.to_thread(self._supervisor.tail, request.shard, request.lines)
                self._send(LogLines(id=request.id, lines=tuple(lines), end=True))
        except SupervisorError as error:
            self._send(LogLines(id=request.id, end=True, error=str(error)))
        except OSError as error:
            self._send(LogLines(id=request.id, end=True, error=f"its output can't be read: {error}"))

    async def _follow(self, request: LogsRequest) -> None:
        async for lines in self._supervisor.follow(request.shard, request.lines):
            self._send(LogLines(id=request.id, lines=tuple(lines)))
        self._send(LogLines(id=request.id, end=True))
