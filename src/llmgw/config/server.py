"""What the control plane's file says, whole: every default is in place. Durations are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmgw.cluster.catalog import Catalog
from llmgw.config.addresses import HostPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where the control plane and its gateway listen."""

    gateway: HostPort
    admin: HostPort
    agents: HostPort
    metrics: HostPort


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    ca: Path
    cert: Path
    key: Path
    lifetime_s: float
    """Of the certificates that nodes get by token and renew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPolicy:
    suspect_after_s: float
    lost_after_s: float

    @property
    def heartbeat_s(self) -> float:
        """What agents are asked to beat at: three times before silence makes a node suspect, and every 5 s at least."""
        return min(5.0, self.suspect_after_s / 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPolicy:
    in_flight_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontTls:
    """What clients of the gateway see."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    queue_s: float
    first_token_s: float
    between_tokens_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    workers: int
    tls: FrontTls | None
    """None: plain HTTP for clients."""
    body_limit_bytes: int
    queue: int
    """Requests that may wait, per model."""
    hold_for_s: float
    timeouts: Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    cluster: str
    listen: Listen
    advertise: tuple[str, ...]
    """https://HOST:PORT, as nodes reach this control plane."""
    tls: ServerTls
    store: str
    """A SQLAlchemy-style URL: ``sqlite:////PATH`` with a whole path, or ``postgresql://…``."""
    nodes: NodesPolicy
    drain: DrainPolicy
    gateway: GatewayConfig
    catalog: Catalog
