from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.supervisor import StartError, Supervisor, SupervisorError, UnknownShard
from llmgw.cluster.model import Exit
from llmgw.process.identity import alive, holders, identify, read_stat

from .conftest import Agents, eventually, python, shell

SHARD = "smol-abcde/0"


async def test_an_engine_runs_and_is_told(supervisor: Supervisor) -> None:
    running = await supervisor.start(shell(SHARD, 3, "echo up; exec sleep 600", note="127.0.0.1:20000"))
    assert (running.shard_id, running.generation, running.note) == (SHARD, 3, "127.0.0.1:20000")
    assert running.argv == ("/bin/sh", "-c", "echo up; exec sleep 600")
    assert supervisor.running() == (running,)
    assert supervisor.ended() == ()
    assert identify(running.pid).nonce == running.nonce
    eventually(lambda: supervisor.tail(SHARD) == ["up"])
    assert await supervisor.stop(SHARD) == Exit(signal="SIGTERM", last_lines=("up",))
    assert supervisor.running() == ()
    assert [(ended.generation, ended.asked, ended.note) for ended in supervisor.ended()] == [
        (3, True, "127.0.0.1:20000")
    ]


async def test_the_environment_is_built_from_nothing(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_TOKEN", "of the agent")
    running = await supervisor.start(shell(SHARD, 1, "exec env", env={"KEY": "secret", "LANG": "C"}))
    assert (await supervisor.wait(SHARD)).status == 0
    assert sorted(supervisor.tail(SHARD)) == [
        f"HOME={supervisor.work_dir(SHARD)}",
        "KEY=secret",
        "LANG=C",
        f"LLMGW_NONCE={running.nonce}",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"PWD={supervisor.work_dir(SHARD)}",  # by sh
        "SPT_NOENV=1",
    ]


async def test_files_are_written_for_it_alone(supervisor: Supervisor) -> None:
    work = supervisor.work_dir(SHARD)
    spec = shell(
        SHARD, 1, "cat key sub/other; stat -c %a key sub/other", files={"key": "k\n", f"{work}/sub/other": "o\n"}
    )
    await supervisor.start(spec)
    assert (await supervisor.wait(SHARD)).status == 0
    assert supervisor.tail(SHARD) == ["k", "o", "600", "600"]


@pytest.mark.parametrize("name", ["../key", "/etc/key", "sub/../../key", ".", ""])
async def test_no_file_is_written_elsewhere(supervisor: Supervisor, agents: Agents, name: str) -> None:
    with pytest.raises(StartError, match="lies outside the shard's work directory"):
        await supervisor.start(shell(SHARD, 1, "exit 0", files={name: "x"}))
    assert supervisor.running() == supervisor.ended() == ()
    assert not list(agents.work_dir.rglob("key"))


async def test_a_link_that_the_engine_left_leads_no_file_astray(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "key").write_text("mine")
    script = f"ln -s {tmp_path}/precious sub; ln -s {tmp_path}/precious/key key"
    await supervisor.start(shell(SHARD, 1, script))
    await supervisor.wait(SHARD)
    with pytest.raises(StartError, match=r"sub|Not a directory|symbolic"):
        await supervisor.start(shell(SHARD, 2, "exit 0", files={"sub/key": "x"}))
    await supervisor.start(shell(SHARD, 2, "cat key", files={"key": "new\n"}))
    await supervisor.wait(SHARD)
    assert supervisor.tail(SHARD) == ["new"]
    assert (tmp_path / "precious" / "key").read_text() == "mine"


async def test_a_shard_runs_once(supervisor: Supervisor) -> None:
    first = await supervisor.start(shell(SHARD, 1, "exec sleep 600"))
    with pytest.raises(
        StartError, match=rf"shard {SHARD} runs already \(generation 1, pid {first.pid}\); stop it before"
    ):
        await supervisor.start(shell(SHARD, 2, "exec sleep 600"))
    assert supervisor.running() == (first,)


async def test_two_starts_at_once_are_one(supervisor: Supervisor) -> None:
    starts = [supervisor.start(shell(SHARD, number, "exec sleep 600")) for number in (1, 2)]
    first, second = await asyncio.gather(*starts, return_exceptions=True)
    assert not isinstance(first, BaseException)
    assert isinstance(second, StartError)
    assert "is being started already" in str(second)
    assert supervisor.running() == (first,)


async def test_a_generation_is_started_once(supervisor: Supervisor) -> None:
    await supervisor.start(shell(SHARD, 1, "exit 0"))
    await supervisor.wait(SHARD)
    with pytest.raises(StartError, match=f"generation 1 of shard {SHARD} has been started before; a restart is a new"):
        await supervisor.start(shell(SHARD, 1, "exit 0"))
    assert (await supervisor.start(shell(SHARD, 2, "exit 0"))).generation == 2


async def test_a_start_that_is_cancelled_is_not_lost_sight_of(supervisor: Supervisor) -> None:
    start = asyncio.ensure_future(supervisor.start(shell(SHARD, 1, "exec sleep 600")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [running.shard_id for running in supervisor.running()] == [SHARD]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 7", Exit(status=7, last_lines=("one", "two"))),
        ("kill -ABRT $$", Exit(signal="SIGABRT", last_lines=("one", "two"))),
        ("kill -KILL $$", Exit(signal="SIGKILL", last_lines=("one", "two"))),
    ],
)
async def test_a_crash_is_reported_with_its_last_lines(supervisor: Supervisor, script: str, expected: Exit) -> None:
    await supervisor.start(shell(SHARD, 1, f"echo one; echo two; {script}"))
    assert await supervisor.wait(SHARD) == expected
    (ended,) = supervisor.ended()
    assert (ended.exit, ended.asked) == (expected, False)
    assert await supervisor.stop(SHARD) == expected


async def test_the_last_fifty_lines_of_an_engine_are_with_its_exit(supervisor: Supervisor) -> None:
    """A traceback through a framework is longer than a screen, and its first line is the one that tells most."""
    await supervisor.start(shell(SHARD, 1, "seq 60; exit 1"))
    expected = Exit(status=1, last_lines=tuple(str(number) for number in range(11, 61)))
    assert await supervisor.wait(SHARD) == expected
    (ended,) = supervisor.ended()
    assert ended.exit == expected


async def test_an_engine_killed_from_outside_is_noticed_at_once(supervisor: Supervisor) -> None:
    running = await supervisor.start(shell(SHARD, 1, "exec sleep 600"))
    waiting = asyncio.ensure_future(supervisor.wait(SHARD))
    await asyncio.sleep(0)
    os.kill(running.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(waiting, 10)).signal == "SIGKILL"


async def test_who_ignores_sigterm_is_killed_with_all_it_started(agents: Agents) -> None:
    supervisor = await agents.adopted(stop_timeout_s=0.3)
    script = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 600; true'])\n"
        "os.write(1, b'up\\n')\n"
        "time.sleep(600)\n"
    )
    running = await supervisor.start(python(SHARD, 1, script))
    eventually(lambda: supervisor.tail(SHARD) == ["up"] and len(holders(running.nonce)) == 4)
    both = await asyncio.gather(supervisor.stop(SHARD), supervisor.stop(SHARD))
    assert [exit.signal for exit in both] == ["SIGKILL", "SIGKILL"]
    assert holders(running.nonce) == ()


