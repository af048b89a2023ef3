"""What an agent's file says, whole: every default is in place. Durations are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.cluster.catalog import BuildKind, EngineName, LaunchMode
from llmgw.cluster.model import Fabric, PortRange

PROGRAM_KEYS: Mapping[EngineName, str] = {
    "llamacpp": "engines.llamacpp.bin",
    "vllm": "engines.vllm.bin",
    "sglang": "engines.sglang.python",
}
"""Where the file names an engine's program."""


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

    @property
    def programs(self) -> Mapping[EngineName, Path]:
        """The operator's own, which are used instead of installing one."""
        stated: dict[EngineName, Path | None] = {
            "llamacpp": self.llamacpp.bin if self.llamacpp else None,
            "vllm": self.vllm.bin if self.vllm else None,
            "sglang": self.sglang.python if self.sglang else None,
        }
        return {name: path for name, path in stated.items() if path is not None}

    @property
    def builds(self) -> Mapping[EngineName, BuildKind]:
        """Which of a version's builds is installed here, where the file says it."""
        stated: dict[EngineName, BuildKind | None] = {
            "llamacpp": self.llamacpp.build if self.llamacpp else None,
            "vllm": self.vllm.build if self.vllm else None,
            "sglang": self.sglang.build if self.sglang else None,
        }
        return {name: build for name, build in stated.items() if build is not None}


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
