"""Answers requests for a shard's output: its tail, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import structlog

from llmgw.agent.supervisor import Supervisor, SupervisorError
from llmgw.link.messages import LogLines, LogsCancel, LogsRequest

log = structlog.get_logger()

PIECE_CHARACTERS = 256 * 1024
CROWDED_FRAMES = 32
CROWDED_S = 0.05


class LogReader:
    """Owns one task per reading. All calls on the agent's own loop.

    ``waiting`` says how many frames the stream has not taken yet: an engine that prints faster than the stream
    carries must not fill it, since a stream that is full is given up.
    """

    def __init__(
        self, supervisor: Supervisor, send: Callable[[LogLines], None], waiting: Callable[[], int] = lambda: 0
    ) -> None:
        self._supervisor = supervisor
        self._send = send
        self._waiting = waiting
        self._readings: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that were cancelled and have not ended yet as well."""

    def take(self, frame: LogsRequest | LogsCancel) -> None:
        if isinstance(frame, LogsCancel):
            if task := self._readings.pop(frame.id, None):
                task.cancel()
            return
        if older := self._readings.pop(frame.id, None):
            older.cancel()
        task = asyncio.get_running_loop().create_task(self._read(frame), name=f"logs of {frame.shard}")
        self._readings[frame.id] = task
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(frame.id, done))

    def drop_all(self) -> None:
        """Ends every reading: the session in which they were asked for has ended."""
        for task in self._readings.values():
            task.cancel()
        self._readings.clear()

    async def close(self) -> None:
        self.drop_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _over(self, id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._readings.get(id) is task:
            del self._readings[id]

    async def _read(self, request: LogsRequest) -> None:
        try:
            if request.follow:
                await self._follow(request)
            else:
                lines = await asyncio.to_thread(self._supervisor.tail, request.shard, request.lines)
                await self._say(request.id, lines)
                self._send(LogLines(id=request.id, end=True))
        except SupervisorError as error:
            self._send(LogLines(id=request.id, end=True, error=str(error)))
        except OSError as error:
            self._send(LogLines(id=request.id, end=True, error=f"its output can't be read: {error}"))
        except Exception as error:
            log.exception("a fault of the agent's own", shard=request.shard)
            self._send(LogLines(id=request.id, end=True, error=f"a fault in the agent: {error!r}; see its log"))

    async def _follow(self, request: LogsRequest) -> None:
        async for lines in self._supervisor.follow(request.shard, request.lines):
            await self._say(request.id, lines)
        self._send(LogLines(id=request.id, end=True))

    async def _say(self, id: str, lines: Sequence[str]) -> None:
        for piece in _pieces(lines):
            while self._waiting() >= CROWDED_FRAMES:  # noqa: ASYNC110  (it empties in another thread)
                await asyncio.sleep(CROWDED_S)
            self._send(LogLines(id=id, lines=piece))
            await asyncio.sleep(0)  # others have something to say, too


def _pieces(lines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The lines in pieces that fit into a frame each."""
    piece: list[str] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > PIECE_CHARACTERS:
            yield tuple(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield tuple(piece)
