"""What the supervisor is given, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.cluster.model import Exit
from llmgw.process.errors import ProcessError

ENGINE = ""
"""The part of a shard that is its engine. Sidecars have names of lower-case letters, digits, dots and dashes."""


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
