"""What the operator asked for: models, their profiles, and the engines that every node should have.

Values here come from ``server.yaml`` (see ``llmgw.config``). Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EngineName = Literal["llamacpp", "vllm", "sglang", "sim"]
Task = Literal["generate", "embed", "rerank", "transcribe", "speech"]
LaunchMode = Literal["ray", "mp"]
BuildKind = Literal["cpu", "cuda"]

ENGINE_NAMES: tuple[EngineName, ...] = ("llamacpp", "vllm", "sglang", "sim")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """How the simulated engine behaves."""

    load_time_s: float = 0.0
    first_token_s: float = 0.0
    token_interval_s: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One way to run a model. ``gpus_per_node`` of 0 means: placed by ``memory_bytes``, on the CPU."""

    name: str
    engine: EngineName
    nodes: int = 1
    gpus_per_node: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    memory_bytes: int | None = None
    context: int | None = None
    """Tokens per request, whatever the engine's own flag means."""
    parallel: int | None = None
    """Requests that one replica works on at once."""
    max_concurrency: int | None = None
    launch_mode: LaunchMode | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    sim: SimOptions | None = None
    engine_version: str = ""
    """The version of the engine that it runs on. Never in a file: the catalog that is in effect fills it in from
    ``engines``. Empty: whichever the node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """An entry of the catalog. ``source`` is None only where all profiles are ``sim``."""

    name: str
    profiles: tuple[Profile, ...]
    source: str | None = None
    aliases: tuple[str, ...] = ()
    task: Task = "generate"
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine that every node should have: ``source`` is ``github``, ``index``, or a URL with its ``sha256``."""

    name: EngineName
    version: str
    source: str = "github"
    sha256: str | None = None
    package: str | None = None
    build: BuildKind | None = None
    """Which of a version's builds. None: the node looks at its own processor and driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    models: tuple[ModelSpec, ...] = ()
    engines: tuple[EngineSpec, ...] = ()

    def model(self, name: str) -> ModelSpec | None:
        """The model with this name; aliases do not count."""
        return _named(self.models).get(name)

    def engine(self, name: str) -> EngineSpec | None:
        return next((engine for engine in self.engines if engine.name == name), None)


_last: tuple[tuple[ModelSpec, ...], dict[str, ModelSpec]] = ((), {})


def _named(models: tuple[ModelSpec, ...]) -> dict[str, ModelSpec]:
    """By name, of the catalog that was asked last: it is asked for every replica, and it hardly ever is another one."""
    global _last
    of_last, by_name = _last
    if of_last is not models:
        by_name = {model.name: model for model in reversed(models)}
        _last = models, by_name
    return by_name
