"""What runs on a node follows what is wanted of it: real engines, started, stopped, adopted and lost sight of."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent import presence, vigil
from llmgw.agent.supervisor import StopError
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import ShardState
from llmgw.link.messages import Desired
from llmgw.process.identity import holders
from tests.agent.node import DEADLINE_S, Node, alive, clear, free_port, opened, sim
from tests.agent.supervisor.conftest import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


def states(node: Node) -> list[str]:
    """Every state that the one shard was reported in, in order."""
    found = [shards[0].state.value for shards in node.told if shards]
    return [state for index, state in enumerate(found) if index == 0 or found[index - 1] != state]


# -- start and stop


async def test_a_shard_is_started_proved_and_stopped(folder: Path) -> None:
    async with opened(folder) as node:
        wanted = sim(load_time_s=0.2)
        node.want(wanted)
        ready = await node.one(ShardState.READY)
        assert ready.endpoint == f"127.0.0.1:{wanted.placement.port}"
        assert ready.why == "answered its first request"
        assert states(node) == ["wanted", "starting", "loading", "ready"]
        assert node.converge.revision == 1
        assert ready.pid is not None
        assert alive(ready.pid)
        node.want()
        await node.none()
        assert not alive(ready.pid)
        assert node.supervisor.running() == ()
        assert not list((folder / "work" / "wanted").iterdir())


async def test_a_newer_generation_begins_when_the_older_is_gone(folder: Path) -> None:
    async with opened(folder) as node:
        port = free_port()
        node.want(sim(1, port=port))
        first = await node.one(ShardState.READY)
        node.want(sim(2, port=port))
        second = await node.one(ShardState.READY, 2)
        assert first.pid is not None
        assert not alive(first.pid)
        assert second.pid != first.pid
        assert "stopping" in states(node)
        # The next one may have been started in between only where the report shows nothing of the first any more.
        generations = [{shard.generation for shard in shards} for shards in node.told]
        assert {1, 2} not in generations


async def test_what_takes_the_place_of_what_ends_is_there_in_the_same_moment(folder: Path) -> None:
    """Whoever is told that a wish was taken up takes what is not there for ended."""
    async with opened(folder) as node:
        port = free_port()
        node.want(sim(1, port=port))
        await node.one(ShardState.READY)
        seen: list[int] = []

        async def look() -> None:
            while all(shard.generation != 2 for shard in node.converge.shards()):
                seen.append(len(node.converge.shards()))
                await asyncio.sleep(0)

        node.want(sim(2, port=port))
        async with asyncio.timeout(DEADLINE_S):
            await look()
        assert set(seen) == {1}


async def test_a_wish_that_changes_while_a_shard_starts_and_stops_ends_where_it_was_last(folder: Path) -> None:
    async with opened(folder) as node:
        port = free_port()
        node.at[ShardState.STARTING] = lambda: node.want()
        node.at[ShardState.STOPPING] = lambda: node.want(sim(3, port=port))
        node.want(sim(1, port=port))
        last = await node.one(ShardState.READY, 3)
        assert [(run.generation, run.pid) for run in node.supervisor.running()] == [(3, last.pid)]


async def test_an_agent_that_is_stopped_during_a_start_leaves_an_engine_that_the_next_takes_up(folder: Path) -> None:
    async with opened(folder) as node:
        node.want(sim(load_time_s=0.3))
        await asyncio.to_thread(eventually, lambda: list((folder / "work" / "processes").glob("*/1/record/*")))
    async with opened(folder) as node:
        assert [shard.state for shard in node.converge.shards()] == [ShardState.STARTING]
        ready = await node.one(ShardState.READY)
        assert ready.generation == 1


async def test_an_agent_that_is_stopped_during_a_stop_leaves_it_to_the_next(folder: Path) -> None:
    async with opened(folder) as node:
        node.want(sim())
        ready = await node.one(ShardState.READY)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGSTOP)  # SIGTERM waits
        node.want()
        await node.one(ShardState.STOPPING)
    async with opened(folder, stop_timeout_s=0.2) as node:
        assert len(node.converge.shards()) == 1
        node.want()
        await node.none()
        assert not alive(ready.pid)


# -- what goes wrong


async def test_a_port_that_somebody_has_is_named_with_its_holder(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        async with opened(folder) as node:
            node.want(sim(port=port))
            failed = await node.one(ShardState.FAILED)
    assert failed.port_taken
    assert failed.why.startswith(f"port {port} is taken by pid {os.getpid()} (")


async def test_an_address_that_is_not_the_nodes_is_no_matter_of_ports(folder: Path) -> None:
    async with opened(folder) as node:
        node.host = "203.0.113.7"
        node.want(sim())
        failed = await node.one(ShardState.FAILED)
    assert not failed.port_taken
    assert "nothing can listen on 203.0.113.7" in failed.why
    assert "mgmt_addr" in failed.why


async def test_an_engine_that_ends_at_once_is_told_with_its_status(folder: Path) -> None:
    async with opened(folder) as node:
        node.want(sim(fault="exit-at-start:3"))
        failed = await node.one(ShardState.FAILED)
        assert failed.exit is not None
        assert failed.exit.status == 3
        assert failed.why == "the engine exited with status 3"
        assert failed.pid is None
        assert not node.supervisor.running()


async def test_an_engine_that_is_given_up_on_is_stopped_and_the_reason_is_kept(folder: Path) -> None:
    async with opened(folder) as node:
        node.want(sim(fault="health-500"))
        failed = await node.one(ShardState.FAILED)
    assert failed.why == "/health answered 500: simulated fault: health-500"
    assert failed.exit is not None
    assert not node.supervisor.running()


async def test_a_ready_engine_that_hangs_is_given_up_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "UNHEALTHY_S", 0.3)
    monkeypatch.setattr(vigil, "HEALTH_TIMEOUT_S", 0.2)
    async with opened(folder, stop_timeout_s=0.2) as node:
        node.want(sim())
        ready = await node.one(ShardState.READY)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGSTOP)
        failed = await node.one(ShardState.FAILED)
    assert failed.why.startswith("no healthy answer for 0.3 s: no answer from 127.0.0.1:")
    assert failed.exit is not None
    assert failed.exit.signal == "SIGKILL"


async def test_a_first_request_that_is_never_answered_is_no_proof(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vigil, "PROOF_TIMEOUT_S", 0.3)
    async with opened(folder) as node:
        node.want(sim(fault="hang"))
        failed = await node.one(ShardState.FAILED)
    assert failed.why.startswith("healthy, but the first request failed: no answer from 127.0.0.1:")
    assert "ready" not in states(node)


async def test_an_engine_that_hangs_in_the_kernel_is_told_and_stopped_again_and_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "STOP_AGAIN_S", 0.05)
    async with opened(folder) as node:
        node.want(sim())
        await node.one(ShardState.READY)
        stop, left = node.supervisor.stop, [StopError("it hangs in the kernel"), OSError(5, "Input/output error")]

        async def stops(shard_id: str) -> object:
            if left:
                raise left.pop()
            return await stop(shard_id)

        monkeypatch.setattr(node.supervisor, "stop", stops)
        node.want()
        await node.until(lambda: "hangs in the kernel" in node.converge.shards()[0].why, "it is said")
        await node.none()
        assert not node.supervisor.running()


async def test_an_engine_that_is_given_up_on_and_does_not_go_has_failed_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as node:
        stop = node.supervisor.stop

        async def hangs(shard_id: str) -> object:
            raise StopError("it was killed and is still there")

        monkeypatch.setattr(node.supervisor, "stop", hangs)
        node.want(sim(fault="health-500"))
        failed = await node.one(ShardState.FAILED)
        monkeypatch.setattr(node.supervisor, "stop", stop)
    assert failed.why == "/health answered 500: simulated fault: health-500; it was killed and is still there"


async def test_a_disk_without_room_for_the_proof_costs_no_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder) as node:

        def full(shard: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(node.memory, "proved", full)
        node.want(sim())
        await node.one(ShardState.READY)


async def test_a_disk_without_room_for_what_was_asked_starts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as node:

        def full(shard: object, endpoint: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(node.memory, "remember", full)
        node.want(sim())
        failed = await node.one(ShardState.FAILED)
        assert failed.why == "what was asked can't be written down: [Errno 28] No space left on device"
        assert not node.supervisor.running()


async def test_what_is_left_of_a_shard_that_can_not_be_removed_holds_up_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as node:
        port = free_port()
        node.want(sim(port=port))
        await node.one(ShardState.READY)

        def broken(shard_id: str) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(node.memory, "forget", broken)
        node.want()
        await node.none()


async def test_an_engine_that_leaves_children_leaves_none(folder: Path) -> None:
    """Those that moved into sessions of their own end with it, and before the next generation begins."""
    async with opened(folder) as node:
        port = free_port()
        node.want(sim(1, port=port, fault="fork"))
        first = await node.one(ShardState.READY)
        assert first.pid is not None
        (run,) = node.supervisor.running()

        def strays() -> list[int]:
            return [process.pid for process in holders(run.nonce) if process.pid != first.pid]

        assert len(strays()) >= 2
        os.kill(first.pid, signal.SIGKILL)
        failed = await node.one(ShardState.FAILED)
        assert failed.exit is not None
        assert failed.exit.signal == "SIGKILL"
        assert strays() == []
        node.want(sim(2, port=port))
        await node.one(ShardState.READY, 2)


# -- adoption


async def test_an_engine_that_outlived_the_agent_is_ready_at_once(folder: Path) -> None:
    """Proved before, it need not prove itself again behind the requests that it serves."""
    async with opened(folder) as node:
        node.want(sim(token_interval_s=0.05))
        before = await node.one(ShardState.READY)
    async with opened(folder) as node:
        (after,) = node.converge.shards()
        assert (after.state, after.pid, after.endpoint) == (ShardState.READY, before.pid, before.endpoint)


@pytest.mark.parametrize("spoil", ["gone", "garbage", "older"])
async def test_an_engine_of_which_nothing_is_remembered_is_kept_until_it_is_recognised(
    folder: Path, spoil: str
) -> None:
    wanted = sim()
    async with opened(folder) as node:
        node.want(wanted)
        before = await node.one(ShardState.READY)
        assert before.pid is not None
    (file,) = (folder / "work" / "wanted").glob("*.json")
    if spoil == "gone":
        file.unlink()
    else:
        file.write_text("{" if spoil == "garbage" else file.read_text().replace('"generation":1', '"generation":9'))
    async with opened(folder) as node:
        (stray,) = node.converge.shards()
        assert (stray.state, stray.generation, stray.pid) == (ShardState.STARTING, 1, before.pid)
        assert "waiting to be told" in stray.why
        node.want(wanted)
        after = await node.one(ShardState.READY)
        assert (after.pid, after.endpoint) == (before.pid, before.endpoint)
    async with opened(folder) as node:  # and is remembered again
        await node.until(lambda: node.converge.shards()[0].state is ShardState.READY, "it is ready")


async def test_the_output_of_what_ended_can_still_be_read_until_there_is_too_much(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.agent.converge.OUTPUTS_KEPT", 1)
    async with opened(folder) as node:
        for name in ("m-aaaaa/0", "m-bbbbb/0"):
            node.want(replace(sim(), id=name))
            await node.one(ShardState.READY)
            node.want()
            await node.none()
            assert any("listening on" in line for line in node.supervisor.tail(name))
        await asyncio.to_thread(eventually, lambda: len(node.supervisor.ended()) == 1)
        assert node.supervisor.ended()[0].shard_id == "m-bbbbb/0"
        monkeypatch.setattr("llmgw.agent.converge.OUTPUT_KEPT_S", 0.0)
        node.want(replace(sim(), id="m-ccccc/0"))
        await node.one(ShardState.READY)
        node.want()
        await asyncio.to_thread(eventually, lambda: node.supervisor.ended() == ())


@pytest.mark.parametrize("next", [None, 2])
async def test_an_engine_of_which_nothing_is_remembered_is_stopped_where_it_is_not_wanted(
    folder: Path, next: int | None
) -> None:
    port = free_port()
    async with opened(folder) as node:
        node.want(sim(port=port))
        before = await node.one(ShardState.READY)
        assert before.pid is not None
    for file in (folder / "work" / "wanted").glob("*.json"):
        file.unlink()
    async with opened(folder) as node:
        if next is None:
            node.want()
            await node.none()
            assert node.supervisor.running() == ()
        else:
            node.want(sim(next, port=port))
            await node.one(ShardState.READY, next)
        assert not alive(before.pid)


@pytest.mark.parametrize("remembered", [True, False])
async def test_an_engine_that_ended_with_nobody_looking_is_told_and_then_cleared_away(
    folder: Path, remembered: bool
) -> None:
    async with opened(folder) as node:
        node.want(sim())
        before = await node.one(ShardState.READY)
        assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    if not remembered:
        for file in (folder / "work" / "wanted").glob("*.json"):
            file.unlink()

    async def ended() -> Node:
        while True:
            node = Node(folder)
            await node.open()
            if node.converge.shards()[0].state is ShardState.FAILED:
                return node
            await node.close()

    async with asyncio.timeout(20):
        node = await ended()
    try:
        (failed,) = node.converge.shards()
        assert failed.why == "the engine killed by SIGKILL while no agent was running"
        assert failed.exit is not None
        assert any("listening on" in line for line in failed.exit.last_lines)
        node.want()
        await node.none()
        assert node.supervisor.running() == ()
        assert not list((folder / "work" / "wanted").iterdir())
    finally:
        await node.close()


async def test_what_was_written_down_and_never_started_is_cleared_away(folder: Path) -> None:
    node = Node(folder)
    node.memory.remember(sim(), "127.0.0.1:1")
    await node.open()
    assert node.converge.shards() == ()
    assert not list((folder / "work" / "wanted").iterdir())
    await node.close()


async def test_a_generation_that_was_started_before_is_refused_in_words(folder: Path) -> None:
    """A control plane with an older view asks for it again: it is told, and nothing runs twice."""
    async with opened(folder) as node:
        port = free_port()
        node.want(sim(1, port=port))
        await node.one(ShardState.READY)
        node.want(sim(2, port=port))
        await node.one(ShardState.READY, 2)
        node.want(sim(1, port=port))
        failed = await node.one(ShardState.FAILED, 1)
        assert "generation 1 of shard m-abcde/0 has been started before" in failed.why
        assert not node.supervisor.running()
        node.want(sim(3, port=port))
        await node.one(ShardState.READY, 3)


# -- engines


async def test_an_engine_that_is_not_there_is_waited_for_in_its_own_words(folder: Path) -> None:
    async with opened(folder) as node:
        wanted = sim()
        wanted = replace(wanted, profile=replace(wanted.profile, engine="llamacpp", sim=None), source="file:///m.gguf")
        engines = (EngineSpec(name="llamacpp", version="b1", source="ftp://host/engine.tar.gz", sha256="0" * 64),)
        node.converge.take(Desired(epoch=1, session=1, revision=1, shards=(wanted,), engines=engines))
        await node.until(
            lambda: any(
                "failed, ftp://host/engine.tar.gz is no source of engines" in shard.why
                for shard in node.converge.shards()
            ),
            "its failure is in the words",
        )
        assert node.converge.shards()[0].state is ShardState.PREPARING
