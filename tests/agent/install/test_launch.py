"""Shards and versions: each starts with the version that it was placed with, waits for it in words, and keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.install import installer
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import DesiredShard, ShardState
from llmgw.engines.tiny_gguf import tiny_gguf
from llmgw.link.messages import Desired
from tests.agent.node import Node, clear, opened, sim

from .conftest import Installed
from .packing import Archive, behaving, scripted


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
    yield tmp_path
    clear(tmp_path)


def serving(folder: Path, version: str, generation: int = 1) -> DesiredShard:
    shard = sim(generation)
    profile = replace(shard.profile, engine="llamacpp", sim=None, context=256, parallel=1, engine_version=version)
    return replace(shard, profile=profile, source=(folder / "tiny.gguf").as_uri())


def want(node: Node, *shards: DesiredShard, engines: tuple[EngineSpec, ...] = ()) -> None:
    node._revision += 1
    node.converge.take(Desired(epoch=1, session=1, revision=node._revision, shards=shards, engines=engines))


def made(installed: Installed, folder: Path, *versions: str) -> list[Archive]:
    return [scripted(folder, version, behaving(installed.binary, version)) for version in versions]


def folders(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (folder / "engines" / "llamacpp").glob("b*"))


async def test_a_shard_runs_on_its_own_version_and_that_stays_until_it_is_gone(
    installed: Installed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "SWEEP_AGAIN_S", 0.05)
    old, new = made(installed, folder, "b11000", "b11001")
    async with opened(folder) as node:
        first = serving(folder, "b11000")
        want(node, first, engines=(old.spec,))
        ready = await node.one(ShardState.READY)
        assert any("waiting for llamacpp b11000 on this node: " in shard.why for told in node.told for shard in told)
        assert ready.pid is not None
        # The file asks for another one now: it comes beside it, and the shard goes on.
        want(node, first, engines=(new.spec,))
        await node.until(lambda: node.installer.program("llamacpp", "b11001"), "the new one is there")
        assert folders(folder) == ["b11000", "b11001"]
        assert node.converge.shards()[0].pid == ready.pid
        want(node, serving(folder, "b11001", 2), engines=(new.spec,))
        await node.one(ShardState.READY, 2)
        await node.until(lambda: folders(folder) == ["b11001"], "the old one goes")


async def test_what_an_adopted_shard_runs_from_stays(installed: Installed, folder: Path) -> None:
    (old,) = made(installed, folder, "b11000")
    async with opened(folder) as node:
        want(node, serving(folder, "b11000"), engines=(old.spec,))
        ready = await node.one(ShardState.READY)
    async with opened(folder) as node:
        want(node, serving(folder, "b11000"))
        await node.until(lambda: node.converge.revision == 1, "the wish is taken up")
        await node.installer._sweep()
        assert folders(folder) == ["b11000"]
        assert node.converge.shards()[0].pid == ready.pid
        want(node)
        await node.none()


async def test_a_version_that_does_not_work_is_waited_for_in_its_own_words(installed: Installed, folder: Path) -> None:
    (good,) = made(installed, folder, "b11000")
    bad = scripted(folder, "b11001", behaving(installed.binary, "b11001", "echo no such tensor >&2; exit 1"))
    async with opened(folder) as node:
        want(node, serving(folder, "b11001"), engines=(good.spec, bad.spec))
        words = "waiting for llamacpp b11001 on this node: failed, "
        await node.until(
            lambda: any(
                shard.why.startswith(words) and "no such tensor" in shard.why for shard in node.converge.shards()
            ),
            "its own failure is in the words",
        )
        assert node.converge.shards()[0].state is ShardState.PREPARING
        await node.until(lambda: node.installer.program("llamacpp", "b11000"), "the other one works")
        assert node.converge.shards()[0].state is ShardState.PREPARING
