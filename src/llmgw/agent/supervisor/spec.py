"""What the supervisor is given, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.cluster.model import Exit
from llmgw.process.errors import ProcessError

ENGINE = ""
"""The part of a shard that is its engine. Sidecars have names of lower-case letters, digits, dots and dashes."""

_CHECK = ".ready"
LINES_SAID = 3


def ready_check(sidecar: str) -> str:
    """The part that looks whether a sidecar is up, and ends with status 0 once it is."""
    return f"{sidecar}{_CHECK}"


def is_check(part: str) -> bool:
    return part.endswith(_CHECK)


def last_lines(lines: Sequence[str]) -> str:
    """The end of an output, to be put behind what went wrong; empty where nothing was said."""
    said = [line.strip() for line in lines if line.strip()][-LINES_SAID:]
    return f"; last lines: {' / '.join(said)}" if said else ""


class SupervisorError(ProcessError):
    """Asked for something that can't be, such as forgetting a shard that runs."""


class UnknownShard(SupervisorError, KeyError):
    """A shard that was never started here, or has been forgotten."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of one generation of one shard, ready to run."""

    shard_id: str
    generation: int
    argv: tuple[str, ...]
    part: str = ENGINE
    """Which of the shard's processes it is: its engine, or a sidecar by name."""
    env: Mapping[str, str] = field(default_factory=dict)
    """All of the environment but for PATH, HOME, LANG, SPT_NOENV and LLMGW_NONCE."""
    work_dir: Path | None = None
    """A directory of the shard's own below the supervisor's, the same for all its generations: where it runs, and its
    HOME. Made when missing, removed by ``forget``. None: ``Supervisor.work_dir(shard_id)``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text, written 0600 as the engine's user. Absolute below the work directory, or relative to it."""
    reads: tuple[Path, ...] = ()
    """Absolute paths that the engine needs: its program's tree, its weights. Links are followed; what they point at
    is made reachable as well."""
    user: str | None = None
    """None: the supervisor's ``engine_user``. Means nothing where the agent is not root."""
    note: str = ""
    """Opaque: comes back with ``Running`` and ``Ended``, also after an adoption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process of a shard that runs. ``started_at`` is Unix time."""

    shard_id: str
    generation: int
    pid: int
    nonce: str
    started_at: float
    argv: tuple[str, ...]
    note: str = ""
    part: str = ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process of a shard that has ended, and has not been forgotten."""

    shard_id: str
    generation: int
    exit: Exit
    ended_at: float
    """Unix time; 0: nobody saw it end."""
    asked: bool = False
    """It was asked to end."""
    note: str = ""
    part: str = ENGINE

    @property
    def words(self) -> str:
        """Such as "the engine exited with status 3"; of a sidecar with the last words that it said."""
        if self.part == ENGINE:
            return f"the engine {self.exit}"
        return f"sidecar {self.part} {self.exit}{last_lines(self.exit.last_lines)}"
