"""One program that is there once, and what it has started in its turn."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.process.detached import DetachedSpec, find, new_nonce, start
from llmgw.process.kept import Kept, Program
from tests.cluster.lab import eventually

CODE = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(
        name="it",
        folder=tmp_path / "kept",
        argv=(sys.executable, "-c", CODE),
        env={},
        log_path=tmp_path / "log",
    )
    yield program
    left = Kept(program, print)
    if left.find() and left.pid:
        os.kill(left.pid, signal.SIGKILL)


async def test_it_is_adopted_and_never_doubled(program: Program) -> None:
    kept = Kept(program, print)
    assert await kept.ensure() is False
    pid = kept.pid
    assert pid is not None
    other = Kept(program, print)
    assert await other.ensure() is True
    assert other.pid == pid
    await other.stop(10)
    assert kept.pid is None
    assert await kept.ensure() is False
    assert kept.pid not in (None, pid)
    assert len(list(program.folder.iterdir())) == 1


async def test_it_is_started_again_when_it_ends(program: Program) -> None:
    said: list[str] = []
    told = asyncio.Event()

    def say(words: str) -> None:
        said.append(words)
        told.set()

    kept = Kept(program, say)
    await kept.ensure()
    first = kept.pid
    assert first is not None
    await asyncio.to_thread(eventually, lambda: kept.last_lines() == ["up"], "it has said something")
    keeping = asyncio.ensure_future(kept.keep())
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(30):
        await told.wait()
    await asyncio.to_thread(eventually, lambda: kept.pid not in (None, first), "it runs again")
    assert said == ["it was killed by SIGKILL; starting it again in 0.2 s; its last words: up"]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_what_it_started_outlives_it(tmp_path: Path) -> None:
    """A detached program that a kept one started is not its child to be cleared up."""
    inner_dir = tmp_path / "inner"
    nonce = new_nonce()
    code = f"""
import signal, sys
sys.path[:] = {sys.path!r}
from llmgw.process.detached import DetachedSpec, start
start(DetachedSpec(argv=({sys.executable!r}, "-c", {CODE!r}), env={{}}, cwd="/", nonce={nonce!r},
                   log_path={str(tmp_path / "inner.log")!r}, record_dir={str(inner_dir)!r}))
print("started", flush=True)
signal.pause()
"""
    outer = start(
        DetachedSpec(
            argv=(sys.executable, "-c", code),
            env={},
            cwd="/",
            log_path=str(tmp_path / "outer.log"),
            record_dir=str(tmp_path / "outer"),
            nonce=new_nonce(),
            spares_others=True,
        )
    )
    await asyncio.to_thread(eventually, lambda: "started" in outer.tail(5), "the inner one is started")
    inner = find(inner_dir)
    assert inner is not None
    os.kill(outer.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await outer.wait()
    assert inner.running()
    await inner.stop(10)
    assert not inner.running()
