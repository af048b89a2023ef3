"""What discovery is told: where to look, and what the operator stated instead of letting it be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmgw.cluster.model import Fabric, PortRange

if TYPE_CHECKING:
    from llmgw.config.agent import AgentConfig

IB_ROOT = Path("/sys/class/infiniband")


class DiscoveryRefused(Exception):
    """What the operator stated can't be true of this machine. The message says what, and what the machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """``None`` means: find it out. Paths below ``root`` are read as if ``root`` were ``/``."""

    nvidia_smi: str | None = None
    """A path, or a name to look for on PATH; None or "": ``nvidia-smi`` on PATH, if there is one."""
    ib_root: Path = IB_ROOT
    prefer_nvml: bool = True
    servers: tuple[str, ...] = ()
    """Addresses of the control planes: the route to them decides the management address."""
    mgmt_addr: str | None = None
    mgmt_interface: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    fabrics: tuple[Fabric, ...] = ()
    ports: PortRange = field(default_factory=lambda: PortRange(20000, 29999))
    launch_modes: Mapping[str, str] = field(default_factory=dict)
    """By engine, where the node's file states one."""
    weights_dir: Path = Path("/var/lib/llmgw-weights")
    probe_limit_s: float = 15.0
    """How long one call of the NVIDIA driver may take before it counts as hung."""
    root: Path = Path("/")


def settings_of(config: AgentConfig) -> DiscoverySettings:
    """What an agent's file says about finding things out."""
    vllm = config.engines.vllm
    return DiscoverySettings(
        nvidia_smi=config.discovery.nvidia_smi,
        ib_root=config.discovery.ib_root,
        prefer_nvml=config.discovery.prefer_nvml,
        servers=config.servers,
        mgmt_addr=config.mgmt_addr,
        mgmt_interface=config.mgmt_interface,
        labels=config.labels,
        fabrics=config.fabrics,
        ports=config.ports,
        launch_modes={"vllm": vllm.launch_mode} if vllm is not None and vllm.launch_mode is not None else {},
        weights_dir=config.weights_dir,
    )
