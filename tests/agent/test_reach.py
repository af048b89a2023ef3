"""An engine that dials as it starts is started once whom it dials is there; ports that it opens are looked at first."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent import crew
from llmgw.agent.install import Program
from llmgw.agent.launching import beside, launch
from llmgw.agent.reach import reached
from llmgw.cluster.model import ShardState
from llmgw.engines.base import Command, Launch, Listener
from tests.agent.crewed import Crewed, crewed, install, known, sidecar, starts
from tests.agent.node import Node, clear, free_port, opened


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


class Dialling(Crewed):
    """Beside its HTTP port it opens one of its own, and dials another rank's."""

    def __init__(self, folder: Path, *, port: int, own: int) -> None:
        super().__init__(folder, sidecar("rpc", folder))
        self.listener = Listener(who="rank 1 on n2", host="127.0.0.1", port=port)
        self.own = own
        self.worker_programs = ("a-worker", "worker")

    def command(self, launch: Launch) -> Command:
        return replace(super().command(launch), waits_for=(self.listener,), listens=(self.own,))


@asynccontextmanager
async def manned(adapter: Dialling) -> AsyncIterator[Node]:
    with known(adapter):
        async with opened(adapter.folder) as node:
            install(node)
            yield node


def listening(port: int) -> socket.socket:
    there = socket.create_server(("127.0.0.1", port))
    there.listen()
    return there


async def until_it_waits(node: Node) -> None:
    await node.until(lambda: any("waiting for rank 1" in shard.why for shard in node.converge.shards()), "it waits")


async def test_the_engine_is_started_once_the_other_rank_takes_connections(folder: Path) -> None:
    port = free_port()
    async with manned(Dialling(folder, port=port, own=free_port())) as node:
        node.want(crewed())
        await until_it_waits(node)
        (shard,) = node.converge.shards()
        assert shard.why == f"waiting for rank 1 on n2 at 127.0.0.1:{port}: Connection refused"
        assert starts(folder) == ["rpc"]
        with listening(port):
            await node.one(ShardState.READY)
        assert starts(folder) == ["rpc", "engine"]
        node.want()
        await node.none()


async def test_a_rank_that_never_comes_fails_the_shard_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "REACHED_WITHIN_S", 0.5)
    port = free_port()
    async with manned(Dialling(folder, port=port, own=free_port())) as node:
        node.want(crewed())
        failed = await node.one(ShardState.FAILED)
        words = f"rank 1 on n2 at 127.0.0.1:{port} could not be reached within 0.5 s: Connection refused"
        assert failed.why == words
        assert node.supervisor.running() == ()


async def test_a_sidecar_that_ends_meanwhile_is_what_failed(folder: Path) -> None:
    async with manned(Dialling(folder, port=free_port(), own=free_port())) as node:
        node.want(crewed())
        await until_it_waits(node)
        (run,) = node.supervisor.running()
        os.kill(run.pid, signal.SIGKILL)
        failed = await node.one(ShardState.FAILED)
        assert failed.why.startswith("sidecar rpc killed by SIGKILL")


async def test_a_port_beside_the_endpoint_that_is_taken_moves_the_replica_on(folder: Path) -> None:
    """Its engine would say so with status 0, or not at all."""
    own = free_port()
    with listening(own):
        async with manned(Dialling(folder, port=free_port(), own=own)) as node:
            node.want(crewed())
            failed = await node.one(ShardState.FAILED)
    assert failed.port_taken
    assert f"port {own}" in failed.why
    assert starts(folder) == []


async def test_an_agent_that_comes_back_in_between_does_not_mind_what_it_started_itself(folder: Path) -> None:
    port, own = free_port(), free_port()
    adapter = Dialling(folder, port=port, own=own)
    wanted = crewed()
    async with manned(adapter) as node:
        node.want(wanted)
        await until_it_waits(node)
    with listening(own), listening(port):  # The first as its sidecar has it.
        async with manned(adapter) as node:
            node.want(wanted)
            await node.one(ShardState.READY)
            assert starts(folder) == ["rpc", "engine"]
            node.want()
            await node.none()


async def test_whoever_does_not_answer_is_said_as_the_system_says_it() -> None:
    port = free_port()
    assert await reached(Listener(who="x", host="127.0.0.1", port=port)) == "Connection refused"
    with listening(port):
        assert await reached(Listener(who="x", host="127.0.0.1", port=port)) == ""


# -- what a launch is told


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"worker": 0o755}, "worker"),
        ({"worker": 0o755, "a-worker": 0o755}, "a-worker"),
        ({"worker": 0o644}, None),
        ({}, None),
    ],
)
def test_the_other_program_is_found_beside_the_engines_own(
    tmp_path: Path, there: dict[str, int], found: str | None
) -> None:
    for name, mode in there.items():
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    program = Program(argv=(str(tmp_path / "server"),), version="1", help_text="", reads=())
    expected = (str(tmp_path / found),) if found else ()
    assert beside(program, ("a-worker", "worker")) == expected


async def test_a_launch_knows_how_much_there_is_to_load_and_what_the_node_has(folder: Path) -> None:
    model = folder / "model" / "part"
    model.mkdir(parents=True)
    (model / "a").write_bytes(bytes(1000))
    (model.parent / "b").write_bytes(bytes(24))
    adapter = Dialling(folder, port=1, own=2)
    async with manned(adapter) as node:
        rooms = node.converge._rooms
        program = Program(argv=("/e/server",), version="7", help_text="", reads=())
        of_folder = await launch(adapter, crewed(), rooms, program, model.parent)
        of_file = await launch(adapter, crewed(), rooms, program, model / "a")
        of_none = await launch(adapter, crewed(), rooms, program, None)
        assert [made.weights_bytes for made in (of_folder, of_file, of_none)] == [1024, 1000, 0]
        assert of_folder.node_memory_bytes == node.inventory.memory_bytes
        assert of_folder.worker_program == ()
