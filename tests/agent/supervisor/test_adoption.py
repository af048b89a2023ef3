from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from llmgw.agent.supervisor import StartError, Supervisor, SupervisorError
from llmgw.process.identity import alive, holders
from llmgw.process.record import read_record

from .conftest import DEADLINE_S, Agents, eventually, shell

SHARD = "smol-abcde/0"
COUNTING = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.01; done"

AGENT = """
import asyncio, sys
from pathlib import Path
from llmgw.agent.supervisor import ProcessSpec, Supervisor

async def main():
    supervisor = Supervisor(work_dir=Path(sys.argv[1]), log_lines=512, stop_timeout_s=5, engine_user=None)
    found = await supervisor.adopt()
    print("adopted", *(f"{one.shard_id}={one.pid}" for one in found), flush=True)
    argv = ("/bin/sh", "-c", sys.argv[2])
    while not found:
        found = (await supervisor.start(ProcessSpec(shard_id=sys.argv[3], generation=1, argv=argv, note="n")),)
    print("running", found[0].pid, flush=True)
    async for lines in supervisor.follow(sys.argv[3]):
        print(len(lines), flush=True)

asyncio.run(main())
"""


async def played(work_dir: Path, until_s: float) -> list[str]:
    """An agent in a process of its own, killed with SIGKILL after so many seconds; what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(work_dir), COUNTING, SHARD, stdout=asyncio.subprocess.PIPE
    )
    try:
        await asyncio.wait_for(process.wait(), until_s)
    except TimeoutError:
        process.kill()
    said, _ = await process.communicate()
    return said.decode().splitlines()


async def test_the_engine_outlives_agents_that_are_killed_at_random(agents: Agents) -> None:
    """Also in the middle of its start: there is one engine, or none that will ever run; never two, never a lost one."""
    chance = random.Random(20)
    pids: set[int] = set()
    for _ in range(20):
        said = await played(agents.work_dir, chance.uniform(0.15, 0.9))
        pids |= {int(line.split()[1]) for line in said if line.startswith("running")}
    supervisor = agents.make()
    found = await supervisor.adopt()
    assert len(found) == 1
    assert {found[0].pid} | pids == {found[0].pid}
    before = len(supervisor.tail(SHARD, 10**6))
    eventually(lambda: supervisor.tail(SHARD, 1) and _number(supervisor) > before)
    await supervisor.stop(SHARD)
    lines = _whole_output(agents)
    assert lines == [f"line {number + 1}" for number in range(len(lines))]
    assert holders(found[0].nonce) == ()


def _number(supervisor: Supervisor) -> int:
    return int(supervisor.tail(SHARD, 1)[0].split()[1])


def _whole_output(agents: Agents) -> list[str]:
    (path,) = agents.work_dir.glob("processes/*/1/log/output.log")
    return path.read_text().splitlines()


async def test_what_ran_is_adopted_and_what_ended_is_told(agents: Agents) -> None:
    first = await agents.adopted()
    kept = await first.start(shell("a/0", 4, "echo up; exec sleep 600", note="10.0.0.1:20000"))
    await first.start(shell("b/0", 2, "echo last; exit 9", note="10.0.0.1:20100"))
    eventually(lambda: first.tail("a/0") == ["up"])
    await first.wait("b/0")
    await first.close()
    second = agents.make()
    assert await second.adopt() == (kept,)
    assert second.tail("a/0") == ["up"]
    (ended,) = second.ended()
    assert (ended.shard_id, ended.generation, ended.note, ended.asked) == ("b/0", 2, "10.0.0.1:20100", False)
    assert (ended.exit.status, ended.exit.last_lines) == (9, ("last",))
    assert (await second.wait("b/0")).status == 9
    with pytest.raises(StartError, match="runs already"):
        await second.start(shell("a/0", 5, "exit 0"))
    assert (await second.stop("a/0")).signal == "SIGTERM"


async def test_what_ends_while_no_agent_runs_is_told_with_its_status(agents: Agents) -> None:
    first = await agents.adopted()
    running = await first.start(shell(SHARD, 1, "echo bye; exec sleep 600"))
    eventually(lambda: first.tail(SHARD) == ["bye"])
    await first.close()
    os.kill(running.pid, signal.SIGSEGV)
    eventually(lambda: holders(running.nonce) == ())
    second = agents.make()
    assert await second.adopt() == ()
    (ended,) = second.ended()
    assert (ended.exit.signal, ended.exit.last_lines) == ("SIGSEGV", ("bye",))


async def test_a_restart_of_the_machine_is_an_end_that_nobody_saw(agents: Agents) -> None:
    first = await agents.adopted()
    running = await first.start(shell(SHARD, 1, "echo before; exec sleep 600"))
    eventually(lambda: first.tail(SHARD) == ["before"])
    await first.close()
    _rewrite(agents, boot_id="00000000-0000-4000-8000-000000000000")
    second = agents.make()
    assert await second.adopt() == ()
    (ended,) = second.ended()
    assert str(ended.exit) == "ended unseen"
    assert ended.exit.last_lines == ("before",)
    await second.stop(SHARD)
    assert _alive(running.pid)  # it only looks like ours: never signalled


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"nonce": "0" * 32}], ids=["recycled-pid", "other-nonce"])
async def test_a_process_that_only_looks_like_ours_is_left_alone(agents: Agents, change: dict[str, object]) -> None:
    first = await agents.adopted()
    running = await first.start(shell(SHARD, 1, "exec sleep 600"))
    await first.close()
    kept = read_record(next(agents.work_dir.glob("processes/*/1/record")))
    assert kept is not None
    _rewrite(agents, **{"nonce": "0" * 32, **change})
    second = agents.make()
    assert await second.adopt() == ()
    await second.stop(SHARD)
    assert alive(kept.program)
    assert alive(kept.reaper)
    assert _alive(running.pid)
    os.kill(kept.reaper.pid, signal.SIGUSR1)
    eventually(lambda: not alive(kept.reaper))


def _rewrite(agents: Agents, **change: object) -> None:
    (path,) = agents.work_dir.glob("processes/*/1/record/record.json")
    record = json.loads(path.read_text())
    for who in ("program", "reaper"):
        record[who] |= change
    path.write_text(json.dumps(record))


def _alive(pid: int) -> bool:
    os.kill(pid, 0)
    return True


@pytest.mark.parametrize("garbage", [b"", b"{}", b"{", b"\xff\x00", b"[1]", b'{"program": {"pid": 1}}'])
async def test_garbage_is_skipped_with_a_warning_and_nothing_is_killed(agents: Agents, garbage: bytes) -> None:
    first = await agents.adopted()
    spoilt = await first.start(shell("spoilt/0", 1, "exec sleep 600"))
    sound = await first.start(shell("sound/0", 1, "exec sleep 600"))
    await first.close()
    path = next(agents.work_dir.glob("processes/spoilt*/1/record")) / "record.json"
    kept = path.read_bytes()
    path.write_bytes(garbage)
    second = agents.make()
    assert await second.adopt() == (sound,)
    (warning,) = second.warnings()
    assert "shard spoilt/0, generation 1 makes no sense and is left alone" in warning
    assert str(path) in warning
    assert _alive(spoilt.pid)
    path.write_bytes(kept)


async def test_strange_things_in_the_work_directory_do_no_harm(agents: Agents) -> None:
    processes = agents.work_dir / "processes"
    (processes / "a%2F0" / "1" / "record").mkdir(parents=True)
    (processes / "b%2F0" / "seven").mkdir(parents=True)
    (processes / "a file").write_text("x")
    (processes / "c%2F0").mkdir()
    (processes / "c%2F0" / "1").write_text("a file")
    supervisor = agents.make()
    assert await supervisor.adopt() == ()
    assert supervisor.ended() == ()
    assert (await supervisor.start(shell("a/0", 1, "exec sleep 600"))).generation == 1


async def test_two_agents_do_not_share_a_work_directory(agents: Agents) -> None:
    first = await agents.adopted()
    second = agents.make()
    with pytest.raises(
        SupervisorError, match=rf"is in use by another agent \(pid {os.getpid()}\); stop that one first"
    ):
        await second.adopt()
    await first.close()
    assert await second.adopt() == ()


async def test_an_engine_whose_reaper_was_killed_is_adopted_and_stopped(agents: Agents, tmp_path: Path) -> None:
    """What it writes while it has no reaper is there. It is silent at the kill: what its reaper held would be gone."""
    go, going = tmp_path / "go", tmp_path / "going"
    silent = f"echo line 1; until [ -e {go} ]; do sleep 0.01; done; echo line 2; : >{going}"
    first = await agents.adopted()
    running = await first.start(shell(SHARD, 1, f"{silent}; {COUNTING.replace('i=0', 'i=2')}"))
    eventually(lambda: first.tail(SHARD) == ["line 1"])
    await first.close()
    record = read_record(next(agents.work_dir.glob("processes/*/1/record")))
    assert record is not None
    os.kill(record.reaper.pid, signal.SIGKILL)
    eventually(lambda: not alive(record.reaper))
    go.touch()
    eventually(going.exists, "it writes without a reaper")
    second = agents.make()
    assert await second.adopt() == (running,)
    seen = len(second.tail(SHARD))
    eventually(lambda: len(second.tail(SHARD)) > seen, "output going on")
    exit = await asyncio.wait_for(second.stop(SHARD), DEADLINE_S)
    assert str(exit) == "ended unseen"
    assert holders(running.nonce) == ()
    lines = _whole_output(agents)
    assert lines == [f"line {number + 1}" for number in range(len(lines))]
