"""What an agent's file says, whole: every default is in place. Durations are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.cluster.catalog import BuildKind, LaunchMode
from llmgw.cluster.model import Fabric, PortRange


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTls:
    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Where the machine is looked at."""

    nvidia_smi: str | None
    """A path, or a name to look for on PATH; None: ``nvidia-smi`` where it is usually found."""
    ib_root: Path
    prefer_nvml: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOnNode:
    bin: Path | None
    """The operator's own vLLM, which is used instead of installing one."""
    launch_mode: LaunchMode | None
    ray_bin: Path | None
    build: BuildKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOnNode:
    python: Path | None
    """The interpreter of an environment that has SGLang."""
    build: BuildKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamacppOnNode:
    bin: Path | None
    """The operator's own llama-server."""
    build: BuildKind | None = None
    """Which of a version's builds is installed here; None: the cluster's file says, else the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEngines:
    vllm: VllmOnNode | None
    sglang: SglangOnNode | None
    llamacpp: LlamacppOnNode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    work_dir: Path
    log_lines: int
    stop_timeout_s: float
    health_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    servers: tuple[str, ...]
    """https://HOST:PORT, in the order in which they are tried."""
    tls: AgentTls
    node_id: str | None
    """None: the host's name. So with the next two: None is found out on the machine."""
    mgmt_addr: str | None
    mgmt_interface: str | None
    labels: Mapping[str, str]
    heartbeat_interval_s: float
    reconnect_base_s: float
    reconnect_max_s: float
    fabrics: tuple[Fabric, ...]
    discovery: Discovery
    model_dirs: tuple[Path, ...]
    weights_dir: Path
    engines_dir: Path
    ports: PortRange
    engines: AgentEngines
    supervisor: SupervisorConfig
