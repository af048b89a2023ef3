"""An engine that was ready and can't be reached any more at the address where it was started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent import vigil
from llmgw.cluster.model import ShardState
from tests.agent.node import clear, free_port, opened, sim


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


async def test_who_was_ready_is_not_said_to_be_starting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has another address now, and nothing listens at the old one: the words name that, and the generation
    fails, so that the next one is started where the node is."""
    monkeypatch.setattr(vigil, "UNHEALTHY_S", 0.3)
    shard = sim()
    async with opened(folder) as node:
        node.want(shard)
        before = await node.one(ShardState.READY)
    (remembered,) = (folder / "work" / "wanted").glob("*.json")
    gone = f"127.0.0.1:{free_port()}"
    text = json.dumps(json.loads(remembered.read_text()))
    assert before.endpoint is not None
    remembered.write_text(text.replace(before.endpoint, gone))
    async with opened(folder) as node:
        node.want(shard)
        failed = await node.one(ShardState.FAILED)
    assert failed.why.startswith(f"no healthy answer for 0.3 s: {gone}: ")
    assert "starting" not in failed.why
