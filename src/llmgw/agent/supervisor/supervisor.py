"""Engines as processes that outlive the agent. What is on disk is the truth: the supervisor itself remembers little."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from llmgw.agent.supervisor.engine_user import EngineUser, prepare
from llmgw.agent.supervisor.layout import Layout, write_files
from llmgw.agent.supervisor.spec import Ended, ProcessSpec, Running, SupervisorError, UnknownShard
from llmgw.cluster.model import Exit
from llmgw.process import detached, output, units
from llmgw.process.account import account
from llmgw.process.detached import Detached, DetachedSpec, ExitRecord
from llmgw.process.errors import ProcessError, RecordError, StartError

EXIT_LINES = 40
"""Lines of output that an Exit carries."""

_ENGINE_OOM_SCORE = 200
"""When memory runs out, an engine goes rather than the agent or the gateway."""

_FOLLOW_S = 0.1
_FOLLOW_LINES = 256


@dataclass(slots=True)
class _Shard:
    shard_id: str
    generation: int
    log_path: Path
    handle: Detached | None
    """None: it never came to run."""
    work_dir: Path | None = None
    failure: str = ""
    note: str = ""
    ended: Ended | None = None
    stopping: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisor:
    """Starts, stops and finds engines. One per work directory; call ``adopt`` first."""

    def __init__(
        self, *, work_dir: Path, log_lines: int, stop_timeout_s: float, engine_user: str | None = "llmgw-engine"
    ) -> None:
        self._layout = Layout(work_dir)
        self._log_lines = log_lines
        self._stop_timeout_s = stop_timeout_s
        self._wanted_user = engine_user
        self._user: EngineUser | None = None
        self._shards: dict[str, _Shard] = {}
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

    def warnings(self) -> tuple[str, ...]:
        """What an operator should know, in words: engines that run as root, records that make no sense."""
        own = [] if self._user is None else [words for words in (self._user.warning, self._user.refusal) if words]
        return (*own, *self._unit_warnings(), *self._warnings)

    # -- one shard --------------------------------------------------------------------------------------------------

    def work_dir(self, shard_id: str) -> Path:
        """The directory that the shard runs in where its spec names no other; made by ``start``."""
        return self._layout.work(shard_id)

    async def start(self, spec: ProcessSpec) -> Running:
        """Start a generation and return once its program runs. Raises StartError in words; then nothing of it runs."""
        if self._user is None:
            raise StartError("the supervisor has not looked yet for what already runs (adopt comes first)")
        before = self._shards.get(spec.shard_id)
        if spec.shard_id in self._starting:
            raise StartError(f"shard {spec.shard_id} is being started already")
        if before is not None and before.handle is not None and self._look(before) is None:
            raise StartError(
                f"shard {spec.shard_id} runs already (generation {before.generation}, pid {before.handle.pid}); "
                f"stop it before generation {spec.generation} is started"
            )
        self._starting.add(spec.shard_id)
        try:
            if before is not None and before.handle is not None:
                await before.handle.wait()  # it has ended; nothing that it left may hold what the next one needs
            shard = await _to_the_end(self._start, spec)
        finally:
            self._starting.discard(spec.shard_id)
        return _running(shard)

    async def stop(self, shard_id: str) -> Exit:
        """SIGTERM to the whole group, SIGKILL after the stop timeout; returns once all of it is gone. Idempotent.

        Raises StopError where something hangs in the kernel.
        """
        shard = self._shards.get(shard_id)
        if shard is None or shard.handle is None:
            return Exit() if shard is None else self._ended(shard, ExitRecord()).exit
        async with shard.stopping:
            return self._ended(shard, await shard.handle.stop(self._stop_timeout_s)).exit

    async def wait(self, shard_id: str) -> Exit:
        """Return when the shard has ended. Raises UnknownShard."""
        shard = self._known(shard_id)
        if shard.handle is None:
            return self._ended(shard, ExitRecord()).exit
        return self._ended(shard, await shard.handle.wait()).exit

    async def forget(self, shard_id: str) -> None:
        """Remove all that is left of a shard that has ended. Raises SupervisorError where it runs."""
        shard = self._shards.get(shard_id)
        if shard_id in self._starting or (shard is not None and self._look(shard) is None):
            raise SupervisorError(f"shard {shard_id} runs; stop it before it is forgotten")
        self._shards.pop(shard_id, None)
        if shard is not None and shard.work_dir is not None:
            await asyncio.to_thread(shutil.rmtree, shard.work_dir, ignore_errors=True)
        await asyncio.to_thread(self._layout.remove, shard_id)

    # -- what there is ----------------------------------------------------------------------------------------------

    def running(self) -> tuple[Running, ...]:
        return tuple(_running(shard) for shard in self._shards.values() if self._look(shard) is None)

    def ended(self) -> tuple[Ended, ...]:
        """The last generation of every shard that does not run and has not been forgotten."""
        found = (self._look(shard) for shard in self._shards.values())
        return tuple(ended for ended in found if ended is not None)

    def tail(self, shard_id: str, lines: int | None = None) -> list[str]:
        """The last lines of output of the last generation, at most ``log_lines``. Raises UnknownShard."""
        wanted = self._log_lines if lines is None else min(lines, self._log_lines)
        return output.tail(self._known(shard_id).log_path, wanted)

    async def follow(self, shard_id: str, lines: int = 0) -> AsyncIterator[list[str]]:
        """The last ``lines`` lines, then new ones as they come, some at a time; ends when the shard has ended.

        Raises UnknownShard.
        """
        shard = self._known(shard_id)
        follower = output.Follower(shard.log_path, min(lines, self._log_lines))
        try:
            while True:
                over = self._look(shard) is not None  # looked at first: what it wrote before its end is read below
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
        for shard_id, generation in self._layout.found():
            try:
                found = self._find(shard_id, generation)
            except (RecordError, OSError) as error:
                self._warnings.append(
                    f"a record of shard {shard_id}, generation {generation} makes no sense and is left alone: {error}. "
                    "Whatever it may have started is neither watched nor stopped; remove the directory once "
                    "nothing of it runs"
                )
                continue
            known = self._shards.get(shard_id)
            if found is not None and (known is None or self._look(known) is not None):
                self._shards[shard_id] = found

    def _find(self, shard_id: str, generation: int) -> _Shard | None:
        shard = _Shard(shard_id, generation, self._layout.log(shard_id, generation), None)
        try:
            shard.handle = detached.find(self._layout.record(shard_id, generation))
        except StartError as error:
            shard.failure = str(error)
            return shard
        if shard.handle is None:
            self._layout.remove_generation(shard_id, generation)
            return None
        shard.handle.mend()
        labels = shard.handle.record.labels
        shard.note = labels.get("note", "")
        shard.work_dir = Path(labels["work_dir"]) if "work_dir" in labels else None
        return shard

    def _start(self, spec: ProcessSpec) -> _Shard:
        assert self._user is not None
        if self._user.refusal is not None:
            raise StartError(self._user.refusal)
        self._check(spec)
        work = self._layout.check_work(spec.shard_id, spec.work_dir or self._layout.work(spec.shard_id))
        user = self._user.name and (spec.user or self._user.name)
        owner = None if user is None else account(user)
        directory = self._layout.generation(spec.shard_id, spec.generation)
        if directory.exists():
            raise StartError(
                f"generation {spec.generation} of shard {spec.shard_id} has been started before; "
                "a restart is a new generation"
            )
        try:
            self._layout.make(spec.shard_id, spec.generation, work, owner)
            write_files(work, spec.files, owner)
            handle = detached.start(self._detached_spec(spec, work, user))
        except (OSError, ProcessError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            if spec.shard_id not in self._shards:
                shutil.rmtree(work, ignore_errors=True)  # nobody will come to forget it
            raise StartError(f"shard {spec.shard_id} was not started: {error}") from None
        self._prune(spec)
        log_path = self._layout.log(spec.shard_id, spec.generation)
        shard = _Shard(spec.shard_id, spec.generation, log_path, handle, work, note=spec.note)
        self._shards[spec.shard_id] = shard  # here, so that it is known also to a caller that was cancelled
        return shard

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
        base = {"PATH": detached.BASE_PATH, "HOME": str(work), "LANG": "C.UTF-8", "SPT_NOENV": "1"}
        return DetachedSpec(
            argv=spec.argv,
            env={**base, **spec.env},
            cwd=str(work),
            log_path=str(self._layout.log(spec.shard_id, spec.generation)),
            record_dir=str(self._layout.record(spec.shard_id, spec.generation)),
            nonce=nonce,
            user=user,
            reads=(spec.argv[0], *(str(path) for path in spec.reads)),
            writes=(str(work),),
            oom_score_adj=_ENGINE_OOM_SCORE,
            unit=units.unit_name("shard", spec.shard_id, nonce[:8]) if self._in_units else None,
            description=f"llmgw shard {spec.shard_id}, generation {spec.generation}",
            labels={"note": spec.note, "work_dir": str(work)},
        )

    def _prune(self, spec: ProcessSpec) -> None:
        """Keep this generation and the one before it, whose output may say why there is a new one."""
        older = [number for number in self._layout.generations(spec.shard_id) if number != spec.generation]
        for number in older[:-1]:
            self._layout.remove_generation(spec.shard_id, number)

    def _known(self, shard_id: str) -> _Shard:
        shard = self._shards.get(shard_id)
        if shard is None:
            raise UnknownShard(f"no shard {shard_id} was started here")
        return shard

    def _look(self, shard: _Shard) -> Ended | None:
        """How a shard ended; None while it runs."""
        if shard.ended is None:
            told = ExitRecord() if shard.handle is None else shard.handle.ended()
            return None if told is None else self._ended(shard, told)
        return shard.ended

    def _ended(self, shard: _Shard, told: ExitRecord) -> Ended:
        if shard.ended is None:
            shard.ended = Ended(
                shard_id=shard.shard_id,
                generation=shard.generation,
                exit=self._exit(shard, told),
                ended_at=told.ended_at,
                asked=told.asked,
                note=shard.note,
            )
        return shard.ended

    def _exit(self, shard: _Shard, told: ExitRecord) -> Exit:
        lines = [shard.failure] if shard.failure else output.tail(shard.log_path, min(EXIT_LINES, self._log_lines))
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


def _running(shard: _Shard) -> Running:
    assert shard.handle is not None
    record = shard.handle.record
    return Running(
        shard_id=shard.shard_id,
        generation=shard.generation,
        pid=shard.handle.pid,
        nonce=record.program.nonce,
        started_at=record.started_at,
        argv=record.argv,
        note=shard.note,
    )


async def _to_the_end(start: Callable[[ProcessSpec], _Shard], spec: ProcessSpec) -> _Shard:
    """A start that is under way can't be taken back: whoever cancels waits for it, so that it is not lost sight of."""
    work = asyncio.ensure_future(asyncio.to_thread(start, spec))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
