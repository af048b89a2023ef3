"""What llmgw has to know of an engine to run it, as values and pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from llmgw.cluster.model import DesiredShard
from llmgw.engines.flags import Flag, read_flags
from llmgw.engines.load import LoadMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an adapter needs from the node to write a command line."""

    shard: DesiredShard
    program: tuple[str, ...]
    """The engine's program, with leading arguments where it is started through another (``python -m ...``)."""
    host: str
    weights: str | None
    """Path of the model's file or directory on this node; None for engines without weights."""
    work_dir: str
    """A directory of the shard's own, writable by the engine's user."""
    help_text: str = ""
    """The engine's own help, which decides between flags that differ from version to version."""
    version: str = ""
    """What the program itself says it is (``Engine.read_version``); empty: not known."""
    cores: int = 1
    interface: str | None = None
    """The node's management interface: where collectives bootstrap."""
    hcas: tuple[str, ...] = ()
    """``NAME:PORT`` of the replica's fabric on this node, and no others; empty where it runs on one node."""
    launch_mode: str | None = None
    """The node's own choice, for profiles that make none: ``ray`` or ``mp``."""
    sidecar_program: tuple[str, ...] = ()
    """The program that sidecars are started with (``ray``), where the engine needs any."""
    worker_program: tuple[str, ...] = ()
    """The one of ``Engine.worker_programs`` that lies beside ``program``; empty where none does."""
    weights_bytes: int = 0
    """Size of what ``weights`` names; 0: not known."""
    node_memory_bytes: int = 0
    """All of the node's memory; 0: not known."""

    @property
    def flags(self) -> Mapping[str, Flag]:
        """What ``help_text`` defines. Adapters ask here alone, so that whatever they ask for can be found out."""
        return read_flags(self.help_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """A process that runs beside an engine: up before it, stopped after it; one that fails fails the shard."""

    name: str
    """Such as ``ray``: names its output, and its words in a failure."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready_argv: tuple[str, ...] = ()
    """A command that exits with 0 once the sidecar is up; empty: it counts as up once it has run for a second."""
    ready_within_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Something that an engine connects to as soon as it starts."""

    who: str
    """For people: ``rank 1 on node02``."""
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    """Empty for a rank that runs nothing but its sidecars: the shard lives as long as they do."""
    env: Mapping[str, str]
    """The whole environment but for PATH, HOME and LANG, which the supervisor sets: built from nothing."""
    endpoint: str | None
    """host:port where the engine will serve; None for a rank that serves nothing."""
    sidecars: tuple[Sidecar, ...] = ()
    """In the order in which they are started."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files (0600, of the engine's user) to write before the start: path to text. Keys go here, never into argv."""
    listens: tuple[int, ...] = ()
    """Ports that it opens on the node's address beside ``endpoint``: looked at before the start like that one."""
    waits_for: tuple[Listener, ...] = ()
    """Must take connections before the engine is started, since it ends where one does not; sidecars are up by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One HTTP request that the agent makes of an engine."""

    method: str
    path: str
    body: bytes | None = None


class Engine(Protocol):
    """An engine as pure functions. One object per engine, in ``llmgw.engines.registry``."""

    name: str
    starts_slowly_s: float
    """How long a start may take before it counts as hung."""
    worker_programs: tuple[str, ...]
    """Names, the newest first, of the program that ranks above 0 run where it is not the engine's own."""
    load_metrics: LoadMetrics | None
    """Where its load stands in what ``metrics`` answers; None: it tells none."""

    def command(self, launch: Launch) -> Command:
        """Raises LaunchRefused where this node, or the build on it, can't run the shard as asked."""

    def refusal(self, shard: DesiredShard) -> str | None:
        """Why this engine can't run this shard as asked, in words; None where it can."""

    def loads_weights(self, rank: int) -> bool:
        """Whether this rank reads the model's files itself."""

    def health(self) -> Probe: ...

    def metrics(self) -> Probe | None:
        """What answers with Prometheus' text; None where nothing does."""

    def read_health(self, status: int, body: bytes) -> str | None:
        """None: healthy. Else what it is doing ("loading the model"). Raises EngineUnhealthy where it has failed."""

    def readiness(self, shard: DesiredShard) -> Probe:
        """The real request whose answer proves that the shard works: one token, one vector, one score."""

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        """None: proved. Else why the answer does not prove it."""

    def read_version(self, output: str) -> str | None:
        """The version in what ``--version`` printed (stdout and stderr together); None where there is none."""


class LaunchRefused(ValueError):
    """The shard can't be started with what this node has. The message says what is missing and what to do."""


class EngineUnhealthy(Exception):
    """The engine answers, and says that it can't work. The message is what it said."""
