"""One shard on this node: prepared, started, watched until it is proved, and watched on.

A runner never restarts anything: a shard that failed stays failed, with its reason, until the control plane asks
for a new generation.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from llmgw.agent import ports
from llmgw.agent.install import Installer, Program
from llmgw.agent.memory import Remembered, ShardMemory
from llmgw.agent.probe import HEALTH_TIMEOUT_S, EngineClient, NoAnswer
from llmgw.agent.supervisor import ProcessSpec, StartError, StopError, Supervisor
from llmgw.agent.weights import WeightsRefused, WeightStore
from llmgw.cluster.model import DesiredShard, Exit, ObservedShard, ShardState
from llmgw.engines.base import Command, Engine, EngineUnhealthy, Launch
from llmgw.engines.registry import EngineNotRun, engine

log = structlog.get_logger()

UNHEALTHY_S = 30.0
"""A shard that was ready and gives no healthy answer for this long has failed: it is stopped, and said so."""
PROOF_TIMEOUT_S = 120.0
LOADING_POLL_S = 0.25
STOP_AGAIN_S = 10.0


class Failed(Exception):
    """The shard can't run; the message says why, for people."""

    def __init__(self, words: str, *, exit: Exit | None = None, port_taken: bool = False) -> None:
        super().__init__(words)
        self.exit = exit
        self.port_taken = port_taken


@dataclass(frozen=True, slots=True)
class Rooms:
    """What runners share on a node."""

    supervisor: Supervisor
    installer: Installer
    weights: WeightStore
    client: EngineClient
    memory: ShardMemory
    host: Callable[[], str]
    """The address that engines listen on: the node's management address."""
    health_interval_s: float
    engines_changed: Callable[[], asyncio.Event]


class ShardRunner:
    def __init__(self, shard: DesiredShard, rooms: Rooms, report: Callable[[], None], pid: int | None = None) -> None:
        self.shard = shard
        self._rooms = rooms
        self._report = report
        self.observed = ObservedShard(
            id=shard.id, generation=shard.generation, state=ShardState.WANTED, since=time.time(), pid=pid
        )

    async def start(self) -> None:
        """From nothing until the shard has ended. Never raises for what can go wrong with a shard: it is reported."""
        await self._live(self._start())

    async def resume(self, remembered: Remembered) -> None:
        """Takes up a shard whose engine outlived an earlier agent."""
        if remembered.proved:
            self._say(ShardState.READY, "adopted: its engine outlived the agent", endpoint=remembered.endpoint)
        else:
            self._say(ShardState.STARTING, "adopted: its engine outlived the agent", endpoint=remembered.endpoint)
        await self._live(self._watch(engine(self.shard.profile.engine), remembered.endpoint, remembered.proved))

    def ended_unseen(self, exit: Exit) -> None:
        """Its engine ended while no agent was looking."""
        self._fail(Failed(f"the engine {exit} while no agent was running", exit=exit))

    async def stop(self) -> None:
        """Stops the engine's whole group; returns when it is gone. The caller cancels and awaits the life first."""
        self._say(ShardState.STOPPING, "stopping: no longer wanted here")
        while True:
            try:
                await self._rooms.supervisor.stop(self.shard.id)
                return
            except StopError as error:
                self._say(ShardState.STOPPING, str(error))
                await asyncio.sleep(STOP_AGAIN_S)

    async def forget(self) -> None:
        """Removes what is left of a shard that is no longer wanted here at all, its output included."""
        await self._rooms.supervisor.forget(self.shard.id)
        self._rooms.memory.forget(self.shard.id)

    async def _live(self, life: Coroutine[None, None, None]) -> None:
        try:
            await life
        except Failed as failure:
            self._fail(failure)
        except EngineNotRun as refusal:
            self._fail(Failed(str(refusal)))
        except Exception as error:
            # A fault of our own must not leave a shard that says "loading" for ever.
            log.exception("a fault of the agent's own", shard=self.shard.id)
            self._fail(Failed(f"a fault in the agent: {error!r}; see its log"))

    # -- from nothing to a process

    async def _start(self) -> None:
        adapter = engine(self.shard.profile.engine)
        if words := adapter.refusal(self.shard):
            raise Failed(words)
        program = await self._program(adapter)
        weights = await self._weights(adapter)
        host = self._rooms.host()
        if words := await asyncio.to_thread(ports.taken, host, self.shard.placement.port):
            raise Failed(words, port_taken=True)
        command = adapter.command(self._launch(program, host, weights))
        self._say(ShardState.STARTING, "starting the engine", endpoint=command.endpoint)
        self._rooms.memory.remember(self.shard, command.endpoint)
        pid = await self._spawn(command, program, weights)
        self._say(ShardState.LOADING, "the engine is starting", endpoint=command.endpoint, pid=pid)
        await self._watch(adapter, command.endpoint, False)

    async def _program(self, adapter: Engine) -> Program:
        while True:
            changed = self._rooms.engines_changed()
            if program := self._rooms.installer.program(adapter.name):
                return program
            self._say(ShardState.PREPARING, f"waiting for {adapter.name} on this node")
            await changed.wait()

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
            work_dir=str(self._rooms.supervisor.work_dir(self.shard.id)),
            help_text=program.help_text,
            cores=len(os.sched_getaffinity(0)),
        )

    async def _spawn(self, command: Command, program: Program, weights: Path | None) -> int:
        spec = ProcessSpec(
            shard_id=self.shard.id,
            generation=self.shard.generation,
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
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._healthy_on(adapter, endpoint, proved))
            exit = await self._rooms.supervisor.wait(self.shard.id)
            health.cancel()
        if health.done() and not health.cancelled() and (words := health.result()):
            raise Failed(words, exit=exit)
        raise Failed(f"the engine {exit}", exit=exit)

    async def _healthy_on(self, adapter: Engine, endpoint: str | None, proved: bool) -> str | None:
        """Watches until the engine has to be given up on; then stops it and returns why."""
        try:
            if not proved:
                await self._prove(adapter, endpoint)
            await self._stay_healthy(adapter, endpoint)
        except Failed as failure:
            log.warning("giving up on a shard", shard=self.shard.id, reason=str(failure))
            await self._rooms.supervisor.stop(self.shard.id)
            return str(failure)
        return None

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
        self._rooms.memory.proved(self.shard)
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

    def _say(self, state: ShardState, why: str, **changes: object) -> None:
        since = self.observed.since if state is self.observed.state else time.time()
        said = replace(self.observed, state=state, why=why, since=since, **changes)  # type: ignore[arg-type]
        if said != self.observed:
            self.observed = said
            self._report()
