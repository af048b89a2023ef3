"""An engine that comes to a node while its agent runs: told over the stream, and logged with what was before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llmgw.agent.install import keeper
from llmgw.cluster.model import EngineState
from llmgw.config import AgentConfig
from llmgw.config.agent import LlamacppOnNode
from tests.agent.test_agent import config, pki, running, serving
from tests.link.ends import Pki

from .conftest import Installed

__all__ = ["config", "pki"]


async def test_an_engine_that_appears_is_told_without_a_restart(
    installed: Installed,
    pki: Pki,
    config: AgentConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(keeper, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(keeper, "RETRY_MOST_S", 0.05)
    program = tmp_path / "llama-server"
    config = replace(config, engines=replace(config.engines, llamacpp=LlamacppOnNode(bin=program)))

    async with serving(pki) as (server, ledger):

        def told() -> list[EngineState]:
            return [engine.state for engine in ledger.engines if engine.name == "llamacpp" and engine.named]

        async with running(config, server):
            await ledger.until(lambda: told() == [EngineState.FAILED], "it is told not to work")
            with capture_logs() as logs:
                program.symlink_to(installed.binary)
                await ledger.until(lambda: told() == [EngineState.INSTALLED], "it is told to be there")
    changes = [(line["old"], line["new"]) for line in logs if line["event"] == "engine"]
    assert changes[-1][1].endswith(" installed")
    assert changes[-1][0] is not None
