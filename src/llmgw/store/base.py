"""The Store protocol: domain verbs, one transaction each. Heartbeats never come here; only changes do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmgw.cluster.model import Drain, EngineHistory, Node, Replica
from llmgw.store.identities import Certificate, Revocation, Token


class StoreError(Exception):
    """The store can't do what was asked; the message says why and what to do."""


class StoreLocked(StoreError):
    """Another process holds this data directory."""


class Fenced(StoreError):
    """A write came with the epoch of a leader that has been deposed. Nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A lead that was taken."""

    epoch: int
    """Higher than every one before. Older epochs can write nothing."""
    previous: str = ""
    """Who led before; empty: nobody ever did."""
    taken_over: bool = False
    """True where somebody else led before: it may have judged nodes, and sent out tables, until a moment ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that people may want to know later. ``id`` is a ULID: sorts by time, never reused."""

    id: str
    at: float
    kind: str
    """Dotted, stable, for scripts: node.ready, node.refused, replica.failed, engine.installed, config.reloaded ..."""
    subject: str
    """The id of what it is about (a node, a replica, a model); empty for the cluster itself."""
    words: str
    data: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A client's key. The key itself is never stored: ``hash`` is its SHA-256, in hex."""

    id: str
    """Short public id, ``key-xxxxx``."""
    name: str
    hash: str
    created_at: float
    revoked_at: float | None = None
    models: tuple[str, ...] = ()
    """Names it may use; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All that a control plane starts from, in order of id.

    Nodes come back without what belongs to their session: its number, vitals, shards, and when they were heard.
    """

    nodes: tuple[Node, ...] = ()
    replicas: tuple[Replica, ...] = ()
    scale: dict[str, int] = field(default_factory=dict)
    """Override of ``replicas`` by model, with the file's value at that time in ``scale_base``."""
    scale_base: dict[str, int] = field(default_factory=dict)
    replicas_made: dict[str, int] = field(default_factory=dict)
    drains: tuple[Drain, ...] = ()
    engines: tuple[EngineHistory, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    tokens: tuple[Token, ...] = ()
    revocations: tuple[Revocation, ...] = ()
    secret: str = field(default="", repr=False)
    admin_token_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of the cluster, written whole or not at all. Written again, it changes nothing more.

    A count in ``replicas_made`` only ever rises, and a certificate's serial stays with the node it was first entered
    for: as another's it is not written. What is both written and removed is removed.
    """

    nodes: Sequence[Node] = ()
    removed_nodes: Sequence[str] = ()
    replicas: Sequence[Replica] = ()
    removed_replicas: Sequence[str] = ()
    drains: Sequence[Drain] = ()
    removed_drains: Sequence[str] = ()
    """Nodes that are no longer to be emptied."""
    engines: Sequence[EngineHistory] = ()
    replicas_made: dict[str, int] = field(default_factory=dict)
    certificates: Sequence[Certificate] = ()
    removed_certificates: Sequence[str] = ()
    """Serials."""
    tokens: Sequence[Token] = ()
    removed_tokens: Sequence[str] = ()
    revocations: Sequence[Revocation] = ()
    removed_revocations: Sequence[str] = ()
    """Ids of revocations."""
    events: Sequence[Event] = ()


class Store(Protocol):
    async def lead(self, holder: str, *, lease_s: float, alone: bool = False) -> Lead | None:
        """Take the lead for ``lease_s``, on the store's own clock; None while another holder's lease is live.

        ``holder`` names whoever leads, for people, and stays the same over its restarts: it takes its own lease back
        at once. ``alone``: nobody else can be leading (a lock proves it), so that a live lease is a dead holder's.
        """

    async def renew(self, epoch: int, lease_s: float) -> None:
        """Have the lease last ``lease_s`` from now. Raises Fenced where ``epoch`` is not the current leader's."""

    async def resign(self, epoch: int) -> None:
        """End the lease now, so that another may take the lead at once. Does nothing where ``epoch`` leads no more."""

    async def load(self) -> Saved: ...

    async def commit(self, epoch: int, change: Change) -> None:
        """Write a step. Raises Fenced where ``epoch`` is not the current leader's."""

    async def claim_token(self, epoch: int, token: Token, change: Change) -> bool:
        """Write ``token`` as used for ``token.used_key``, and the step with it, unless another key has used it.

        False: another key has, or there is no such token; nothing was written. One statement decides between two
        that come at once. Raises Fenced where ``epoch`` is not the current leader's.
        """

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        """Store an override of the model's replicas (None: take it back); ``base`` is what the file says now."""

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        """Add a key, or write it anew (revoked, say)."""

    async def set_admin_token(self, epoch: int, token_hash: str) -> None: ...

    async def events(self, *, after: str | None = None, subject: str | None = None, limit: int = 100) -> list[Event]:
        """Newest ``limit`` events in order of time; with ``after``, the first ``limit`` that follow that id."""

    async def backup(self, path: str) -> None:
        """A consistent copy into ``path``, which must not exist yet. Raises StoreError otherwise."""

    async def close(self) -> None: ...
