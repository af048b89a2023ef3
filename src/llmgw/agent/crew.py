"""The processes of one generation of a shard: its engine, and the sidecars that are up before it and go after it.

All of it can be done again: what runs is left as it is, so that an agent goes on where the one before it was killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llmgw.agent.presence import Failed
from llmgw.agent.reach import LOOK_AGAIN_S, reached
from llmgw.agent.supervisor import (
    ENGINE,
    LINES_SAID,
    Ended,
    ProcessSpec,
    Running,
    StartError,
    StopError,
    Supervisor,
    is_check,
    last_lines,
    ready_check,
)
from llmgw.engines.base import Command, Sidecar

RUNS_S = 1.0
"""What has run for so long without a sign of its own counts as up."""

REACHED_WITHIN_S = 120.0
"""For all that an engine connects to as it starts: they are started at the same time, on other nodes."""

_UNTIL_READY = 'until timeout -k 1 60 "$@"; do sleep 0.5; done'
"""One process of the sidecar's own user, and in its view of the files, rather than one for each look."""


class Crew:
    def __init__(self, supervisor: Supervisor, shard_id: str, generation: int) -> None:
        self._supervisor = supervisor
        self._shard_id = shard_id
        self._generation = generation
        self._looked_from = time.time()

    @property
    def engine(self) -> Running | Ended | None:
        """None: it was never started."""
        return self._supervisor.part(self._shard_id, self._generation)

    @property
    def untouched(self) -> bool:
        """Nothing of this generation was ever started."""
        return not self._supervisor.parts(self._shard_id, self._generation)

    async def start(self, command: Command, reads: Sequence[Path], say: Callable[[str], None]) -> int:
        """Starts what does not run yet, in order. Returns a pid: the engine's, or where there is none a sidecar's.

        Raises Failed; what has been started by then still runs.
        """
        first: Running | None = None
        for sidecar in command.sidecars:
            say(f"starting its sidecar {sidecar.name}")
            up = await self._sidecar_up(sidecar, command, (*reads, *_reads(sidecar)), say)
            first = first or up
        await self._reach(command, say)
        if command.argv:
            say("starting the engine")
            spec = self._spec(ENGINE, command.argv, command, reads)
            return (await self._running(spec)).pid
        if first is None:
            raise Failed("there is nothing to run: neither an engine nor a sidecar")
        return first.pid

    async def first_end(self) -> None:
        """Returns when the engine or one of the sidecars has ended. Raises StopError."""
        await self._any_end(self._lasting())

    async def stop(self) -> None:
        """Stops all of it. Raises StopError."""
        await self._supervisor.stop(self._shard_id)

    def failure(self) -> Failed:
        """How it ended, once nothing of it runs."""
        end = self._supervisor.end_of(self._shard_id)
        if end is None or end.generation != self._generation:
            return Failed("the engine ended unseen")
        unseen = " while no agent was running" if end.ended_at < self._looked_from else ""
        return Failed(f"{end.words}{unseen}", exit=end.exit)

    def _lasting(self) -> list[str]:
        """Names of the processes that run for as long as the shard does."""
        return [part for part in self._supervisor.parts(self._shard_id, self._generation) if not is_check(part)]

    # -- sidecars

    async def _sidecar_up(
        self, sidecar: Sidecar, command: Command, reads: Sequence[Path], say: Callable[[str], None]
    ) -> Running:
        there = await self._running(self._spec(sidecar.name, sidecar.argv, command, reads, sidecar))
        say(f"waiting for its sidecar {sidecar.name}")
        if sidecar.ready_argv:
            await self._ready(sidecar, command, reads)
        elif (left_s := there.started_at + RUNS_S - time.time()) > 0:
            await self._any_end([sidecar.name], min(left_s, RUNS_S))
        self._must_run(sidecar.name)
        return there

    async def _ready(self, sidecar: Sidecar, command: Command, reads: Sequence[Path]) -> None:
        check = ready_check(sidecar.name)
        looking = self._supervisor.part(self._shard_id, self._generation, check)
        if looking is None:
            argv = ("/bin/sh", "-c", _UNTIL_READY, check, *sidecar.ready_argv)
            await self._running(self._spec(check, argv, command, reads, sidecar))
        await self._any_end([sidecar.name, check], sidecar.ready_within_s)
        self._must_run(sidecar.name)
        looked = self._supervisor.part(self._shard_id, self._generation, check)
        if isinstance(looked, Ended) and looked.exit.status == 0:
            return
        if isinstance(looked, Ended):
            raise Failed(f"whether the sidecar {sidecar.name} is ready can't be told: its check {looked.exit}")
        ended = await self._supervisor.stop_part(self._shard_id, check)
        lines = await self._lines(sidecar.name) or ended.last_lines
        raise Failed(f"sidecar {sidecar.name} was not ready within {sidecar.ready_within_s:g} s{last_lines(lines)}")

    def _must_run(self, part: str) -> None:
        there = self._supervisor.part(self._shard_id, self._generation, part)
        if isinstance(there, Ended):
            raise Failed(there.words, exit=there.exit)

    async def _lines(self, part: str) -> tuple[str, ...]:
        return tuple(await asyncio.to_thread(self._supervisor.tail_of, self._shard_id, part, LINES_SAID))

    # -- what it connects to

    async def _reach(self, command: Command, say: Callable[[str], None]) -> None:
        """Once it is up: whoever has been reached counts as reached, since its end is the end of the generation."""
        deadline = time.monotonic() + REACHED_WITHIN_S
        for listener in command.waits_for:
            while words := await reached(listener):
                where = f"{listener.who} at {listener.host}:{listener.port}"
                for sidecar in command.sidecars:
                    self._must_run(sidecar.name)
                if time.monotonic() > deadline:
                    raise Failed(f"{where} could not be reached within {REACHED_WITHIN_S:g} s: {words}")
                say(f"waiting for {where}: {words}")
                await asyncio.sleep(LOOK_AGAIN_S)

    # -- processes

    def _spec(
        self,
        part: str,
        argv: tuple[str, ...],
        command: Command,
        reads: Sequence[Path],
        sidecar: Sidecar | None = None,
    ) -> ProcessSpec:
        return ProcessSpec(
            shard_id=self._shard_id,
            generation=self._generation,
            part=part,
            argv=argv,
            env=dict(command.env if sidecar is None else sidecar.env),
            files=dict(command.files),
            reads=tuple(reads),
        )

    async def _running(self, spec: ProcessSpec) -> Running:
        there = self._supervisor.part(self._shard_id, self._generation, spec.part)
        if isinstance(there, Ended):
            raise Failed(there.words, exit=there.exit)
        if there is not None:
            return there
        try:
            return await self._supervisor.start(spec)
        except StartError as error:
            what = f"sidecar {spec.part}" if spec.part else "engine"
            raise Failed(f"the {what} could not be started: {error}") from error

    async def _any_end(self, parts: Iterable[str], within_s: float | None = None) -> None:
        """Returns when one of them has ended, or the time is over. Raises StopError where one hangs in the kernel."""
        waits = [asyncio.ensure_future(self._supervisor.wait(self._shard_id, part)) for part in parts]
        try:
            done, _ = await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            ends = await asyncio.gather(*waits, return_exceptions=True)
        stuck = [end for end in ends if isinstance(end, StopError)]
        if stuck and done:
            raise stuck[0]


def _reads(sidecar: Sidecar) -> tuple[Path, ...]:
    """The environment that a sidecar's program lies in, or that file alone: rather too little than a whole home."""
    program = Path(sidecar.argv[0])
    tree = program.parent.parent
    whole = program.parent.name == "bin" and any((tree / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))
    return (tree,) if whole else (program,)
