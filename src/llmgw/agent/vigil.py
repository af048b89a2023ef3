"""Watches an engine that runs: until it has proved that it works, and on; or a rank that nobody asks anything."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence

import structlog

from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.load import LoadReader
from llmgw.agent.presence import Failed, Rooms
from llmgw.agent.probe import HEALTH_TIMEOUT_S, NoAnswer
from llmgw.agent.supervisor import SupervisorError
from llmgw.cluster.model import DesiredShard, Load, ShardState
from llmgw.engines.base import Engine, EngineUnhealthy

log = structlog.get_logger()

UNHEALTHY_S = 30.0
"""A shard that was ready and gives no healthy answer for this long has failed: it is stopped, and said so."""
PROOF_TIMEOUT_S = 300.0
"""Engines compile at their first request: vLLM took 76 s on a processor that others used too."""
LOADING_POLL_S = 0.25
OUTPUT_POLL_S = 1.0
SETTLED_S = 1.0
"""A rank that serves nothing is up once it has run for so long: how the others find it shows at rank 0."""

_LINES_LOOKED_AT = 20
_LINE_CHARACTERS = 200
_NOT_TELLING = re.compile(r"\bGET /\S+")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Vigil:
    """``say`` is how the shard's state is told, ``ready`` whether it was told to be ready."""

    def __init__(
        self, adapter: Engine, shard: DesiredShard, rooms: Rooms, say: Callable[..., None], ready: Callable[[], bool]
    ) -> None:
        self._adapter = adapter
        self._shard = shard
        self._rooms = rooms
        self._say = say
        self._ready = ready
        self._load = LoadReader(adapter, shard, rooms.client)
        self.on_load: Callable[[Load | None], None] = lambda load: None
        """Hears how busy the engine is, at each look at its health."""

    async def keep(self, endpoint: str | None, proved: bool) -> None:
        """Returns never. Raises Failed when the engine has to be given up on."""
        if endpoint is None:
            await self._settle(proved)
        else:
            if not proved:
                await self._prove(endpoint)
            await self._stay_healthy(endpoint)

    async def _settle(self, proved: bool) -> None:
        if not proved:
            await asyncio.sleep(SETTLED_S)
            await self._write_proof()
            leader = f"rank 0 on {self._shard.peers[0].node}" if self._shard.peers else "rank 0"
            self._say(ShardState.READY, f"runs; {leader} answers for the replica")
        await asyncio.Event().wait()

    async def _prove(self, endpoint: str) -> None:
        deadline = time.monotonic() + self._adapter.starts_slowly_s
        output, looked_at = "", 0.0
        while (words := await self._health(endpoint)) is not None:
            if (now := time.monotonic()) > looked_at + OUTPUT_POLL_S:
                output, looked_at = await self._output(), now
            words = f"{words}; it says: {output}" if output else words
            if now > deadline:
                raise Failed(f"not up after {self._adapter.starts_slowly_s:g} s: {words}")
            self._say(ShardState.LOADING, words)
            await asyncio.sleep(LOADING_POLL_S)
        self._say(ShardState.LOADING, "loaded; waiting for the answer to a first request")
        probe = self._adapter.readiness(self._shard)
        try:
            status, body = await self._rooms.client.ask(endpoint, probe, self._shard.api_key, PROOF_TIMEOUT_S)
        except NoAnswer as error:
            raise Failed(f"healthy, but the first request failed: {error}") from error
        if words := self._adapter.read_readiness(self._shard, status, body):
            raise Failed(words)
        await self._write_proof()
        self._say(ShardState.READY, "answered its first request")

    async def _write_proof(self) -> None:
        try:
            await in_thread(lambda _: self._rooms.memory.proved(self._shard))
        except OSError as error:
            # It works all the same; an agent that adopts it will have it prove itself again.
            log.warning("that a shard was proved can't be written down", shard=self._shard.id, reason=str(error))

    async def _stay_healthy(self, endpoint: str) -> None:
        healthy_at = time.monotonic()
        while True:
            await asyncio.sleep(self._rooms.health_interval_s)
            words = await self._health(endpoint)
            self.on_load(await self._load.look(endpoint) if words is None else None)
            if words is None:
                healthy_at = time.monotonic()
            elif time.monotonic() - healthy_at > UNHEALTHY_S:
                raise Failed(f"no healthy answer for {UNHEALTHY_S:g} s: {words}")

    async def _health(self, endpoint: str) -> str | None:
        try:
            status, body = await self._rooms.client.ask(
                endpoint, self._adapter.health(), self._shard.api_key, HEALTH_TIMEOUT_S
            )
            return self._adapter.read_health(status, body)
        except NoAnswer as error:
            return "the engine is starting" if error.refused and not self._ready() else str(error)
        except EngineUnhealthy as error:
            if self._ready():
                return str(error)
            raise Failed(str(error)) from error

    async def _output(self) -> str:
        """What it said last: while the ranks look for one another, whom it waits for."""
        try:
            lines = await asyncio.to_thread(self._rooms.supervisor.tail, self._shard.id, _LINES_LOOKED_AT)
        except (SupervisorError, OSError):
            return ""
        return telling(lines)


def telling(lines: Sequence[str]) -> str:
    """The last line that tells something, for a status of one line; empty where there is none."""
    for line in reversed(lines):
        # Of a progress bar that redraws itself, what it showed last.
        clean = _CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]).strip()
        if clean and not _NOT_TELLING.search(clean):
            return clean if len(clean) <= _LINE_CHARACTERS else clean[: _LINE_CHARACTERS - 1] + "…"
    return ""
