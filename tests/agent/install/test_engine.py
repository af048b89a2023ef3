"""The real llama-server under the adapter's command lines, from exec to its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from llmgw.cluster.catalog import Profile, Task
from llmgw.cluster.model import DesiredShard, Placement
from llmgw.engines.base import Launch, Probe
from llmgw.engines.registry import engine
from llmgw.engines.tiny_gguf import tiny_gguf

from .conftest import Installed

LLAMA = engine("llamacpp")
DEADLINE_S = 60.0


def shard(task: Task = "generate", **profile: Any) -> DesiredShard:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return DesiredShard(
        id="small-abcde/0",
        generation=1,
        rank=0,
        model="small",
        aliases=("a-first",),
        task=task,
        source=None,
        profile=Profile(name="p", engine="llamacpp", **profile),
        placement=Placement(node="a", port=port),
        api_key="k",
    )


@asynccontextmanager
async def running(
    installed: Installed, wanted: DesiredShard, tmp_path: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, aiohttp.ClientSession, list[str]]]:
    """Starts the shard, waits until it is healthy, and gives the process, a client and what health said meanwhile."""
    weights = tmp_path / "tiny.gguf"
    weights.write_bytes(tiny_gguf())
    command = LLAMA.command(
        Launch(
            shard=wanted,
            program=installed.program.argv,
            host="127.0.0.1",
            weights=str(weights),
            work_dir=str(tmp_path),
            help_text=installed.program.help_text,
        )
    )
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command.argv, env={"PATH": "/usr/bin:/bin", **command.env}, stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(f"http://{command.endpoint}") as http:
            yield process, http, await healthy(process, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def healthy(process: asyncio.subprocess.Process, http: aiohttp.ClientSession) -> list[str]:
    said: list[str] = []
    while True:
        assert process.returncode is None
        try:
            status, body = await ask(http, LLAMA.health())
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.01)
            continue
        words = LLAMA.read_health(status, body)
        if words is None:
            return said
        said.append(words)


async def ask(http: aiohttp.ClientSession, probe: Probe, key: str = "k") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}"}
    async with http.request(probe.method, probe.path, data=probe.body, headers=headers) as answer:
        return answer.status, await answer.read()


async def test_from_loading_to_a_token_to_a_clean_end(installed: Installed, tmp_path: Path) -> None:
    wanted = shard(context=512, parallel=3)
    async with running(installed, wanted, tmp_path) as (process, http, said):
        assert set(said) <= {"loading the model"}
        assert LLAMA.read_readiness(wanted, *await ask(http, LLAMA.readiness(wanted))) is None

        status, body = await ask(http, LLAMA.readiness(wanted), key="wrong")
        assert status == 401
        assert LLAMA.read_readiness(wanted, status, body) == "the first request was answered with 401: Invalid API Key"

        _, body = await ask(http, Probe(method="GET", path="/slots"))
        assert [slot["n_ctx"] for slot in json.loads(body)] == [512, 512, 512]

        _, body = await ask(http, Probe(method="GET", path="/v1/models"))
        assert [model["id"] for model in json.loads(body)["data"]] == ["small"]

        for name in ("small", "a-first"):
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            probe = Probe(method="POST", path="/v1/chat/completions", body=json.dumps(chat).encode())
            status, body = await ask(http, probe)
            assert status == 200
            assert json.loads(body)["model"] == "small"

        probe = LLAMA.metrics()
        assert probe is not None
        assert (await ask(http, probe, key="wrong"))[0] == 401
        status, body = await ask(http, probe)
        assert status == 200
        assert LLAMA.load_metrics is not None
        told = {line.partition(" ")[0] for line in body.decode().splitlines()}
        assert LLAMA.load_metrics.names <= told
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_without_a_context_one_request_may_use_all_of_the_models(installed: Installed, tmp_path: Path) -> None:
    async with running(installed, shard(parallel=2), tmp_path) as (_, http, _):
        _, body = await ask(http, Probe(method="GET", path="/slots"))
        assert [slot["n_ctx"] for slot in json.loads(body)] == [2048, 2048]


async def test_vectors(installed: Installed, tmp_path: Path) -> None:
    wanted = shard("embed", args=("--pooling", "mean"))
    async with running(installed, wanted, tmp_path) as (_, http, _):
        assert LLAMA.read_readiness(wanted, *await ask(http, LLAMA.readiness(wanted))) is None


async def test_vectors_of_a_chat_model_name_what_is_missing(installed: Installed, tmp_path: Path) -> None:
    wanted = shard("embed")
    async with running(installed, wanted, tmp_path) as (_, http, _):
        why = LLAMA.read_readiness(wanted, *await ask(http, LLAMA.readiness(wanted)))
    assert why is not None
    assert '["--pooling", "mean"]' in why


async def test_scores(installed: Installed, tmp_path: Path) -> None:
    wanted = shard("rerank")
    async with running(installed, wanted, tmp_path) as (_, http, _):
        assert LLAMA.read_readiness(wanted, *await ask(http, LLAMA.readiness(wanted))) is None
