"""One shard on this node: prepared, started, watched until it is proved, and watched on.

A runner never restarts anything: a shard that failed stays failed, with its reason, until the control plane asks
for a new generation.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from llmgw.agent import ports
from llmgw.agent.install import Program
from llmgw.agent.memory import Remembered
from llmgw.agent.presence import Presence, Rooms
from llmgw.agent.probe import HEALTH_TIMEOUT_S, NoAnswer
from llmgw.agent.supervisor import ProcessSpec, StartError, StopError
from llmgw.agent.weights import WeightsRefused
from llmgw.cluster.model import DesiredShard, Exit, ShardState
from llmgw.engines.base import Command, Engine, EngineUnhealthy, Launch
from llmgw.engines.registry import EngineNotRun, engine

log = structlog.get_logger()

UNHEALTHY_S = 30.0
"""A shard that was ready and gives no healthy answer for this long has failed: it is stopped, and said so."""
PROOF_TIMEOUT_S = 120.0
LOADING_POLL_S = 0.25


class Failed(Exception):
    """The shard can't run; the message says why, for people."""

    def __init__(self, words: str, *, exit: Exit | None = None, port_taken: bool = False) -> None:
        super().__init__(words)
        self.exit = exit
        self.port_taken = port_taken


class ShardRunner(Presence):
    def __init__(self, shard: DesiredShard, rooms: Rooms, report: Callable[[], None], pid: int | None = None) -> None:
        super().__init__(shard.id, shard.generation, rooms, report, pid)
        self.shard = shard
        self._given_up = ""
        """Why its engine is being stopped by the agent itself; empty: it is not."""

    async def start(self) -> None:
        """From nothing until the shard has ended. Never raises for what can go wrong with a shard: it is reported."""
        await self._live(self._start())

    def resume(self, remembered: Remembered) -> Coroutine[None, None, None]:
        """Takes up a shard whose engine outlived an earlier agent: its state at once, its life when it is run."""
        if remembered.proved:
            self._say(ShardState.READY, "adopted: its engine outlived the agent", endpoint=remembered.endpoint)
        else:
            self._say(ShardState.STARTING, "adopted: its engine outlived the agent", endpoint=remembered.endpoint)
        return self._live(self._watch(engine(self.shard.profile.engine), remembered.endpoint, remembered.proved))

    async def recognise(self) -> None:
        """Takes up a shard whose engine outlived an earlier agent, where only the engine was left to tell of it."""
        await self._live(self._recognise())

    async def _recognise(self) -> None:
        endpoint = f"{self._rooms.host()}:{self.shard.placement.port}"
        try:
            await self._remember(endpoint)
        except Failed as failure:
            log.warning("a shard serves on, but an agent to come won't know it", shard=self.id, reason=str(failure))
        self._say(ShardState.STARTING, "adopted: its engine outlived the agent", endpoint=endpoint)
        await self._watch(engine(self.shard.profile.engine), endpoint, False)

    async def _live(self, life: Coroutine[None, None, None]) -> None:
        try:
            await life
        except Failed as failure:
            self._fail(failure)
        except EngineNotRun as refusal:
            self._fail(Failed(str(refusal)))
        except Exception as error:
            # A fault of our own must not leave a shard that says "loading" for ever.
            log.exception("a fault of the agent's own", shard=self.id)
            self._fail(Failed(f"a fault in the agent: {_innermost(error)!r}; see its log"))

    # -- from nothing to a process

    async def _start(self) -> None:
        adapter = engine(self.shard.profile.engine)
        if words := adapter.refusal(self.shard):
            raise Failed(words)
        program = await self._program(adapter)
        weights = await self._weights(adapter)
        host = self._rooms.host()
        await self._require_port(host, self.shard.placement.port)
        command = adapter.command(self._launch(program, host, weights))
        self._say(ShardState.STARTING, "starting the engine", endpoint=command.endpoint)
        await self._remember(command.endpoint)
        pid = await self._spawn(command, program, weights)
        self._say(ShardState.LOADING, "the engine is starting", endpoint=command.endpoint, pid=pid)
        await self._watch(adapter, command.endpoint, False)

    async def _program(self, adapter: Engine) -> Program:
        while True:
            changed = self._rooms.engines_changed()
            if program := self._rooms.installer.program(adapter.name):
                return program
            now = self._rooms.engine_now(adapter.name)
            how = f": {now.state.value}{', ' if now.words else ''}{now.words}" if now is not None else ""
            self._say(ShardState.PREPARING, f"waiting for {adapter.name} on this node{how}")
            await changed.wait()

    async def _require_port(self, host: str, port: int) -> None:
        try:
            words = await asyncio.to_thread(ports.taken, host, port)
        except OSError as error:
            raise Failed(
                f"nothing can listen on {host}: {error.strerror}; is that an address of this node? "
                "(`mgmt_addr` in the agent's file)"
            ) from error
        if words is not None:
            raise Failed(words, port_taken=True)

    async def _remember(self, endpoint: str | None) -> None:
        try:
            await _to_the_end(lambda: self._rooms.memory.remember(self.shard, endpoint))
        except OSError as error:
            raise Failed(f"what was asked can't be written down: {error}") from error

    async def _weights(self, adapter: Engine) -> Path | None:
        if not adapter.needs_weights:
            return None
        if self.shard.source is None:
            raise Failed(f"{adapter.name} needs weights, and the model {self.shard.model} names no source")
        self._say(ShardState.PREPARING, "looking for the weights")
        try:
            return await self._rooms.weights.ensure(
                self.shard.source, lambda words: self._say(ShardState.PREPARING, words)
            )
        except WeightsRefused as refusal:
            raise Failed(f"weights: {refusal}") from refusal

    def _launch(self, program: Program, host: str, weights: Path | None) -> Launch:
        return Launch(
            shard=self.shard,
            program=program.argv,
            host=host,
            weights=str(weights) if weights else None,
            work_dir=str(self._rooms.supervisor.work_dir(self.id)),
            help_text=program.help_text,
            cores=len(os.sched_getaffinity(0)),
        )

    async def _spawn(self, command: Command, program: Program, weights: Path | None) -> int:
        spec = ProcessSpec(
            shard_id=self.id,
            generation=self.generation,
            argv=command.argv,
            env=dict(command.env),
            files=dict(command.files),
            reads=(*program.reads, *([weights] if weights else [])),
        )
        try:
            return (await self._rooms.supervisor.start(spec)).pid
        except StartError as error:
            raise Failed(f"the engine could not be started: {error}") from error

    # -- from a process to its end

    async def _watch(self, adapter: Engine, endpoint: str | None, proved: bool) -> None:
        exit, stuck = Exit(), ""
        try:
            async with asyncio.TaskGroup() as group:
                health = group.create_task(self._healthy_on(adapter, endpoint, proved))
                exit = await self._rooms.supervisor.wait(self.id)
                health.cancel()
        except* StopError as errors:
            stuck = str(_innermost(errors))
        if stuck:
            raise Failed(f"{self._given_up}; {stuck}" if self._given_up else stuck)
        raise Failed(self._given_up or f"the engine {exit}", exit=exit)

    async def _healthy_on(self, adapter: Engine, endpoint: str | None, proved: bool) -> None:
        """Watches until the engine has to be given up on; then stops it."""
        try:
            if not proved:
                await self._prove(adapter, endpoint)
            await self._stay_healthy(adapter, endpoint)
        except Failed as failure:
            # Kept before the stop: whoever waits for the engine's end may see it before this does.
            self._given_up = str(failure)
            log.warning("giving up on a shard", shard=self.id, reason=self._given_up)
            await self._rooms.supervisor.stop(self.id)

    async def _prove(self, adapter: Engine, endpoint: str | None) -> None:
        assert endpoint is not None, "ranks that serve nothing are not placed"
        deadline = time.monotonic() + adapter.starts_slowly_s
        while (words := await self._health(adapter, endpoint)) is not None:
            if time.monotonic() > deadline:
                raise Failed(f"not up after {adapter.starts_slowly_s:g} s: {words}")
            self._say(ShardState.LOADING, words)
            await asyncio.sleep(LOADING_POLL_S)
        self._say(ShardState.LOADING, "loaded; waiting for the answer to a first request")
        probe = adapter.readiness(self.shard)
        try:
            status, body = await self._rooms.client.ask(endpoint, probe, self.shard.api_key, PROOF_TIMEOUT_S)
        except NoAnswer as error:
            raise Failed(f"healthy, but the first request failed: {error}") from error
        if words := adapter.read_readiness(self.shard, status, body):
            raise Failed(words)
        try:
            await _to_the_end(lambda: self._rooms.memory.proved(self.shard))
        except OSError as error:
            # It works all the same; an agent that adopts it will have it prove itself again.
            log.warning("that a shard was proved can't be written down", shard=self.id, reason=str(error))
        self._say(ShardState.READY, "answered its first request")

    async def _stay_healthy(self, adapter: Engine, endpoint: str | None) -> None:
        assert endpoint is not None, "ranks that serve nothing are not placed"
        healthy_at = time.monotonic()
        while True:
            await asyncio.sleep(self._rooms.health_interval_s)
            words = await self._health(adapter, endpoint)
            if words is None:
                healthy_at = time.monotonic()
            elif time.monotonic() - healthy_at > UNHEALTHY_S:
                raise Failed(f"no healthy answer for {UNHEALTHY_S:g} s: {words}")

    async def _health(self, adapter: Engine, endpoint: str) -> str | None:
        try:
            status, body = await self._rooms.client.ask(
                endpoint, adapter.health(), self.shard.api_key, HEALTH_TIMEOUT_S
            )
            return adapter.read_health(status, body)
        except NoAnswer as error:
            return "the engine is starting" if error.refused else str(error)
        except EngineUnhealthy as error:
            if self.observed.state is ShardState.READY:
                return str(error)
            raise Failed(str(error)) from error

    # -- what is said

    def _fail(self, failure: Failed) -> None:
        self._say(ShardState.FAILED, str(failure), exit=failure.exit, port_taken=failure.port_taken, pid=None)


async def _to_the_end(write: Callable[[], None]) -> None:
    """Write in a thread. Whoever is cancelled waits for it, so that nothing is written after a later removal."""
    work = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _innermost(error: BaseException) -> BaseException:
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
