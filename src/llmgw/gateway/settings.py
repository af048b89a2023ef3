"""What a gateway process is told at its start. Durations are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long each part of a request may take. Every accepted request ends within ``total_s``."""

    queue_s: float = 60.0
    """Waiting for a replica that is ready, but works on as many requests as it may."""
    first_token_s: float = 600.0
    """From the request's going to an engine until the first byte of a streamed answer. A plain answer has its first
    byte when it is complete: ``total_s`` bounds it."""
    between_tokens_s: float = 60.0
    """Silence of the engine within an answer, once its body's first byte has come."""
    total_s: float = 1800.0
    """From the request's last byte to the answer's, waiting included."""
    connect_s: float = 5.0
    head_s: float = 30.0
    """For a request's head to arrive whole, and for a new connection to send anything."""
    body_stall_s: float = 60.0
    """Silence of the client within its own request's body. The clock stands still while nothing is asked of it."""
    client_stall_s: float = 60.0
    """How long a client may take no byte of its answer while there are some for it."""
    keep_alive_s: float = 90.0
    """Idle connections of clients."""
    engine_idle_s: float = 3.0
    """Idle connections to engines: below the 5 s after which vLLM and SGLang close theirs."""
    linger_s: float = 5.0
    """How long what a refused client still sends is read and dropped, so that it gets to read the refusal."""
    tick_s: float = 0.1
    """How often limits are looked at: the precision of all of the above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    id: str
    """Of this gateway: the one in its certificate's ``llmgw://CLUSTER/gateway/ID``."""
    state_dir: Path
    """Where the last routing table is kept (0600)."""
    listen_host: str = "0.0.0.0"
    listen_port: int = 8080
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    servers: tuple[str, ...] = ()
    """Control planes, ``https://host:port``. Empty: none is dialled, and only a table on disk is served."""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    front_cert: Path | None = None
    """For TLS towards clients; with ``front_key``. None: plain HTTP."""
    front_key: Path | None = None
    body_limit_bytes: int = 256 * 1024 * 1024
    queue: int = 100
    """Requests that may wait, per model."""
    hold_for_s: float = 300.0
    """How long a request waits for a model that has no ready replica."""
    drain_s: float = 600.0
    """How long requests in flight may take to finish once the process is asked to stop."""
    workers: int = 1
    timeouts: Timeouts = field(default_factory=Timeouts)
