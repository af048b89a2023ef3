"""Readings of a shard's output: begun, followed, cancelled, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmgw.agent.logs import CROWDED_FRAMES, PIECE_CHARACTERS, LogReader
from llmgw.agent.supervisor import Supervisor
from llmgw.link.messages import LogLines, LogsCancel, LogsRequest
from tests.agent.supervisor.conftest import Agents, eventually, python, shell

SHARD = "m-abcde/0"


class Said:
    def __init__(self) -> None:
        self.frames: list[LogLines] = []
        self._came = asyncio.Event()

    def __call__(self, frame: LogLines) -> None:
        self.frames.append(frame)
        self._came.set()

    async def until_line(self, line: str) -> None:
        async with asyncio.timeout(20):
            while not any(line in frame.lines for frame in self.frames):
                self._came.clear()
                await self._came.wait()

    async def ended(self) -> LogLines:
        async with asyncio.timeout(20):
            while not self.frames or not self.frames[-1].end:
                self._came.clear()
                await self._came.wait()
        return self.frames[-1]


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[Agents]:
    made = Agents(tmp_path / "agent")
    yield made
    await made.close()


@pytest.fixture
async def supervisor(agents: Agents) -> Supervisor:
    return await agents.adopted()


@pytest.fixture
async def reader(supervisor: Supervisor) -> AsyncIterator[tuple[LogReader, Said]]:
    said = Said()
    found = LogReader(supervisor, said)
    yield found, said
    await found.close()


async def test_the_last_lines(supervisor: Supervisor, reader: tuple[LogReader, Said]) -> None:
    await supervisor.start(shell(SHARD, 1, "for n in 1 2 3; do echo $n; done; exec sleep 600"))
    await asyncio.to_thread(eventually, lambda: supervisor.tail(SHARD) == ["1", "2", "3"])
    logs, said = reader
    logs.take(LogsRequest(id="1", shard=SHARD, lines=2))
    assert await said.ended() == LogLines(id="1", end=True)
    assert said.frames[:-1] == [LogLines(id="1", lines=("2", "3"))]


async def test_a_shard_that_was_never_here(reader: tuple[LogReader, Said]) -> None:
    logs, said = reader
    for follow in (False, True):
        said.frames.clear()
        logs.take(LogsRequest(id="1", shard="nobody/0", follow=follow))
        assert (await said.ended()).error == "no shard nobody/0 was started here"


async def test_what_follows_until_its_end(supervisor: Supervisor, reader: tuple[LogReader, Said]) -> None:
    await supervisor.start(shell(SHARD, 1, "echo up; read x; echo down", env={}))
    logs, said = reader
    logs.take(LogsRequest(id="7", shard=SHARD, lines=10, follow=True))
    assert await said.ended() == LogLines(id="7", end=True)
    assert [line for frame in said.frames for line in frame.lines] == ["up", "down"]


async def test_a_reading_that_is_cancelled_ends(supervisor: Supervisor, reader: tuple[LogReader, Said]) -> None:
    await supervisor.start(shell(SHARD, 1, "while :; do echo x; sleep 0.01; done"))
    logs, said = reader
    logs.take(LogsRequest(id="1", shard=SHARD, follow=True))
    await said.until_line("x")
    logs.take(LogsCancel(id="1"))
    logs.take(LogsCancel(id="1"))
    logs.take(LogsCancel(id="never"))
    await nothing_is_left(logs)


async def test_a_session_that_ends_takes_its_readings_with_it(
    supervisor: Supervisor, reader: tuple[LogReader, Said]
) -> None:
    """A control plane that was started again counts from 1 anew, and cancels nothing of what the last one asked."""
    await supervisor.start(shell(SHARD, 1, "while :; do echo x; sleep 0.01; done"))
    logs, said = reader
    logs.take(LogsRequest(id="1", shard=SHARD, follow=True))
    await said.until_line("x")
    logs.drop_all()
    logs.take(LogsRequest(id="1", shard=SHARD, follow=True))
    await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("logs of")] != []
    logs.take(LogsCancel(id="1"))
    await nothing_is_left(logs)


async def test_long_lines_come_in_frames_that_can_be_sent(
    supervisor: Supervisor, reader: tuple[LogReader, Said]
) -> None:
    await supervisor.start(python(SHARD, 1, "for n in range(90): print(str(n % 10) * 15000)"))
    await supervisor.wait(SHARD)
    logs, said = reader
    for follow in (False, True):
        said.frames.clear()
        logs.take(LogsRequest(id="1", shard=SHARD, lines=100, follow=follow))
        await said.ended()
        assert [line[0] for frame in said.frames for line in frame.lines] == [str(n % 10) for n in range(90)]
        assert max(sum(map(len, frame.lines)) for frame in said.frames) <= PIECE_CHARACTERS


async def test_a_stream_that_is_crowded_is_waited_for(supervisor: Supervisor) -> None:
    """An engine that prints without end must not fill the stream: then the node itself would be cut off."""
    await supervisor.start(python(SHARD, 1, "while True: print('x' * 1000)"))
    said, waiting = Said(), list[LogLines]()

    def send(frame: LogLines) -> None:
        waiting.append(frame)
        said(frame)

    logs = LogReader(supervisor, send, lambda: len(waiting))
    logs.take(LogsRequest(id="1", shard=SHARD, lines=100, follow=True))
    try:
        for _ in range(3):
            async with asyncio.timeout(20):
                await asyncio.to_thread(eventually, lambda: len(waiting) == CROWDED_FRAMES)
            waiting.clear()
        assert len(said.frames) <= 4 * CROWDED_FRAMES
    finally:
        await logs.close()
        await supervisor.stop(SHARD)


async def test_one_id_is_one_reading(supervisor: Supervisor, reader: tuple[LogReader, Said]) -> None:
    await supervisor.start(shell(SHARD, 1, "while :; do echo x; sleep 0.01; done"))
    logs, said = reader
    for _ in range(3):
        logs.take(LogsRequest(id="1", shard=SHARD, follow=True))
        await asyncio.sleep(0)
    await said.until_line("x")
    logs.take(LogsCancel(id="1"))
    await nothing_is_left(logs)


async def nothing_is_left(logs: LogReader) -> None:
    left = {task for task in asyncio.all_tasks() if task.get_name().startswith("logs of")}
    async with asyncio.timeout(20):
        await asyncio.gather(*left, return_exceptions=True)
    assert not logs._readings
    assert not logs._tasks
