"""Makes what runs on this node what the control plane wants. Starts nothing before it was told so in this session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

import structlog

from llmgw.agent.memory import Remembered
from llmgw.agent.shard import Rooms, ShardRunner
from llmgw.agent.supervisor import Ended, Running
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import DesiredShard, EngineState, ObservedShard
from llmgw.link.messages import Desired

log = structlog.get_logger()

RETRY_FIRST_S = 60.0
RETRY_MOST_S = 600.0


@dataclass(slots=True)
class Life:
    runner: ShardRunner
    task: asyncio.Task[None]
    ending: asyncio.Task[None] | None = None


class Converge:
    """Owns every runner and its task. All calls on the agent's own loop."""

    def __init__(self, rooms: Rooms, report: Callable[[], None]) -> None:
        self._rooms = rooms
        self._report = report
        self._lives: dict[str, Life] = {}
        self._wanted: dict[str, DesiredShard] | None = None
        self._engines: tuple[EngineSpec, ...] = ()
        self._engine_tasks: dict[str, tuple[EngineSpec, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._asked = 0
        self.revision = 0
        """The desired revision that ``shards`` answers to; 0: none of this session yet."""

    def shards(self) -> tuple[ObservedShard, ...]:
        return tuple(life.runner.observed for _, life in sorted(self._lives.items()))

    def take(self, desired: Desired) -> None:
        self._wanted = {shard.id: shard for shard in desired.shards}
        self._engines = desired.engines
        self._asked = desired.revision
        self._changed.set()

    def welcomed(self) -> None:
        """A new session counts its revisions anew."""
        self._asked = self.revision = 0

    def adopt(self, running: Iterable[Running], ended: Iterable[Ended], remembered: Iterable[Remembered]) -> None:
        """Takes up what an earlier agent left: shards that run, and those that ended with nobody looking."""
        known = {(each.shard.id, each.shard.generation): each for each in remembered}
        for run in running:
            if found := known.get((run.shard_id, run.generation)):
                runner = ShardRunner(found.shard, self._rooms, self._report, pid=run.pid)
                self._begin(runner, runner.resume(found))
        for end in ended:
            if found := known.get((end.shard_id, end.generation)):
                runner = ShardRunner(found.shard, self._rooms, self._report)
                runner.ended_unseen(end.exit)
                self._begin(runner, _over())

    async def run(self) -> None:
        """Converges until cancelled. What runs then goes on running."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._converge_engines()
                self._converge_shards()
        finally:
            tasks = [life.task for life in self._lives.values()] + [task for _, task in self._engine_tasks.values()]
            tasks += [life.ending for life in self._lives.values() if life.ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _converge_shards(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        for shard_id, life in self._lives.items():
            if life.ending is None and not _same(life.runner.shard, wanted.get(shard_id)):
                life.ending = self._task(self._end(life), f"end of {shard_id}")
        for shard in wanted.values():
            if shard.id not in self._lives:
                runner = ShardRunner(shard, self._rooms, self._report)
                self._begin(runner, runner.start())
        self.revision = self._asked
        self._report()

    def _begin(self, runner: ShardRunner, life: Coroutine[None, None, None]) -> None:
        self._lives[runner.shard.id] = Life(runner, self._task(life, f"shard {runner.shard.id}"))

    async def _end(self, life: Life) -> None:
        """Ends a shard's life; a newer generation of it begins only after that."""
        life.task.cancel()
        await asyncio.gather(life.task, return_exceptions=True)
        await life.runner.stop()
        if self._wanted is None or life.runner.shard.id not in self._wanted:
            await life.runner.forget()
        del self._lives[life.runner.shard.id]
        self._report()
        self._changed.set()

    def _task(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(_say_crash)
        return task

    # -- engines

    def _converge_engines(self) -> None:
        specs: dict[str, EngineSpec] = {spec.name: spec for spec in self._engines}
        for name, (spec, task) in list(self._engine_tasks.items()):
            if specs.get(name) != spec:
                task.cancel()
                del self._engine_tasks[name]
        for name, spec in specs.items():
            if name not in self._engine_tasks:
                self._engine_tasks[name] = (spec, self._task(self._keep_engine(spec), f"engine {name}"))

    async def _keep_engine(self, spec: EngineSpec) -> None:
        """Installs one engine, and tries again after a minute, backing off to ten, until it is there."""
        pause = RETRY_FIRST_S
        while True:
            if await self._rooms.installer.ensure(spec) is EngineState.INSTALLED:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MOST_S)


def _same(shard: DesiredShard, wanted: DesiredShard | None) -> bool:
    return wanted is not None and wanted.generation == shard.generation


async def _over() -> None:
    """The life of a shard that had ended before this agent began."""


def _say_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a fault of the agent's own", task=task.get_name(), exc_info=error)
