"""Sidecars: up before their engine, gone after it; one that fails or ends fails the shard in its own words."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.cluster.model import ShardPeer, ShardState
from llmgw.engines.base import Command, Launch, LaunchRefused
from llmgw.process.identity import holders
from tests.agent.crewed import Crewed, crewed, ends, install, known, shell, sidecar, starts, whole
from tests.agent.node import Node, alive, clear, free_port, opened
from tests.agent.supervisor.conftest import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


@asynccontextmanager
async def manned(adapter: Crewed) -> AsyncIterator[Node]:
    with known(adapter):
        async with opened(adapter.folder) as node:
            install(node)
            yield node


def parts(node: Node) -> list[str]:
    return [run.part for run in node.supervisor.running()]


def pid_of(node: Node, part: str) -> int:
    return next(run.pid for run in node.supervisor.running() if run.part == part)


async def test_sidecars_are_up_before_the_engine_and_gone_after_it(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        node.want(crewed())
        await waits_for(node, "ray")
        assert parts(node) == ["ray", "ray.ready"]
        (folder / "ray-ready").touch()
        ready = await node.one(ShardState.READY)
        assert starts(folder) == ["ray", "metrics", "engine"]
        assert parts(node) == ["ray", "metrics", ""]
        assert ready.pid == pid_of(node, "")
        runs = node.supervisor.running()
        assert len({os.getsid(run.pid) for run in runs}) == 3
        assert "MARK=ray" in environment(pid_of(node, "ray"))
        node.want()
        await node.none()
        assert ends(folder) == ["engine", "metrics", "ray"]
        assert [holders(run.nonce) for run in runs] == [(), (), ()]


async def test_the_program_that_sidecars_are_started_with_comes_from_the_nodes_file(folder: Path) -> None:
    adapter = whole(folder)
    async with manned(adapter) as node:
        node.want(crewed())
        await node.until(lambda: adapter.launches, "it is launched")
    (launch,) = adapter.launches
    assert launch.sidecar_program == (sys.executable, "-I", "-S", "-u", "-c")


class Loading(Crewed):
    def loads_weights(self, rank: int) -> bool:
        return True


async def test_a_model_without_weights_is_for_engines_that_make_them_up(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").touch()
    wanted = replace(crewed(), source=str(model))
    made_up = replace(crewed(2), source=str(model))
    made_up = replace(made_up, profile=replace(made_up.profile, args=("--load-format", "dummy")))
    async with manned(Loading(folder)) as node:
        node.want(wanted)
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith(f"weights: {model} has a config.json, but no weights")
        node.want(made_up)
        await node.one(ShardState.READY, 2)


async def test_a_sidecar_that_ends_at_its_start_fails_the_shard_in_its_own_words(folder: Path) -> None:
    ray = sidecar("ray", folder, "echo starting; echo 'no head at 10.0.0.1:6379'; exit 1", ready_argv=shell("false"))
    async with manned(Crewed(folder, ray)) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray exited with status 1; last lines: starting / no head at 10.0.0.1:6379"
        assert failed.exit is not None
        assert failed.exit.status == 1
        assert node.supervisor.running() == ()
        assert starts(folder) == []
        node.want(crewed(2))  # and the next generation has its own try
        assert (await node.one(ShardState.FAILED, 2)).why == failed.why


async def test_a_sidecar_without_a_check_that_ends_within_a_moment_was_never_up(folder: Path) -> None:
    async with manned(Crewed(folder, sidecar("ray", folder, "sleep 0.2; exit 4"))) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray exited with status 4"
        assert starts(folder) == []


async def test_a_sidecar_that_never_gets_ready_is_given_up_and_stopped(folder: Path) -> None:
    ray = sidecar("ray", folder, ready_argv=shell("echo not yet; exit 1"), ready_within_s=0.7)
    async with manned(Crewed(folder, ray)) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray was not ready within 0.7 s; last lines: ray is up"
        assert node.supervisor.running() == ()
        assert starts(folder) == ["ray"]
        assert ends(folder) == ["ray"]


async def test_a_check_that_hangs_is_no_answer(folder: Path) -> None:
    silent = "trap 'exit 0' TERM; while :; do sleep 0.02; done"
    ray = sidecar("ray", folder, silent, ready_argv=shell("echo looking; exec sleep 600"), ready_within_s=0.7)
    async with manned(Crewed(folder, ray)) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray was not ready within 0.7 s; last lines: looking"
        assert node.supervisor.running() == ()


async def test_a_sidecar_that_can_not_be_run_fails_the_shard(folder: Path) -> None:
    ray = replace(sidecar("ray", folder), argv=("/nowhere/ray", "start"))
    async with manned(Crewed(folder, ray)) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("the sidecar ray could not be started: ")
        assert "/nowhere/ray" in failed.why


async def test_a_launch_that_the_engine_refuses_fails_in_its_words(folder: Path) -> None:
    class Refuses(Crewed):
        def command(self, launch: Launch) -> Command:
            raise LaunchRefused("this node has no Ray: name it in the agent's file")

    async with manned(Refuses(folder)) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "this node has no Ray: name it in the agent's file"


async def test_a_sidecar_that_ends_later_ends_the_engine(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        (folder / "ray-ready").touch()
        node.want(crewed())
        ready = await node.one(ShardState.READY)
        assert ready.pid is not None
        os.kill(pid_of(node, "ray"), signal.SIGKILL)
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray killed by SIGKILL; last lines: ray is up"
        assert not alive(ready.pid)
        assert node.supervisor.running() == ()
        assert ends(folder) == ["engine", "metrics"]


async def test_an_engine_that_ends_ends_its_sidecars(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        (folder / "ray-ready").touch()
        node.want(crewed())
        ready = await node.one(ShardState.READY)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "the engine killed by SIGKILL"
        assert ends(folder) == ["metrics", "ray"]


async def test_an_engine_that_falls_with_its_sidecar_is_not_blamed(folder: Path) -> None:
    """Engines fall with their sidecars and not the other way round, whichever end is seen first."""
    async with manned(whole(folder)) as node:
        (folder / "ray-ready").touch()
        node.want(crewed())
        ready = await node.one(ShardState.READY)
        assert ready.pid is not None
        ray = pid_of(node, "ray")
        os.kill(ray, signal.SIGKILL)
        while alive(ray):
            pass
        os.kill(ready.pid, signal.SIGKILL)
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("sidecar ray killed by SIGKILL")


async def test_a_rank_of_nothing_but_sidecars_lives_as_long_as_they_do(folder: Path) -> None:
    async with manned(Crewed(folder, sidecar("ray", folder), serves=False)) as node:
        shard = replace(crewed(), peers=(ShardPeer(node="n7", address="10.0.0.7"),))
        node.want(shard)
        ready = await node.one(ShardState.READY)
        assert (ready.why, ready.endpoint) == ("runs; rank 0 on n7 answers for the replica", None)
        assert ready.pid == pid_of(node, "ray")
        os.kill(ready.pid, signal.SIGTERM)
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "sidecar ray exited with status 0; last lines: ray is up"


async def test_a_shard_that_is_no_longer_wanted_while_a_sidecar_is_waited_for_is_gone(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        node.want(crewed())
        await waits_for(node, "ray")
        node.want()
        await node.none()
        assert node.supervisor.running() == ()
        assert starts(folder) in (["ray"], [])


async def test_an_engine_that_never_answers_is_given_up_with_its_sidecars_and_its_last_words(folder: Path) -> None:
    (folder / "loading").touch()
    adapter = whole(folder)
    adapter.starts_slowly_s = 0.5
    (folder / "ray-ready").touch()
    async with manned(adapter) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("not up after 0.5 s: ")
        assert "; it says: " in failed.why
        assert ends(folder)[-2:] == ["metrics", "ray"]
        assert node.supervisor.running() == ()


# -- an agent that is killed


@pytest.mark.parametrize(
    "phase", ["waiting for its sidecar ray", "waiting for its sidecar metrics", "loading", "ready"]
)
async def test_an_agent_killed_in_any_phase_of_a_start_is_followed_by_one_that_goes_on(
    folder: Path, phase: str
) -> None:
    port = free_port()
    if phase.startswith("loading"):
        (folder / "loading").touch()
    if phase != "waiting for its sidecar ray":
        (folder / "ray-ready").touch()
    await killed(folder, port, phase)
    (folder / "ray-ready").touch()
    (folder / "loading").unlink(missing_ok=True)
    async with manned(whole(folder)) as node:
        before = {run.part: run.pid for run in node.supervisor.running()}
        assert "ray" in before
        (shard,) = node.converge.shards()
        assert shard.state is not ShardState.FAILED
        node.want(crewed(port=port))
        await node.one(ShardState.READY)
        after = {run.part: run.pid for run in node.supervisor.running()}
        assert {part: pid for part, pid in after.items() if part in before} == {
            part: pid for part, pid in before.items() if part in after
        }
        assert sorted(after) == ["", "metrics", "ray"]
        assert sorted(starts(folder)) == ["engine", "metrics", "ray"]
        node.want()
        await node.none()
        assert ends(folder) == ["engine", "metrics", "ray"]


async def test_what_was_half_started_goes_on_no_sooner_than_it_is_asked_for_in_this_session(folder: Path) -> None:
    port = free_port()
    await killed(folder, port, "waiting for its sidecar ray")
    (folder / "ray-ready").touch()
    async with manned(whole(folder)) as node:
        words = "adopted in the middle of its start: goes on once it is asked for again"
        await node.until(lambda: [shard.why for shard in node.converge.shards()] == [words], words)
        node.want(replace(crewed(port=port), go=False))  # nor before the other ranks can
        await node.until(lambda: node.converge.revision == 1, "what is asked is taken up")
        assert [shard.why for shard in node.converge.shards()] == [words]
        assert "metrics" not in parts(node)
        node.want(crewed(port=port))
        await node.one(ShardState.READY)


async def test_what_was_half_started_and_may_not_join_the_other_ranks_any_more_is_not_started(folder: Path) -> None:
    """The agent was stopped in between, and its file may say other fabrics now."""
    port = free_port()
    await killed(folder, port, "waiting for its sidecar ray")
    (folder / "ray-ready").touch()
    async with manned(whole(folder)) as node:
        wanted = crewed(port=port)
        node.want(replace(wanted, profile=replace(wanted.profile, nodes=2)))
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("rank 0 of 2 was told of 0 ranks")
        assert "engine" not in starts(folder)


async def test_what_was_half_started_and_is_not_wanted_any_more_is_stopped(folder: Path) -> None:
    await killed(folder, free_port(), "waiting for its sidecar ray")
    async with manned(whole(folder)) as node:
        node.want()
        await node.none()
        assert node.supervisor.running() == ()
        assert "engine" not in starts(folder)


@pytest.mark.parametrize(("part", "words"), [("ray", "sidecar ray killed by SIGKILL"), ("", "the engine killed by")])
async def test_a_part_that_ended_while_no_agent_was_looking_ends_the_others(
    folder: Path, part: str, words: str
) -> None:
    (folder / "ray-ready").touch()
    async with manned(whole(folder)) as node:
        node.want(crewed())
        await node.one(ShardState.READY)
        pid = pid_of(node, part)
    os.kill(pid, signal.SIGKILL)
    await dead(pid)
    async with manned(whole(folder)) as node:
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith(words)
        assert node.supervisor.running() == ()


async def test_what_was_half_started_and_fell_over_meanwhile_is_told(folder: Path) -> None:
    port = free_port()
    await killed(folder, port, "waiting for its sidecar ray")
    async with manned(whole(folder)) as node:
        ray = pid_of(node, "ray")
    os.kill(ray, signal.SIGKILL)
    await dead(ray)
    async with manned(whole(folder)) as node:
        node.want(crewed(port=port))
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("sidecar ray killed by SIGKILL")
        assert "engine" not in starts(folder)
        assert node.supervisor.running() == ()


async def killed(folder: Path, port: int, phase: str) -> None:
    """An agent in a process of its own, killed as soon as it says that its shard is so far."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.agent.crewed", str(folder), str(port), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            while phase.encode() not in (line := await process.stdout.readline()):
                assert line, "it ended"
    finally:
        process.kill()
        await process.communicate()


