"""Engines as processes that outlive the agent. What is on disk is the truth: the supervisor itself remembers little."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.supervisor import transcript
from llmgw.agent.supervisor.engine_user import EngineUser, prepare
from llmgw.agent.supervisor.layout import Layout, write_files
from llmgw.agent.supervisor.spec import ENGINE, Ended, ProcessSpec, Running, SupervisorError, UnknownShard, is_check
from llmgw.agent.supervisor.transcript import Source
from llmgw.cluster.model import Exit
from llmgw.process import detached, output, units
from llmgw.process.account import account
from llmgw.process.detached import Detached, DetachedSpec, ExitRecord
from llmgw.process.errors import ProcessError, RecordError, StartError, StopError

EXIT_LINES = 50
"""Lines of output that an Exit carries."""

_ENGINE_OOM_SCORE = 200
"""When memory runs out, an engine goes rather than the agent or the gateway."""

_FOLLOW_S = 0.1
_FOLLOW_LINES = 256


@dataclass(slots=True)
class _Process:
    shard_id: str
    generation: int
    part: str
    log_path: Path
    handle: Detached | None
    """None: it never came to run."""
    work_dir: Path | None = None
    failure: str = ""
    note: str = ""
    ended: Ended | None = None
    stopping: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def started_at(self) -> float:
        return 0.0 if self.handle is None else self.handle.record.started_at


class Supervisor:
    """Starts, stops and finds engines and their sidecars. One per work directory; call ``adopt`` first."""

    def __init__(
        self, *, work_dir: Path, log_lines: int, stop_timeout_s: float, engine_user: str | None = "llmgw-engine"
    ) -> None:
        self._layout = Layout(work_dir)
        self._log_lines = log_lines
        self._stop_timeout_s = stop_timeout_s
        self._wanted_user = engine_user
        self._user: EngineUser | None = None
        self._shards: dict[str, dict[str, _Process]] = {}
        """By shard and part; of a shard always processes of one generation."""
        self._starting: set[str] = set()
        self._warnings: list[str] = []
        self._lock = -1
        self._in_units = units.systemd_runs()

    # -- the agent comes and goes -----------------------------------------------------------------------------------

    async def adopt(self) -> tuple[Running, ...]:
        """Find what earlier agents have started. Starts none and kills none; those that ended are in ``ended()``.

        Raises SupervisorError where another agent holds the work directory.
        """
        self._take_lock()
        self._user = await asyncio.to_thread(prepare, self._wanted_user)
        await asyncio.to_thread(self._find_all)
        return self.running()

    async def close(self) -> None:
        """The agent goes; the engines stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def user(self) -> str | None:
        """Whom engines run as; None: as the agent. Known once ``adopt`` has looked."""
        return self._user.name if self._user is not None else None

    def warnings(self) -> tuple[str, ...]:
        """What an operator should know, in words: engines that run as root, records that make no sense."""
        own = [] if self._user is None else [words for words in (self._user.warning, self._user.refusal) if words]
        return (*own, *self._unit_warnings(), *self._warnings)

    # -- one shard --------------------------------------------------------------------------------------------------

    def work_dir(self, shard_id: str) -> Path:
        """The directory that the shard runs in where its spec names no other; made by ``start``."""
        return self._layout.work(shard_id)

    async def start(self, spec: ProcessSpec) -> Running:
        """Start a process of a generation and return once its program runs.

        Raises StartError in words; then nothing of it runs. Nothing starts while another generation of the shard runs.
        """
        if self._user is None:
            raise StartError("the supervisor has not looked yet for what already runs (adopt comes first)")
        if spec.shard_id in self._starting:
            raise StartError(f"shard {spec.shard_id} is being started already")
        before = self._shards.get(spec.shard_id, {})
        others = [process for process in before.values() if process.generation != spec.generation]
        for process in (*others, *([before[spec.part]] if spec.part in before else [])):
            if process.handle is not None and self._look(process) is None:
                raise StartError(
                    f"{_name(process)} runs already (generation {process.generation}, pid {process.handle.pid}); "
                    f"stop it before generation {spec.generation} is started"
                )
        self._starting.add(spec.shard_id)
        try:
            for process in others:
                if process.handle is not None:
                    await process.handle.wait()  # it has ended; nothing that it left may hold what the next one needs
            # A start that is under way can't be taken back: whoever cancels waits, so that it is not lost sight of.
            started = await in_thread(lambda _: self._start(spec))
        finally:
            self._starting.discard(spec.shard_id)
        return _running(started)

    async def stop(self, shard_id: str) -> Exit:
        """SIGTERM to the whole group, SIGKILL after the stop timeout; returns once all of it is gone. Idempotent.

        The engine goes first, then its sidecars, the youngest first. Raises StopError where something hangs in the
        kernel, once the others have gone. Returns how the engine ended.
        """
        stuck: StopError | None = None
        for process in self._leaving(shard_id):
            try:
                await self._stop(process)
            except StopError as error:
                stuck = stuck or error
        if stuck is not None:
            raise stuck
        engine = self._shards.get(shard_id, {}).get(ENGINE)
        return Exit() if engine is None else self._ended(engine, ExitRecord()).exit

    async def stop_part(self, shard_id: str, part: str) -> Exit:
        """As ``stop``, one of its processes alone. Raises UnknownShard, StopError."""
        return (await self._stop(self._known(shard_id, part))).exit

    async def wait(self, shard_id: str, part: str = ENGINE) -> Exit:
        """Return when the process has ended. Raises UnknownShard."""
        process = self._known(shard_id, part)
        if process.handle is None:
            return self._ended(process, ExitRecord()).exit
        return self._ended(process, await process.handle.wait()).exit

    async def forget(self, shard_id: str) -> None:
        """Remove all that is left of a shard that has ended. Raises SupervisorError where it runs."""
        parts = self._shards.get(shard_id, {})
        if shard_id in self._starting or any(self._look(process) is None for process in parts.values()):
            raise SupervisorError(f"shard {shard_id} runs; stop it before it is forgotten")
        self._shards.pop(shard_id, None)
        for work_dir in {process.work_dir for process in parts.values() if process.work_dir is not None}:
            await asyncio.to_thread(shutil.rmtree, work_dir, ignore_errors=True)
        await asyncio.to_thread(self._layout.remove, shard_id)

    # -- what there is ----------------------------------------------------------------------------------------------

    def running(self) -> tuple[Running, ...]:
        """Every process that runs; of a shard in the order in which they were started."""
        return tuple(
            _running(process)
            for parts in tuple(self._shards.values())
            for process in sorted(parts.values(), key=lambda process: process.started_at)
            if self._look(process) is None
        )

    def ended(self) -> tuple[Ended, ...]:
        """Of every shard of which nothing runs and that has not been forgotten: how its last generation ended."""
        found = (self.end_of(shard_id) for shard_id in tuple(self._shards))
        return tuple(ended for ended in found if ended is not None)

    def end_of(self, shard_id: str) -> Ended | None:
        """The first end that nobody had asked for, or else the engine's. None while something of the shard runs.

        A sidecar's comes before the engine's: engines fall with their sidecars, and not the other way round.
        """
        ends = [self._look(process) for process in self._shards.get(shard_id, {}).values()]
        told = [end for end in ends if end is not None]
        if not told or len(told) < len(ends):
            return None
        lasting = [end for end in told if not is_check(end.part)] or told
        return min(lasting, key=lambda end: (end.asked, (end.part == ENGINE) != end.asked, end.ended_at))

    def part(self, shard_id: str, generation: int, part: str = ENGINE) -> Running | Ended | None:
        """One process of a generation; None where it was never started."""
        process = self._shards.get(shard_id, {}).get(part)
        if process is None or process.generation != generation:
            return None
        return self._look(process) or _running(process)

    def parts(self, shard_id: str, generation: int) -> tuple[str, ...]:
        """Names of all processes of a generation that were ever started."""
        parts = self._shards.get(shard_id, {})
        return tuple(part for part, process in parts.items() if process.generation == generation)

    def tail_of(self, shard_id: str, part: str, lines: int) -> list[str]:
        """The last lines of one process, as they are. Raises UnknownShard."""
        return output.tail(self._known(shard_id, part).log_path, min(lines, self._log_lines))

    def tail(self, shard_id: str, lines: int | None = None) -> list[str]:
        """The last lines of output of the last generation, at most ``log_lines``. Raises UnknownShard.

        Where there are sidecars, so many of each, theirs first and with their names before them.
        """
        wanted = self._log_lines if lines is None else min(lines, self._log_lines)
        return [line for source in self._sources(shard_id) for line in transcript.tail(source, wanted)]

    async def follow(self, shard_id: str, lines: int = 0) -> AsyncIterator[list[str]]:
        """The last ``lines`` lines, then new ones as they come, some at a time; ends when the shard has ended.

        Raises UnknownShard.
        """
        generation = next(iter(self._known_parts(shard_id).values())).generation
        follower = transcript.Transcript(min(lines, self._log_lines))
        try:
            while True:
                parts = self._shards.get(shard_id, {})
                here = [process for process in parts.values() if process.generation == generation]
                # Looked at first: what they wrote before their end is read below.
                over = all(self._look(process) is not None for process in here)
                follower.add(_source(process) for process in here)
                news = follower.read(final=over)
                while batch := list(islice(news, _FOLLOW_LINES)):
                    yield batch
                if over:
                    return
                await asyncio.sleep(_FOLLOW_S)
        finally:
            follower.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        if self._lock >= 0:
            return
        self._layout.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        path = self._layout.root / "supervisor.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise SupervisorError(
                f"{self._layout.root} is in use by another agent (pid {holder}); stop that one first, or give this "
                "one a supervisor.work_dir of its own"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock = fd

    def _find_all(self) -> None:
        found: dict[str, dict[int, dict[str, _Process]]] = {}
        for shard_id, generation, part in self._layout.found():
            try:
                process = self._find(shard_id, generation, part)
            except (RecordError, OSError) as error:
                named = f"shard {shard_id}, generation {generation}" + (f", sidecar {part}" if part else "")
                self._warnings.append(
                    f"a record of {named} makes no sense and is left alone: {error}. "
                    "Whatever it may have started is neither watched nor stopped; remove the directory once "
                    "nothing of it runs"
                )
                continue
            if process is not None:
                found.setdefault(shard_id, {}).setdefault(generation, {})[part] = process
        for shard_id, generations in found.items():
            self._shards[shard_id] = generations[max(generations, key=lambda number: self._rank(number, generations))]

    def _rank(self, generation: int, generations: Mapping[int, Mapping[str, _Process]]) -> tuple[bool, int]:
        """Of a shard's generations, the one that runs counts; else the last."""
        runs = any(self._look(process) is None for process in generations[generation].values())
        return (runs, generation)

    def _find(self, shard_id: str, generation: int, part: str) -> _Process | None:
        process = _Process(shard_id, generation, part, self._layout.log(shard_id, generation, part), None)
        try:
            process.handle = detached.find(self._layout.record(shard_id, generation, part))
        except StartError as error:
            process.failure = str(error)
            return process
        if process.handle is None:
            self._layout.remove_part(shard_id, generation, part)
            return None
        process.handle.mend()
        labels = process.handle.record.labels
        process.note = labels.get("note", "")
        process.work_dir = Path(labels["work_dir"]) if "work_dir" in labels else None
        return process

    def _start(self, spec: ProcessSpec) -> _Process:
        assert self._user is not None
        if self._user.refusal is not None:
            raise StartError(self._user.refusal)
        self._check(spec)
        work = self._layout.check_work(spec.shard_id, spec.work_dir or self._layout.work(spec.shard_id))
        user = self._user.name and (spec.user or self._user.name)
        owner = None if user is None else account(user)
        if self._layout.record(spec.shard_id, spec.generation, spec.part).exists():
            what = f"the sidecar {spec.part} of " if spec.part else ""
            raise StartError(
                f"{what}generation {spec.generation} of shard {spec.shard_id} has been started before; "
                "a restart is a new generation"
            )
        try:
            self._layout.make(spec.shard_id, spec.generation, spec.part, work, owner)
            write_files(work, spec.files, owner)
            handle = detached.start(self._detached_spec(spec, work, user))
        except (OSError, ProcessError) as error:
            self._layout.remove_part(spec.shard_id, spec.generation, spec.part)
            if spec.shard_id not in self._shards:
                shutil.rmtree(work, ignore_errors=True)  # nobody will come to forget it
            raise StartError(f"shard {spec.shard_id} was not started: {error}") from None
        self._prune(spec)
        log_path = self._layout.log(spec.shard_id, spec.generation, spec.part)
        process = _Process(spec.shard_id, spec.generation, spec.part, log_path, handle, work, note=spec.note)
        # Here, so that it is known also to a caller that was cancelled.
        known = self._shards.get(spec.shard_id, {})
        same = {part: one for part, one in known.items() if one.generation == spec.generation}
        self._shards[spec.shard_id] = {**same, spec.part: process}
        return process

    def _check(self, spec: ProcessSpec) -> None:
        if not spec.argv or not os.path.isabs(spec.argv[0]):
            raise StartError(f"shard {spec.shard_id}: expected the absolute path of a program, found {spec.argv[:1]}")
        if spec.generation < 1:
            raise StartError(f"shard {spec.shard_id}: generations count from 1, found {spec.generation}")
        relative = [str(path) for path in spec.reads if not path.is_absolute()]
        if relative:
            raise StartError(f"shard {spec.shard_id}: expected absolute paths, found {', '.join(relative)}")
        strange = [name for name in (*spec.argv, *spec.env, *spec.env.values()) if "\0" in name]
        if strange:
            raise StartError(f"shard {spec.shard_id}: a NUL byte in its arguments or environment")

    def _detached_spec(self, spec: ProcessSpec, work: Path, user: str | None) -> DetachedSpec:
        nonce = detached.new_nonce()
        named = () if spec.part == ENGINE else (spec.part,)
        base = {"PATH": detached.BASE_PATH, "HOME": str(work), "LANG": "C.UTF-8", "SPT_NOENV": "1"}
        return DetachedSpec(
            argv=spec.argv,
            env={**base, **spec.env},
            cwd=str(work),
            log_path=str(self._layout.log(spec.shard_id, spec.generation, spec.part)),
            record_dir=str(self._layout.record(spec.shard_id, spec.generation, spec.part)),
            nonce=nonce,
            user=user,
            reads=(spec.argv[0], *(str(path) for path in spec.reads)),
            writes=(str(work),),
            oom_score_adj=_ENGINE_OOM_SCORE,
            unit=units.unit_name("shard", spec.shard_id, *named, nonce[:8]) if self._in_units else None,
            description=f"llmgw shard {spec.shard_id}, generation {spec.generation}" + "".join(f", {n}" for n in named),
            labels={"note": spec.note, "work_dir": str(work)},
        )

    def _prune(self, spec: ProcessSpec) -> None:
        """Keep this generation and the one before it, whose output may say why there is a new one."""
        older = [number for number in self._layout.generations(spec.shard_id) if number != spec.generation]
        for number in older[:-1]:
            self._layout.remove_generation(spec.shard_id, number)

    def _known_parts(self, shard_id: str) -> Mapping[str, _Process]:
        parts = self._shards.get(shard_id)
        if not parts:
            raise UnknownShard(f"no shard {shard_id} was started here")
        return parts

    def _known(self, shard_id: str, part: str) -> _Process:
        process = self._known_parts(shard_id).get(part)
        if process is None:
            what = f"sidecar {part}" if part else "engine"
            raise UnknownShard(f"no {what} of shard {shard_id} was started here")
        return process

    def _leaving(self, shard_id: str) -> list[_Process]:
        """A shard's processes in the order in which they go."""
        parts = self._shards.get(shard_id, {}).values()
        return sorted(parts, key=lambda process: (process.part != ENGINE, -process.started_at))

    def _sources(self, shard_id: str) -> list[Source]:
        """Sidecars in the order of their start, then the engine."""
        self._known_parts(shard_id)
        return [_source(process) for process in reversed(self._leaving(shard_id))]

    async def _stop(self, process: _Process) -> Ended:
        if process.handle is None:
            return self._ended(process, ExitRecord())
        async with process.stopping:
            return self._ended(process, await process.handle.stop(self._stop_timeout_s))

    def _look(self, process: _Process) -> Ended | None:
        """How a process ended; None while it runs."""
        if process.ended is None:
            told = ExitRecord() if process.handle is None else process.handle.ended()
            return None if told is None else self._ended(process, told)
        return process.ended

    def _ended(self, process: _Process, told: ExitRecord) -> Ended:
        if process.ended is None:
            process.ended = Ended(
                shard_id=process.shard_id,
                generation=process.generation,
                exit=self._exit(process, told),
                ended_at=told.ended_at,
                asked=told.asked,
                note=process.note,
                part=process.part,
            )
        return process.ended

    def _exit(self, process: _Process, told: ExitRecord) -> Exit:
        wanted = min(EXIT_LINES, self._log_lines)
        lines = [process.failure] if process.failure else output.tail(process.log_path, wanted)
        return Exit(status=told.status, signal=told.signal, oom=told.oom, last_lines=tuple(lines))

    def _unit_warnings(self) -> list[str]:
        if self._in_units or not Path("/run/systemd/system").is_dir():
            return []
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        if not any(line.endswith(".service") for line in own.splitlines()):
            return []
        return [
            "the agent is not root, so its engines lie in its own unit and end with it: set KillMode=process in that "
            "unit, or run the agent as root"
        ]


def _running(process: _Process) -> Running:
    assert process.handle is not None
    record = process.handle.record
    return Running(
        shard_id=process.shard_id,
        generation=process.generation,
        pid=process.handle.pid,
        nonce=record.program.nonce,
        started_at=record.started_at,
        argv=record.argv,
        note=process.note,
        part=process.part,
    )


def _name(process: _Process) -> str:
    return f"shard {process.shard_id}" if process.part == ENGINE else f"sidecar {process.part} of {process.shard_id}"


def _source(process: _Process) -> Source:
    return Source(process.part, process.log_path)
