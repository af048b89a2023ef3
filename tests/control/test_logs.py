"""Output on its way to a reader: in order, whole, and bounded where the reader is slow."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmgw.control import logs as module
from llmgw.control.logs import Logs, LogsUnavailable
from llmgw.link.messages import LogLines, LogsCancel, LogsRequest
from llmgw.link.server import Peer
from tests.control.floor import open_floor


@pytest.fixture
async def peer(tmp_path: Path) -> Peer:
    async with open_floor(tmp_path) as floor:
        return floor.join("n1")


async def request_of(peer: Peer) -> LogsRequest:
    async with asyncio.timeout(10):
        while not isinstance(frame := await peer.outbox.get(), LogsRequest):
            pass
    return frame


async def test_lines_come_in_order_and_the_end_ends(peer: Peer) -> None:
    logs = Logs()
    reading = logs.read(peer, "m-abcde/0", 5, False)
    entering = asyncio.ensure_future(reading.__aenter__())
    request = await request_of(peer)
    assert (request.shard, request.lines, request.follow) == ("m-abcde/0", 5, False)
    for lines in (("a", "b"), (), ("c",)):
        logs.deliver(LogLines(id=request.id, lines=lines))
    logs.deliver(LogLines(id=request.id, end=True))
    logs.deliver(LogLines(id=request.id, lines=("after the end",)))
    logs.deliver(LogLines(id="another", lines=("of another reading",)))
    rest = await entering
    assert [line async for line in rest()] == ["a", "b", "c"]
    await reading.__aexit__(None, None, None)
    assert not logs._readings
    assert len(peer.outbox) == 0


async def test_a_reader_that_is_too_slow_is_told_and_memory_stays_bounded(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_CHARACTERS", 1000)
    logs = Logs()
    async with asyncio.timeout(10):
        reading = logs.read(peer, "m-abcde/0", 5, True)
        entering = asyncio.ensure_future(reading.__aenter__())
        request = await request_of(peer)
        for number in range(100):
            logs.deliver(LogLines(id=request.id, lines=(f"{number:098d}",)))
        rest = await entering
        found = [line async for line in rest()]
        assert [int(line) for line in found[:-1]] == list(range(10))
        assert found[-1] == "[the reader is too slow: ended here]"
        await reading.__aexit__(None, None, None)
        assert await peer.outbox.get() == LogsCancel(id=request.id)


async def test_a_reader_that_keeps_up_reads_on_for_ever(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_CHARACTERS", 1000)
    logs = Logs()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        reading = logs.read(peer, "m-abcde/0", 5, True)
        entering = group.create_task(reading.__aenter__())
        request = await request_of(peer)
        logs.deliver(LogLines(id=request.id, lines=("0",)))
        rest = (await entering)()
        for number in range(200):
            assert await anext(rest) == str(number)
            logs.deliver(LogLines(id=request.id, lines=(str(number + 1),)))
        await reading.__aexit__(None, None, None)


async def test_a_node_that_says_nothing_is_given_up_on(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    logs = Logs()
    with pytest.raises(LogsUnavailable, match="n1 did not answer within"):
        async with logs.read(peer, "m-abcde/0", 5, False):
            pass
    assert not logs._readings