async def test_stopping_what_is_not_there_does_nothing(supervisor: Supervisor) -> None:
    assert await supervisor.stop("nobody/0") == Exit()


async def test_who_is_not_known_is_refused_by_name(supervisor: Supervisor) -> None:
    for ask in (supervisor.wait("nobody/0"), anext(aiter(supervisor.follow("nobody/0")))):
        with pytest.raises(UnknownShard, match=r"no shard nobody/0 was started here"):
            await ask
    with pytest.raises(KeyError):
        supervisor.tail("nobody/0")


@pytest.mark.parametrize(
    ("shard_id", "generation", "more", "words"),
    [
        ("..", 1, {}, "'..' can't be the id of a shard"),
        ("", 1, {}, "'' can't be the id of a shard"),
        ("x" * 300, 1, {}, "can't be the id of a shard"),
        (SHARD, 0, {}, "generations count from 1, found 0"),
        (SHARD, 1, {"reads": (Path("weights"),)}, "expected absolute paths, found weights"),
        (SHARD, 1, {"env": {"A": "b\0c"}}, "a NUL byte"),
        (SHARD, 1, {"work_dir": Path("/etc")}, "must lie below"),
        (SHARD, 1, {"reads": (Path("/no/such/weights"),)}, "/no/such/weights"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    supervisor: Supervisor, agents: Agents, shard_id: str, generation: int, more: dict[str, object], words: str
) -> None:
    with pytest.raises(StartError) as refused:
        await supervisor.start(shell(shard_id, generation, "exit 0", **more))
    assert words in str(refused.value)
    assert supervisor.running() == supervisor.ended() == ()
    assert not list(agents.work_dir.glob("processes/*/*/record"))


async def test_a_program_that_is_not_there(supervisor: Supervisor) -> None:
    spec = shell(SHARD, 1, "")
    with pytest.raises(StartError, match="expected the absolute path of a program"):
        await supervisor.start(type(spec)(shard_id=SHARD, generation=1, argv=("llama-server",)))
    with pytest.raises(StartError, match=r"shard smol-abcde/0 was not started: .*/no/llama-server"):
        await supervisor.start(type(spec)(shard_id=SHARD, generation=1, argv=("/no/llama-server",)))
    assert (await supervisor.start(shell(SHARD, 1, "exec sleep 600"))).generation == 1  # the failed one left no trace


async def test_forgetting_leaves_nothing(supervisor: Supervisor, agents: Agents) -> None:
    work = agents.work_dir / "work" / "smol"
    await supervisor.start(shell(SHARD, 1, "exec sleep 600", files={"key": "secret"}, work_dir=work))
    assert (work / "key").exists()
    with pytest.raises(SupervisorError, match="stop it before it is forgotten"):
        await supervisor.forget(SHARD)
    await supervisor.stop(SHARD)
    await supervisor.forget(SHARD)
    await supervisor.forget(SHARD)
    assert supervisor.ended() == ()
    assert not work.exists()
    assert list((agents.work_dir / "processes").iterdir()) == []


async def test_output_of_the_last_generation_is_kept_and_of_the_one_before(
    supervisor: Supervisor, agents: Agents
) -> None:
    for generation in (1, 2, 3, 4):
        await supervisor.start(shell(SHARD, generation, f"echo generation {generation}"))
        await supervisor.wait(SHARD)
    assert supervisor.tail(SHARD) == ["generation 4"]
    kept = {path.parent.name for path in agents.work_dir.glob("processes/*/*/log")}
    assert kept == {"3", "4"}


async def test_no_more_lines_than_the_agents_file_says(agents: Agents) -> None:
    supervisor = await agents.adopted(log_lines=5)
    await supervisor.start(shell(SHARD, 1, "seq 100"))
    assert (await supervisor.wait(SHARD)).last_lines == ("96", "97", "98", "99", "100")
    assert supervisor.tail(SHARD) == supervisor.tail(SHARD, 99) == ["96", "97", "98", "99", "100"]
    assert supervisor.tail(SHARD, 2) == ["99", "100"]
    assert supervisor.tail(SHARD, 0) == []


async def test_following_ends_with_the_engine(supervisor: Supervisor) -> None:
    await supervisor.start(
        shell(SHARD, 1, "echo one; echo two; trap 'echo three; printf four; exit' TERM; sleep 600 & wait")
    )
    eventually(lambda: supervisor.tail(SHARD) == ["one", "two"])
    seen: list[str] = []
    async with asyncio.timeout(20):
        async for lines in supervisor.follow(SHARD, 1):
            seen += lines
            if seen == ["two"]:
                await supervisor.stop(SHARD)
    assert seen == ["two", "three", "four"]
    again = [lines async for lines in supervisor.follow(SHARD, 2)]
    assert again == [["two", "three", "four"]] or again == [["two", "three"], ["four"]]


async def test_twenty_engines_at_once(supervisor: Supervisor) -> None:
    ids = [f"model-{number:05}/0" for number in range(20)]
    running = await asyncio.gather(*(supervisor.start(shell(name, 1, f"echo {name}; exec sleep 600")) for name in ids))
    assert {one.shard_id for one in supervisor.running()} == set(ids)
    assert len({one.pid for one in running}) == 20
    for name in ids:
        eventually(lambda: supervisor.tail(name) == [name])  # noqa: B023
    exits = await asyncio.gather(*(supervisor.stop(name) for name in ids))
    assert {exit.signal for exit in exits} == {"SIGTERM"}
    assert supervisor.running() == ()


async def test_engines_go_before_the_agent_when_memory_runs_out(supervisor: Supervisor) -> None:
    running = await supervisor.start(shell(SHARD, 1, "exec sleep 600"))
    assert Path(f"/proc/{running.pid}/oom_score_adj").read_text() == "200\n"


async def test_starting_before_looking_is_refused(agents: Agents) -> None:
    with pytest.raises(StartError, match="adopt comes first"):
        await agents.make().start(shell(SHARD, 1, "exit 0"))


@pytest.fixture
def bystander() -> Iterator[int]:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


async def test_a_hang_is_told_apart_from_an_end(supervisor: Supervisor, bystander: int) -> None:
    """A stopped engine (SIGSTOP) runs, in every respect but one."""
    running = await supervisor.start(shell(SHARD, 1, "exec sleep 600"))
    os.kill(running.pid, signal.SIGSTOP)
    eventually(lambda: (stat := read_stat(running.pid)) and stat.state == "T")
    assert supervisor.running() == (running,)
    assert alive(identify(running.pid))
    assert read_stat(bystander) is not None
