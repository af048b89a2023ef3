"""What an engine held is free before the next generation starts, whoever was away when it was to stop or ended.

A locked file stands for GPU memory: processes that moved out of the engine's session hold on to it when it is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.cluster.model import ShardState
from tests.agent.node import alive, clear, free_port, opened, sim


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


def is_free(memory: Path) -> bool:
    with memory.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("meanwhile", ["it serves on", "it is killed"])
@pytest.mark.parametrize("wanted", ["the next generation", "nothing, and then the next"])
async def test_stopped_while_the_agent_was_away(folder: Path, meanwhile: str, wanted: str) -> None:
    """An agent that returns clears away first, with all that the engine has left, and starts only then."""
    memory, port = folder / "gpu-memory", free_port()
    async with opened(folder) as node:
        node.want(sim(1, port=port, fault=f"fork:{memory}"))
        before = await node.one(ShardState.READY)
        assert before.pid is not None
    assert not is_free(memory)
    if meanwhile == "it is killed":
        os.kill(before.pid, signal.SIGKILL)
    async with opened(folder) as node:
        free: list[bool] = []
        node.at[ShardState.STARTING] = lambda: free.append(is_free(memory))
        if wanted != "the next generation":
            node.want()
            await node.none()
            assert is_free(memory), "it says that nothing runs here any more"
        node.want(sim(2, port=port))
        after = await node.one(ShardState.READY, 2)
        assert free == [True]
        assert not alive(before.pid)
        assert [run.pid for run in node.supervisor.running()] == [after.pid]
