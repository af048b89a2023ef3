"""One shard on this node: prepared, started once all ranks can be, watched until it is proved, and watched on.

A runner never restarts anything: a shard that failed stays failed, with its reason, until the control plane asks
for a new generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from llmgw.agent import peers, ports
from llmgw.agent.crew import Crew
from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.install import Program
from llmgw.agent.launching import launch
from llmgw.agent.memory import Remembered
from llmgw.agent.presence import Failed, Presence, Rooms
from llmgw.agent.supervisor import StopError
from llmgw.agent.vigil import Vigil
from llmgw.agent.weights import WeightsRefused
from llmgw.cluster.model import DesiredShard, Load, ShardState
from llmgw.engines.base import Engine, LaunchRefused
from llmgw.engines.openai import reads_other_files
from llmgw.engines.registry import EngineNotRun, engine
from llmgw.process.errors import ProcessError

log = structlog.get_logger()

ADOPTED = "adopted: its engine outlived the agent"


class ShardRunner(Presence):
    def __init__(self, shard: DesiredShard, rooms: Rooms, report: Callable[[], None], pid: int | None = None) -> None:
        super().__init__(shard.id, shard.generation, rooms, report, pid)
        self.shard = shard
        self._crew = Crew(rooms.supervisor, shard.id, shard.generation)
        self._go = asyncio.Event()
        """Set once the control plane has said, in this session, that this generation may start."""
        self._before_start = ShardState.PREPARING
        self._given_up = ""
        """Why its engine is being stopped by the agent itself; empty: it is not."""

    def take(self, shard: DesiredShard) -> None:
        self.shard = shard
        if shard.go:
            self._go.set()

    async def start(self) -> None:
        """From nothing until the shard has ended. Never raises for what can go wrong with a shard: it is reported."""
        await self._live(self._start())

    def resume(self, remembered: Remembered) -> Coroutine[None, None, None]:
        """Takes up a shard whose engine outlived an earlier agent: its state at once, its life when it is run."""
        state = ShardState.READY if remembered.proved else ShardState.STARTING
        self._say(state, ADOPTED, endpoint=remembered.endpoint)
        return self._live(self._go_on(remembered.endpoint, remembered.proved))

    async def recognise(self) -> None:
        """Takes up a shard whose engine outlived an earlier agent, where only the engine was left to tell of it."""
        await self._live(self._recognise())

    async def _live(self, life: Coroutine[None, None, None]) -> None:
        try:
            await life
        except Failed as failure:
            await self._fail(failure)
        except (EngineNotRun, LaunchRefused) as refusal:
            await self._fail(Failed(str(refusal)))
        except Exception as error:
            # A fault of our own must not leave a shard that says "loading" for ever.
            log.exception("a fault of the agent's own", shard=self.id)
            await self._fail(Failed(f"a fault in the agent: {_innermost(error)!r}; see its log"))

    # -- from nothing to processes

    async def _start(self) -> None:
        adapter = engine(self.shard.profile.engine)
        self._require_fit(adapter)
        program = await self._program(adapter)
        weights = await self._weights(adapter)
        await self._require_ports()
        await self._require_gpus()
        if not self.shard.go:
            self._say(ShardState.PREPARING, "prepared: waits for the other ranks", prepared=True)
            await self._go.wait()
            self._require_fit(adapter)
            await self._require_ports()
            await self._require_gpus()
        await self._bring_up(adapter, program, weights)

    async def _bring_up(self, adapter: Engine, program: Program, weights: Path | None) -> None:
        command = adapter.command(await launch(adapter, self.shard, self._rooms, program, weights))
        if self._crew.untouched:
            for port in command.listens:
                await self._require_port(self._rooms.host(), port)
        self._say(ShardState.STARTING, "starting the engine", endpoint=command.endpoint, prepared=False)
        await self._remember(command.endpoint)
        reads = (*program.reads, *([weights] if weights else []))
        await self._rooms.exposure.settled()
        pid = await self._crew.start(command, reads, lambda words: self._say(ShardState.STARTING, words))
        self._say(ShardState.LOADING, "the engine is starting", endpoint=command.endpoint, pid=pid)
        await self._watch(adapter, command.endpoint, False)

    def _require_fit(self, adapter: Engine) -> None:
        words = adapter.refusal(self.shard) or peers.refusal(self.shard, self._rooms.inventory(), self._rooms.host())
        if words:
            raise Failed(words)

    async def _program(self, adapter: Engine) -> Program:
        installer, version = self._rooms.installer, self.shard.profile.engine_version
        while True:
            changed = self._rooms.engines_changed()
            if program := installer.program(adapter.name, version):
                return program
            now = installer.state(adapter.name, version)
            how = f": {now.state.value}{', ' if now.words else ''}{now.words}" if now is not None else ""
            what = f"{adapter.name} {version}" if version else adapter.name
            self._say(self._before_start, f"waiting for {what} on this node{how}")
            await changed.wait()

    async def _require_ports(self) -> None:
        """Rank 0's alone: those that the other ranks use, or their engine's sidecars, are known with the command."""
        if self.shard.rank != 0:
            return
        host = self._rooms.host()
        await self._require_port(host, self.shard.placement.port)
        if self.shard.dist_init is not None:
            await self._require_port(host, int(self.shard.dist_init.rpartition(":")[2]))

    async def _require_gpus(self) -> None:
        """What ran on them before may be gone, and the driver not done with giving their memory back."""
        memory = self._rooms.gpu_memory
        give_up_at = time.monotonic() + memory.wait_s
        while words := await memory.in_use(self.shard.placement):
            if time.monotonic() >= give_up_at:
                raise Failed(f"{words}, after a wait of {memory.wait_s:.0f} s: end what holds it (see nvidia-smi)")
            self._say(self._before_start, f"waiting for its GPUs to become free: {words}")
            await asyncio.sleep(memory.ask_every_s)

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
            await in_thread(lambda _: self._rooms.memory.remember(self.shard, endpoint))
        except OSError as error:
            raise Failed(f"what was asked can't be written down: {error}") from error

    async def _weights(self, adapter: Engine) -> Path | None:
        if not adapter.loads_weights(self.shard.rank):
            return None
        if self.shard.source is None:
            raise Failed(f"{adapter.name} needs weights, and the model {self.shard.model} names no source")
        self._say(self._before_start, "looking for the weights")
        try:
            return await self._rooms.weights.ensure(
                self.shard.source,
                lambda words: self._say(self._before_start, words),
                described_only=reads_other_files(self.shard.profile.args),
            )
        except WeightsRefused as refusal:
            raise Failed(f"weights: {refusal}") from refusal

    # -- from what an earlier agent left

    async def _go_on(self, endpoint: str | None, proved: bool) -> None:
        """Where the engine was started, all of the start was done; where not, it goes on once it is wanted still."""
        adapter = engine(self.shard.profile.engine)
        if self._crew.engine is not None or proved:
            await self._watch(adapter, endpoint, proved)
            return
        self._before_start = ShardState.STARTING
        self._say(ShardState.STARTING, "adopted in the middle of its start: goes on once it is asked for again")
        await self._go.wait()
        self._require_fit(adapter)
        await self._bring_up(adapter, await self._program(adapter), await self._weights(adapter))

    async def _recognise(self) -> None:
        serves = self.shard.rank == 0
        endpoint = f"{self._rooms.host()}:{self.shard.placement.port}" if serves else None
        try:
            await self._remember(endpoint)
        except Failed as failure:
            log.warning("a shard serves on, but an agent to come won't know it", shard=self.id, reason=str(failure))
        self._say(ShardState.STARTING, ADOPTED, endpoint=endpoint)
        await self._go_on(endpoint, False)

    # -- from processes to their end

    async def _watch(self, adapter: Engine, endpoint: str | None, proved: bool) -> None:
        """Until the engine or a sidecar has ended, or has to be given up on; always raises Failed.

        The end of one is the end of all.
        """
        vigil = Vigil(adapter, self.shard, self._rooms, self._say, lambda: self.observed.state is ShardState.READY)
        vigil.on_load = self._heard
        stuck = ""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._keep(vigil, endpoint, proved))
                await self._crew.first_end()
                watching.cancel()
        except* StopError as errors:
            stuck = str(_innermost(errors))
        if not stuck:
            stuck = await self._stop_the_rest()
        if stuck:
            raise Failed(f"{self._given_up}; {stuck}" if self._given_up else stuck)
        failure = self._crew.failure()
        raise Failed(self._given_up, exit=failure.exit) if self._given_up else failure

    async def _keep(self, vigil: Vigil, endpoint: str | None, proved: bool) -> None:
        try:
            await vigil.keep(endpoint, proved)
        except Failed as failure:
            # Kept before the stop: whoever waits for the engine's end may see it before this does.
            self._given_up = str(failure)
            log.warning("giving up on a shard", shard=self.id, reason=self._given_up)
            await self._crew.stop()

    async def _stop_the_rest(self) -> str:
        """Empty once nothing of the shard runs; else what hangs, in words."""
        try:
            await self._crew.stop()
        except ProcessError as error:
            return str(error)
        return ""

    # -- what is said

    def _heard(self, load: Load | None) -> None:
        self.load = load

    async def _fail(self, failure: Failed) -> None:
        """Whatever was started by then is stopped first: what failed holds nothing."""
        words = str(failure)
        if stuck := await self._stop_the_rest():
            words = words if stuck in words else f"{words}; {stuck}"
        self._say(ShardState.FAILED, words, exit=failure.exit, port_taken=failure.port_taken, pid=None, prepared=False)


def _innermost(error: BaseException) -> BaseException:
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
