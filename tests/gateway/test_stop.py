"""How a gateway ends: what is in flight finishes, nothing new is taken."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from llmgw.cluster.model import Route
from llmgw.gateway.main import run
from llmgw.gateway.settings import GatewaySettings
from llmgw.gateway.table import TableFile

from .client import Client, ask, request
from .conftest import House, endpoint, table
from .engine import COMPLETION, DONE, Call, Engine, chunk

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from llmgw.gateway.main import run
    from llmgw.gateway.settings import GatewaySettings, Timeouts
    state, port, metrics, drain = sys.argv[1:]
    sys.exit(run(GatewaySettings(
        id="g", state_dir=Path(state), listen_host="127.0.0.1", listen_port=int(port),
        metrics_port=int(metrics), drain_s=float(drain), timeouts=Timeouts(tick_s=0.02, linger_s=0.5),
    )))
    """
)


class Held:
    """An engine's script that sends one event, and the rest when told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.stream()
        await call.piece(chunk("one"))
        await self.go.wait()
        await call.piece(DONE)
        await call.end()


async def test_streams_finish_and_nothing_new_is_taken(house: House) -> None:
    held = Held()
    await house.serve(held, drain_s=30.0)
    busy, idle = await house.client(), await house.client()
    await idle.send(request(b"", method="GET", path="/v1/models"))
    await idle.answer()
    await busy.send(request(ask(stream=True)))
    await busy.head()
    assert await busy.piece() == chunk("one")
    stopping = asyncio.ensure_future(house.gateway.stop())
    assert await idle.ended() == b"", "an idle connection is closed"
    with pytest.raises(OSError):
        await Client.open(house.gateway.port)
    assert not stopping.done()
    held.go.set()
    assert await busy.piece() == DONE
    assert await busy.piece() == b""
    assert await busy.ended() == b"", "its connection ends with its answer"
    async with asyncio.timeout(5):
        await stopping


async def test_a_request_on_its_way_is_sent_elsewhere(house: House) -> None:
    held = Held()
    await house.serve(held, drain_s=30.0)
    busy, late = await house.client(), await house.client()
    await busy.send(request(ask(stream=True)))
    await busy.head()
    raw = request(ask())
    await late.send(raw[:50])
    await house.until(lambda: any(connection._head_bytes for connection in house.gateway.connections))
    stopping = asyncio.ensure_future(house.gateway.stop())
    await house.until(lambda: house.gateway.stopping)
    await late.send(raw[50:])
    answer = await late.answer()
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (503, "stopping", "close")
    assert int(answer.headers["retry-after"]) >= 1
    held.go.set()
    async with asyncio.timeout(5):
        await stopping


async def test_those_that_wait_are_sent_elsewhere(house: House) -> None:
    await house.start(Route(model="m"), drain_s=30.0)
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: len(house.gateway.router.lines["m"].waiting) == 1)
    stopping = asyncio.ensure_future(house.gateway.stop())
    assert (await client.answer()).error["code"] == "stopping"
    async with asyncio.timeout(5):
        await stopping


async def test_beyond_the_limit_streams_are_told(house: House) -> None:
    (engine,) = await house.serve(Held(), drain_s=0.1)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    assert await client.piece() == chunk("one")
    stopping = asyncio.ensure_future(house.gateway.stop())
    assert b'"code":"stopping"' in await client.piece()
    assert await client.piece() == b""
    await stopping
    await engine.calls[0].until_gone()


# The process


@asynccontextmanager
async def process(state: Path, drain_s: float = 30.0) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, int]]:
    """A gateway as a process of its own, serving from the table in ``state``; its ports."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(state), "0", "0", str(drain_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(30):
            while b"gateway ready" not in (line := await child.stdout.readline()):
                assert line, "the gateway ended before it was ready"
        words = dict(word.split("=", 1) for word in _plain(line.decode()).split() if "=" in word)
        yield child, int(words["port"]), int(words["metrics_port"])
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


def _plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


async def test_sigterm(tmp_path: Path) -> None:
    """It serves from the table on disk; at SIGTERM readiness flips, a stream completes, then it exits with 0."""
    held = Held()
    async with Engine(held) as engine:
        TableFile(tmp_path).save(table([Route(model="m", endpoints=(endpoint(engine),))]), time.time())
        async with process(tmp_path) as (child, port, metrics), aiohttp.ClientSession() as http:
            client = await Client.open(port)
            await client.send(request(ask(stream=True)))
            await client.head()
            assert await client.piece() == chunk("one")
            async with http.get(f"http://127.0.0.1:{metrics}/readyz") as response:
                facts = await response.json()
                assert (response.status, facts["table_from_file"]) == (200, True)
                assert "the table kept on disk" in facts["words"]
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while True:
                    async with http.get(f"http://127.0.0.1:{metrics}/readyz") as response:
                        if response.status == 503:
                            break
            held.go.set()
            assert await client.piece() == DONE
            assert await client.piece() == b""
            async with asyncio.timeout(10):
                assert await child.wait() == 0
            await client.close()


async def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    held = Held()
    async with Engine(held) as engine:
        TableFile(tmp_path).save(table([Route(model="m", endpoints=(endpoint(engine),))]), time.time())
        async with process(tmp_path) as (child, port, metrics):
            client = await Client.open(port)
            await client.send(request(ask(stream=True)))
            await client.head()
            assert await client.piece() == chunk("one")
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while True:
                    try:
                        await (await Client.open(port)).close()
                    except OSError:
                        break
            child.send_signal(signal.SIGTERM)
            assert b'"code":"stopping"' in await client.piece()
            async with asyncio.timeout(10):
                assert await child.wait() == 0
            await client.close()
            assert metrics


def test_more_workers_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GatewaySettings(id="g", state_dir=tmp_path, workers=2)) == 1
    words = "llmgw gateway: more than one gateway worker is not built yet; set gateway.workers: 1\n"
    assert capsys.readouterr().err == words


def test_a_state_directory_that_can_not_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(GatewaySettings(id="g", state_dir=tmp_path / "file" / "state")) == 1
    assert "state directory" in capsys.readouterr().err


async def test_it_survives_many_requests_without_leaving_anything(house: House) -> None:
    """Descriptors and counters are back where they were."""

    async def script(call: Call) -> None:
        await call.json(200, COMPLETION)

    await house.serve(script, timeouts={"engine_idle_s": 0.05})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert (await house.ask()).status == 200
    await house.at_rest()
    await house.until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not house.gateway.connections
