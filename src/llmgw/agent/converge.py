"""Makes what runs on this node what the control plane wants. Starts nothing before it was told so in this session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from llmgw.agent.memory import Remembered
from llmgw.agent.presence import Presence, Rooms, Stray
from llmgw.agent.shard import ShardRunner
from llmgw.agent.supervisor import ENGINE, Ended, Running, SupervisorError
from llmgw.agent.tasks import begin
from llmgw.cluster.model import DesiredShard, Load, ObservedShard, ShardState
from llmgw.link.messages import Desired

log = structlog.get_logger()

OUTPUTS_KEPT = 20
"""Shards that ended and are no longer wanted here, whose output can still be read."""
OUTPUT_KEPT_S = 86_400.0


@dataclass(slots=True)
class Life:
    runner: Presence
    task: asyncio.Task[None]
    ending: asyncio.Task[None] | None = None


class Converge:
    """Owns every runner and its task. All calls on the agent's own loop."""

    def __init__(self, rooms: Rooms, report: Callable[[], None]) -> None:
        self._rooms = rooms
        self._report = report
        self._lives: dict[str, Life] = {}
        self._wanted: dict[str, DesiredShard] | None = None
        self._desired: Desired | None = None
        self._changed = asyncio.Event()
        self._asked = 0
        self.revision = 0
        """The desired revision that ``shards`` answers to; 0: none of this session yet."""

    def shards(self) -> tuple[ObservedShard, ...]:
        return tuple(life.runner.observed for _, life in sorted(self._lives.items()))

    def loads(self) -> dict[str, Load]:
        """By shard id: how busy the engines were when they were last asked, of those that told it."""
        return {life.runner.id: life.runner.load for life in self._lives.values() if life.runner.load is not None}

    def take(self, desired: Desired) -> None:
        self._wanted = {shard.id: shard for shard in desired.shards}
        self._desired = desired
        self._asked = desired.revision
        self._rooms.exposure.name(desired.gateways)
        self._changed.set()

    def begin_session(self) -> None:
        """A new session counts its revisions anew. Called before anything is said in it."""
        self._asked = self.revision = 0

    def adopt(self, running: Iterable[Running], ended: Iterable[Ended], remembered: Iterable[Remembered]) -> None:
        """Takes up what an earlier agent left: shards that run, and those that ended with nobody looking."""
        known = {(each.shard.id, each.shard.generation): each for each in remembered}
        here: dict[str, Running] = {}
        for run in running:
            if run.shard_id not in here or run.part == ENGINE:  # of a shard, its engine stands for its sidecars
                here[run.shard_id] = run
        for run in here.values():
            if found := known.pop((run.shard_id, run.generation), None):
                runner = ShardRunner(found.shard, self._rooms, self._report, pid=run.pid)
                self._begin(runner, runner.resume(found))
            else:
                log.warning("an engine runs and what was asked of it is not known", shard=run.shard_id, pid=run.pid)
                self._begin(Stray.running(run, self._rooms, self._report), _over())
        for end in ended:
            known.pop((end.shard_id, end.generation), None)
            self._begin(Stray.ended(end, self._rooms, self._report), _over())
        for shard_id, _ in known:
            if shard_id not in self._lives:
                with suppress(OSError):
                    self._rooms.memory.forget(shard_id)  # written down, and never started
        self._expose()

    async def run(self) -> None:
        """Converges until cancelled. What runs then goes on running."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._converge_shards()
                self._converge_engines()
        finally:
            await self.close()

    async def close(self) -> None:
        """The agent goes, whether it came to run or not: nothing is asked of a shard any more, or done to it."""
        tasks = [life.task for life in self._lives.values()]
        tasks += [life.ending for life in self._lives.values() if life.ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _converge_shards(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        for shard_id, life in list(self._lives.items()):
            if life.ending is not None:
                continue
            shard = wanted.get(shard_id)
            if shard is None or shard.generation != life.runner.generation:
                life.ending = begin(self._end(life), f"end of {shard_id}")
            elif isinstance(life.runner, Stray) and life.runner.observed.state is not ShardState.FAILED:
                runner = ShardRunner(shard, self._rooms, self._report, pid=life.runner.observed.pid)
                runner.take(shard)
                self._begin(runner, runner.recognise())
            else:
                life.runner.take(shard)
        for shard in wanted.values():
            if shard.id not in self._lives:
                runner = ShardRunner(shard, self._rooms, self._report)
                runner.take(shard)
                self._begin(runner, runner.start())
        self._expose()
        self.revision = self._asked
        self._report()

    def _expose(self) -> None:
        """What is on its way out keeps its rules until it has ended."""
        here = [life.runner.shard for life in self._lives.values() if isinstance(life.runner, ShardRunner)]
        self._rooms.exposure.want(here, self._rooms.host())

    def _begin(self, runner: Presence, life: Coroutine[None, None, None]) -> None:
        self._lives[runner.id] = Life(runner, begin(life, f"shard {runner.id}"))

    async def _end(self, life: Life) -> None:
        """Ends a shard's life; a newer generation of it begins only after that."""
        life.task.cancel()
        await asyncio.gather(life.task, return_exceptions=True)
        await life.runner.stop()
        if self._wanted is None or life.runner.id not in self._wanted:
            await life.runner.forget()
        del self._lives[life.runner.id]
        # At once: whoever is told that a wish has been taken up takes what is not there for ended.
        self._converge_shards()
        self._converge_engines()
        await self._clear_away()

    async def _clear_away(self) -> None:
        """Removes the output of shards that ended long ago, or of which there are too many."""
        ended = sorted(self._rooms.supervisor.ended(), key=lambda end: end.ended_at, reverse=True)
        idle = [end for end in ended if end.shard_id not in self._lives]
        for number, end in enumerate(idle):
            if number >= OUTPUTS_KEPT or time.time() - end.ended_at > OUTPUT_KEPT_S:
                try:
                    await self._rooms.supervisor.forget(end.shard_id)
                except (SupervisorError, OSError) as error:
                    log.warning("what is left of a shard can't be removed", shard=end.shard_id, reason=str(error))

    # -- engines

    def _converge_engines(self) -> None:
        """Passes on which engines are wanted, and which versions shards need that are here, or are to come."""
        if (desired := self._desired) is None:
            return
        here = [life.runner.shard for life in self._lives.values() if isinstance(life.runner, ShardRunner)]
        in_use = frozenset((shard.profile.engine, shard.profile.engine_version) for shard in (*here, *desired.shards))
        self._rooms.installer.take(desired.engines, desired.engines_kept, in_use)


async def _over() -> None:
    """The life of a shard that nothing is done about, until the control plane has said what it wants."""