# -- output


async def test_the_output_of_a_shard_has_that_of_its_sidecars_with_their_names(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        (folder / "ray-ready").touch()
        shard = crewed()
        node.want(shard)
        await node.one(ShardState.READY)
        assert node.supervisor.tail(shard.id) == ["[ray] ray is up", "[metrics] metrics is up", "serving"]
        seen: list[str] = []

        async def follow() -> None:
            async for lines in node.supervisor.follow(shard.id, 10):
                seen.extend(lines)

        following = asyncio.ensure_future(follow())
        node.want()
        await node.none()
        await asyncio.wait_for(following, 20)
        assert sorted(seen) == ["[metrics] metrics is up", "[ray] ray is up", "serving"]


async def test_an_output_is_followed_from_the_first_sidecar_on(folder: Path) -> None:
    async with manned(whole(folder)) as node:
        shard = crewed()
        node.want(shard)
        await waits_for(node, "ray")
        seen: list[str] = []

        async def until_it_serves() -> None:
            async for lines in node.supervisor.follow(shard.id, 10):
                seen.extend(lines)
                if "serving" in lines:
                    return

        following = asyncio.ensure_future(until_it_serves())
        (folder / "ray-ready").touch()
        await asyncio.wait_for(following, 20)
        assert seen == ["[ray] ray is up", "[metrics] metrics is up", "serving"]


async def waits_for(node: Node, name: str) -> None:
    words = f"waiting for its sidecar {name}"
    await node.until(lambda: any(shard.why == words for shard in node.converge.shards()), words)
    await asyncio.to_thread(eventually, lambda: f"{name}.ready" in parts(node))


async def dead(pid: int) -> None:
    await asyncio.to_thread(eventually, lambda: not alive(pid))


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")
