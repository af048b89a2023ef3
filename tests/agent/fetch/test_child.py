"""Programs that the agent runs for a moment: never left behind, however the agent ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgw.agent.fetch.child import ending, run, started

ENV = {"PATH": "/usr/bin:/bin"}
DEADLINE_S = 30.0


async def test_output_and_status() -> None:
    ended = await run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], env=ENV, limit_s=DEADLINE_S)
    assert ended.status == 3
    assert ended.output == "out\nerr\n"
    assert ending(ended.status) == "ended with status 3"


async def test_a_signal() -> None:
    ended = await run(["/bin/sh", "-c", "kill -ILL $$"], env=ENV, limit_s=DEADLINE_S)
    assert ended.status == -signal.SIGILL
    assert ending(ended.status) == "was killed by SIGILL"


async def test_a_program_that_is_not_there_says_so() -> None:
    ended = await run(["/no/such/program"], env=ENV, limit_s=DEADLINE_S)
    assert ended.status == 126
    assert ended.output == "/no/such/program: No such file or directory\n"


async def test_the_environment_is_what_was_given() -> None:
    ended = await run(["/usr/bin/env"], env={"A": "1"}, limit_s=DEADLINE_S)
    assert "A=1" in ended.output.splitlines()
    assert not any(line.startswith("HOME=") for line in ended.output.splitlines())


async def test_the_time_limit_takes_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    ended = await run(["/bin/sh", "-c", script], env=ENV, limit_s=2.0)
    assert ended.status is None
    assert ending(ended.status) == "did not end in time"
    await gone(int((tmp_path / "pid").read_text()))


async def test_what_floods_is_kept_within_bounds() -> None:
    ended = await run(["/bin/sh", "-c", "yes | head -c 5000000"], env=ENV, limit_s=DEADLINE_S)
    assert ended.status == 0
    assert len(ended.output) == 1 << 20


async def test_leaving_the_block_ends_the_program() -> None:
    async with started(["/bin/sleep", "1000"], env=ENV) as process:
        assert alive(process.pid)
    assert not alive(process.pid)


def test_the_agents_death_ends_the_program(tmp_path: Path) -> None:
    code = f"""
import asyncio
from llmgw.agent.fetch.child import started
async def main():
    script = "echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 1000"
    async with started(["/bin/sh", "-c", script], env={{"PATH": "/usr/bin:/bin"}}):
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    agent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        agent.kill()
        agent.wait()
    asyncio.run(gone(int((tmp_path / "pid").read_text())))


async def gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if not alive(pid):
                return
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("status", "words"), [(0, "ended with status 0"), (-99, "was killed by signal 99")])
def test_endings(status: int, words: str) -> None:
    assert ending(status) == words
