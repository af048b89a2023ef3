"""A shard that is here on this node, for as long as anything of it is: what is said of it, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from llmgw.agent.exposure import Exposure
from llmgw.agent.gpus import GpuMemory
from llmgw.agent.install import Installer
from llmgw.agent.memory import ShardMemory
from llmgw.agent.probe import EngineClient
from llmgw.agent.supervisor import Ended, Running, Supervisor
from llmgw.agent.weights import WeightStore
from llmgw.cluster.model import DesiredShard, Exit, Inventory, Load, ObservedShard, ShardState
from llmgw.process.errors import ProcessError

log = structlog.get_logger()

STOP_AGAIN_S = 10.0


class Failed(Exception):
    """The shard can't run; the message says why, for people."""

    def __init__(self, words: str, *, exit: Exit | None = None, port_taken: bool = False) -> None:
        super().__init__(words)
        self.exit = exit
        self.port_taken = port_taken


@dataclass(frozen=True, slots=True)
class Rooms:
    """What shards share on a node."""

    supervisor: Supervisor
    installer: Installer
    weights: WeightStore
    client: EngineClient
    memory: ShardMemory
    exposure: Exposure
    host: Callable[[], str]
    """The address that engines listen on: the node's management address."""
    health_interval_s: float
    engines_changed: Callable[[], asyncio.Event]
    inventory: Callable[[], Inventory]
    gpu_memory: GpuMemory = field(default_factory=GpuMemory)
    sidecar_programs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By engine: the program that its sidecars are started with, where the node's file names one."""


class Presence:
    """One generation of a shard, whatever is known of it."""

    def __init__(
        self, shard_id: str, generation: int, rooms: Rooms, report: Callable[[], None], pid: int | None = None
    ) -> None:
        self.id = shard_id
        self.generation = generation
        self._rooms = rooms
        self._report = report
        self.load: Load | None = None
        """How busy its engine was when it was last asked; None: not known."""
        self.observed = ObservedShard(
            id=shard_id, generation=generation, state=ShardState.WANTED, since=time.time(), pid=pid
        )

    async def stop(self) -> None:
        """Stops the engine and its sidecars, each with its whole group; returns when they are gone.

        The caller cancels and awaits the life first.
        """
        self._say(ShardState.STOPPING, "stopping: no longer wanted here")
        while True:
            try:
                await self._rooms.supervisor.stop(self.id)
                return
            except Exception as error:
                if not isinstance(error, ProcessError):
                    log.exception("a shard can't be stopped; trying again", shard=self.id)
                self._say(ShardState.STOPPING, f"can't be stopped yet, and is tried again: {error}")
                await asyncio.sleep(STOP_AGAIN_S)

    async def forget(self) -> None:
        """Forgets what was asked of a shard that is no longer wanted here. Its output stays for whoever asks why."""
        try:
            await asyncio.to_thread(self._rooms.memory.forget, self.id)
        except OSError as error:
            # The next agent finds it, and tries again.
            log.warning("what was asked of a shard can't be forgotten", shard=self.id, reason=str(error))

    def take(self, shard: DesiredShard) -> None:
        """What the control plane says of this generation now, in this session."""

    def _say(self, state: ShardState, why: str, **changes: object) -> None:
        since = self.observed.since if state is self.observed.state else time.time()
        said = replace(self.observed, state=state, why=why, since=since, **changes)  # type: ignore[arg-type]
        if said != self.observed:
            self.observed = said
            self._report()


class Stray(Presence):
    """What an earlier agent started and this one knows no more of: the file that said what was asked for is gone.

    It is left alone until the control plane says whether it is wanted: then it is recognised, or stopped.
    """

    @classmethod
    def running(cls, run: Running, rooms: Rooms, report: Callable[[], None]) -> Stray:
        stray = cls(run.shard_id, run.generation, rooms, report, run.pid)
        stray._say(ShardState.STARTING, "its engine outlived the agent; waiting to be told what was asked of it")
        return stray

    @classmethod
    def ended(cls, end: Ended, rooms: Rooms, report: Callable[[], None]) -> Stray:
        stray = cls(end.shard_id, end.generation, rooms, report)
        stray._say(ShardState.FAILED, f"{end.words} while no agent was running", exit=end.exit, pid=None)
        return stray
