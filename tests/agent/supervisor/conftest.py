from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from llmgw.agent.supervisor import ProcessSpec, Supervisor
from llmgw.process.errors import RecordError
from llmgw.process.identity import holders
from llmgw.process.record import Record, read_record

DEADLINE_S = 20.0
Found = TypeVar("Found")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and mounts")


def eventually(look: Callable[[], Found], what: str = "it") -> Found:
    """Look until there is something to see; fails after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.005)
    return found


def shell(shard_id: str, generation: int, script: str, **more: Any) -> ProcessSpec:
    return ProcessSpec(shard_id=shard_id, generation=generation, argv=("/bin/sh", "-c", script), **more)


def python(shard_id: str, generation: int, script: str, **more: Any) -> ProcessSpec:
    argv = (sys.executable, "-I", "-S", "-u", "-c", script)
    return ProcessSpec(shard_id=shard_id, generation=generation, argv=argv, **more)


def clear(record: Record | None) -> None:
    while record is not None and (left := holders(record.program.nonce)):
        for process in left:
            with suppress(ProcessLookupError):  # it ended by itself in between
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)


class Agents:
    """Supervisors of one work directory, one after the other. Leaves no engine behind."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.open: list[Supervisor] = []

    def make(self, **more: Any) -> Supervisor:
        fields: dict[str, Any] = {"log_lines": 512, "stop_timeout_s": 10.0, "engine_user": None}
        supervisor = Supervisor(work_dir=self.work_dir, **{**fields, **more})
        self.open.append(supervisor)
        return supervisor

    async def adopted(self, **more: Any) -> Supervisor:
        supervisor = self.make(**more)
        await supervisor.adopt()
        return supervisor

    async def close(self) -> None:
        for supervisor in self.open:
            await supervisor.close()
        for path in self.work_dir.glob("processes/*/*/record"):
            with suppress(RecordError):
                clear(read_record(path))


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[Agents]:
    made = Agents(tmp_path / "agent")
    yield made
    await made.close()


@pytest.fixture
async def supervisor(agents: Agents) -> Supervisor:
    return await agents.adopted()
