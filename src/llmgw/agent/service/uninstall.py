"""Takes the agent's service away, and says what it leaves."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.joining import DEFAULT_WORK_DIR
from llmgw.agent.service import systemd, unit_file
from llmgw.agent.service.left import Left, left_behind
from llmgw.agent.service.systemd import DROP_INS, UNIT, UNIT_FILE, ServiceRefused
from llmgw.agent.service.unit import MARK, config_of
from llmgw.agent.supervisor import Supervisor, SupervisorError
from llmgw.agent.supervisor.layout import Layout
from llmgw.config import AgentConfig, ConfigError, load_agent
from llmgw.process.errors import ProcessError
from llmgw.process.identity import alive
from llmgw.process.record import Record, read_record

DEFAULT_CONFIG = Path("/etc/llmgw/agent.yaml")


@dataclass(frozen=True, slots=True)
class Uninstalled:
    """What was done, one sentence each; and what is left on this machine, which is for its owner to remove."""

    done: tuple[str, ...]
    left: tuple[Left, ...]


@dataclass(frozen=True, slots=True)
class Running:
    shard: str
    pid: int
    unit: str | None

    def __str__(self) -> str:
        return f"{self.shard} (pid {self.pid}{f', {self.unit}' if self.unit else ''})"


def uninstall(config: Path | None, *, stop_engines: bool = False, leave_engines: bool = False) -> Uninstalled:
    """Stop and disable the service, and remove its unit. ``config`` None: the file that the unit names.

    Raises ServiceRefused in words; where engines run and neither was said, before anything was changed.
    """
    systemd.check_here("uninstall", "llmgw agent uninstall")
    text = unit_file.read()
    config = config or config_of(text) or DEFAULT_CONFIG
    read, note = _read(config)
    work_dir = read.supervisor.work_dir if read is not None else DEFAULT_WORK_DIR
    engines = tuple(running(work_dir))
    there = unit_file.is_there() or systemd.state().runs
    if there and engines and not (stop_engines or leave_engines):
        raise ServiceRefused(_engines_run(engines))
    done = [note] if note else []
    done += _remove_unit(text) if there else [f"there is no {UNIT_FILE}: nothing to take away"]
    if stop_engines:
        done += asyncio.run(_stop_all(work_dir, read))
    else:
        done += [f"still running: {engine}; {_stop_by_hand(engine)}" for engine in engines]
    return Uninstalled(tuple(done), left_behind(config, work_dir, read))


def running(work_dir: Path) -> Iterator[Running]:
    """Engines and sidecars of this work directory that run. Only looks: an agent may be using it."""
    layout = Layout(work_dir)
    for shard_id, generation, part in layout.found():
        record: Record | None = None
        with suppress(ProcessError, OSError):
            record = read_record(layout.record(shard_id, generation, part))
        if record is not None and alive(record.program):
            yield Running(f"{shard_id}, {part}" if part else shard_id, record.program.pid, record.unit)


def _engines_run(engines: tuple[Running, ...]) -> str:
    runs = "1 engine runs" if len(engines) == 1 else f"{len(engines)} engines run"
    listed = "".join(f"\n  {engine}" for engine in engines)
    return (
        f"nothing was changed: {runs} here, and would go on without an agent that knows of it:{listed}\n"
        "have the node drained first (`llmgw ctl drain NODE`, until `llmgw ctl nodes` says that it holds none), and "
        "uninstall then; or say --stop-engines (requests in flight are cut off after supervisor.stop_timeout), or "
        "--leave-engines"
    )


def _read(config: Path) -> tuple[AgentConfig | None, str]:
    """The agent's file; without one that can be understood, the usual folders are looked at, and that is said."""
    try:
        return load_agent(config), ""
    except ConfigError as error:
        why = "is not there" if not config.exists() else f"can't be understood ({str(error).splitlines()[0]})"
        return None, f"{config} {why}: the usual folders are looked at"


def _remove_unit(text: str) -> list[str]:
    state = systemd.state()
    there, path = unit_file.is_there(), UNIT_FILE
    if there and not text.startswith(MARK):
        raise ServiceRefused(
            f"{path} was not written by `llmgw agent install`: whoever put it there may need it. "
            f"`systemctl disable --now {UNIT}` and removing the file take it away"
        )
    done = []
    if state.runs:
        systemd.run("stop", UNIT, limit_s=systemd.START_S)
        done.append(f"stopped {UNIT}")
    if there:
        systemd.run("disable", UNIT)
        path.unlink(missing_ok=True)
        done.append(f"disabled it, and removed {path}")
    systemd.run("daemon-reload")
    with suppress(OSError):
        DEFAULT_WORK_DIR.rmdir()  # systemd makes it; another may be in use, and then it is empty
    systemd.attempt("reset-failed", UNIT)  # it knows it no more, or there is nothing to forget
    if DROP_INS.is_dir():
        done.append(f"{DROP_INS} is kept: it is somebody's own; rm -r {shlex.quote(str(DROP_INS))} removes it")
    return done


async def _stop_all(work_dir: Path, config: AgentConfig | None) -> list[str]:
    """As the agent stops them: SIGTERM, and SIGKILL after the stop timeout."""
    timeout_s = config.supervisor.stop_timeout_s if config is not None else 60.0
    if not work_dir.is_dir():
        return []
    supervisor = Supervisor(work_dir=work_dir, log_lines=1, stop_timeout_s=timeout_s, engine_user=None)
    try:
        shards = {each.shard_id: each.pid for each in await supervisor.adopt()}
        ends = await asyncio.gather(*(supervisor.stop(shard) for shard in shards), return_exceptions=True)
    except SupervisorError as error:
        raise ServiceRefused(f"the service is gone, its engines are not: {error}") from error
    finally:
        await supervisor.close()
    stuck = [str(end) for end in ends if isinstance(end, ProcessError)]
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, ProcessError):
            raise end
    if stuck:
        raise ServiceRefused("the service is gone, but not all of its engines:\n" + "\n".join(stuck))
    return [f"stopped {shard} (pid {pid})" for shard, pid in shards.items()]


def _stop_by_hand(engine: Running) -> str:
    if engine.unit is not None and shutil.which("systemctl"):
        return f"systemctl stop {shlex.quote(engine.unit)} stops it"
    return f"kill {engine.pid} stops it"
