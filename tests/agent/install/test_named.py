"""Programs that the agent's file names: proved, told of, and never replaced by anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.agent.install import keeper
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import EngineState

from .conftest import Installed
from .node import Engines, running
from .packing import behaving

SPEC = EngineSpec(name="llamacpp", version="b10068", source="index")


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


async def test_a_named_binary_is_proved_and_stands_in_for_every_version(installed: Installed, tmp_path: Path) -> None:
    program = script(tmp_path / "mine", behaving(installed.binary, "b10216"))
    engines = Engines(tmp_path, named={"llamacpp": program})
    await engines.installer.probe()
    found = engines.now("b10068")
    assert found is not None
    assert (found.usable, found.named, found.version) == (True, True, "b10216")
    assert f"engines.llamacpp.bin in the agent's file names {program}" in found.words
    assert engines.program("b10068").argv == engines.program().argv == (str(program),)
    async with running(engines):
        engines.installer.take([SPEC])
        await engines.until(lambda: "the cluster asks for b10068" in engines.words, "the difference is said")
        assert engines.said[-1].usable
    assert engines.folders() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not there"),
        ("exit 1", "--version ended with status 1"),
        ("echo hello", "does not name --port: it is no llamacpp server"),
        ("kill -ILL $$", "was killed by SIGILL"),
    ],
)
async def test_a_named_binary_that_does_not_work_is_no_engine(text: str | None, words: str, tmp_path: Path) -> None:
    program = tmp_path / "mine" if text is None else script(tmp_path / "mine", text)
    engines = Engines(tmp_path, named={"llamacpp": program})
    await engines.installer.probe()
    found = engines.now()
    assert found is not None
    assert (found.state, found.named) == (EngineState.FAILED, True)
    assert words in found.words
    assert str(program) in found.words
    assert engines.installer.program("llamacpp") is None
    assert await engines.installer.ensure(SPEC) is EngineState.FAILED


async def test_a_named_binary_must_be_a_program(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    for path, words in ((plain, f"is not executable: chmod +x {plain}"), (tmp_path, "is not a file")):
        engines = Engines(tmp_path, named={"llamacpp": path})
        await engines.installer.probe()
        assert words in engines.words


async def test_a_named_binary_that_was_mended_counts_soon_after(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(keeper, "RETRY_MOST_S", 0.05)
    program = script(tmp_path / "mine", "exit 1")
    engines = Engines(tmp_path, named={"llamacpp": program})
    async with running(engines):
        await engines.until(lambda: "next try in" in engines.words, "it does not work")
        script(program, behaving(installed.binary, "b10216"))
        await engines.until(lambda: engines.usable("b10216"), "it works")
        program.unlink()
        await engines.installer.probe()
        await engines.until(lambda: not engines.usable("b10216"), "and it does no longer")
