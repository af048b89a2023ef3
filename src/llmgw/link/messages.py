"""What goes over the stream: JSON text frames, snake_case, one dataclass per ``type``.

Fields that are not known are ignored, so that a newer peer can say more. ``epoch`` is the leader's,
``session`` the session's; both are 0 until welcomed. Decoded and encoded by ``llmgw.link.wire``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import DesiredShard, EngineOnNode, Inventory, ObservedShard, Route, Traffic, Vitals

PROTOCOL = 1
OLDEST_PROTOCOL = 1
"""The oldest version that this build still talks to: PROTOCOL - 1 once there has been one."""

Role = Literal["node", "gateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A peer's first frame."""

    type: Literal["hello"] = "hello"
    role: Role
    id: str
    """The node id claimed; must equal the certificate's common name."""
    protocol: int = PROTOCOL
    oldest_protocol: int = OLDEST_PROTOCOL
    version: str = ""
    """llmgw's own version, for people."""
    fingerprint: str = ""
    """Of the machine (a hash of its machine-id): the same machine takes over its own session, another is refused."""
    boot_id: str = ""
    instance: str = ""
    """Random per process, for logs."""
    inventory: Inventory | None = None
    vitals: Vitals | None = None
    probed: bool = False
    engines: tuple[EngineOnNode, ...] = ()
    shards: tuple[ObservedShard, ...] = ()
    weights: tuple[str, ...] = ()
    routes_version: int = 0
    """The routing table that a gateway holds; 0: none."""
    addresses: tuple[str, ...] = ()
    """All addresses of a gateway's machine: it may reach engines from another one than it dials in from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    type: Literal["welcome"] = "welcome"
    epoch: int
    session: int
    protocol: int = PROTOCOL
    cluster: str = ""
    version: str = ""
    heartbeat_s: float = 5.0
    servers: tuple[str, ...] = ()


RefusalCode = Literal["protocol", "identity", "duplicate", "revoked", "role", "malformed", "fenced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Instead of a welcome, or at the end of a session. ``words`` says what to do."""

    type: Literal["refused"] = "refused"
    code: RefusalCode
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """All that a node should run. Whole each time; a lost one costs latency only."""

    type: Literal["desired"] = "desired"
    epoch: int
    session: int
    revision: int
    shards: tuple[DesiredShard, ...] = ()
    engines: tuple[EngineSpec, ...] = ()
    """Engines that the node should have: those in effect, and those of the shards that it is asked to run."""
    engines_kept: tuple[EngineSpec, ...] = ()
    """Engines that stay where they are installed, and are not installed anew: the version before. All others go."""
    gateways: tuple[str, ...] = ()
    """Addresses of gateways that may send requests to this node's engines, beside the control plane's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What changed on a node. None: as last said."""

    type: Literal["observed"] = "observed"
    epoch: int
    session: int
    revision: int = 0
    """The desired revision that the node has taken up."""
    inventory: Inventory | None = None
    probed: bool | None = None
    engines: tuple[EngineOnNode, ...] | None = None
    shards: tuple[ObservedShard, ...] | None = None
    weights: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    type: Literal["heartbeat"] = "heartbeat"
    epoch: int
    session: int
    sent_at: float
    vitals: Vitals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesKey:
    """A client key as gateways know it: the SHA-256 of the key, in hex."""

    id: str
    hash: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The whole routing table, for gateways."""

    type: Literal["routes"] = "routes"
    epoch: int
    session: int
    version: int
    lease_s: float = 30.0
    routes: tuple[Route, ...] = ()
    keys: tuple[RoutesKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesAck:
    """The table is taken up: no request goes by an older one any more. ``traffic`` is as of that moment."""

    type: Literal["routes_ack"] = "routes_ack"
    epoch: int
    session: int
    version: int
    traffic: Mapping[str, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """What a gateway has in flight: of replicas that left its table, whenever that changes. Whole each time."""

    type: Literal["traffic"] = "traffic"
    epoch: int
    session: int
    replicas: Mapping[str, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRequest:
    """Asks a node for a shard's output. ``follow`` goes on until LogsCancel."""

    type: Literal["logs_request"] = "logs_request"
    id: str
    shard: str
    lines: int = 100
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsCancel:
    type: Literal["logs_cancel"] = "logs_cancel"
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    type: Literal["log_lines"] = "log_lines"
    id: str
    lines: tuple[str, ...] = ()
    end: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Asks a node to have its certificate renewed now."""

    type: Literal["renew"] = "renew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A frame of a type that this build does not know: dropped and counted."""

    type: str
    raw: dict[str, object] = field(default_factory=dict)


ToPeer = Welcome | Refused | Desired | Routes | LogsRequest | LogsCancel | Renew
