"""The Store without a disk: the same promises but that of surviving its process. For simulations and tests."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmgw.store import codec
from llmgw.store.base import ApiKey, Change, Event, Lead, Saved, StoreError
from llmgw.store.bounds import EVENTS_KEPT, PRUNE_EVERY
from llmgw.store.fencing import fenced
from llmgw.store.identities import Token
from llmgw.store.leasing import Lease, lead_after, may_take


class MemoryStore:
    """Rows are held as encoded, so that what could not be stored fails here too, and nobody shares what is inside.

    ``secret`` is the cluster's; given, runs are repeatable. ``clock`` is what leases go by, in seconds. Several
    control planes of one process may share it, and no verb ever suspends: its coroutines can be driven by hand.
    """

    def __init__(
        self,
        *,
        secret: str | None = None,
        clock: Callable[[], float] = time.time,
        events_kept: int = EVENTS_KEPT,
        prune_every: int = PRUNE_EVERY,
    ) -> None:
        self._clock = clock
        self._secret = secrets.token_hex(32) if secret is None else secret
        self._events_kept = events_kept
        self._prune_every = prune_every
        self._events_since_pruning = 0
        self._lease = Lease()
        self._closed = False
        self._admin_token_hash: str | None = None
        self._nodes: dict[str, str] = {}
        self._replicas: dict[str, str] = {}
        self._drains: dict[str, str] = {}
        self._engines: dict[str, str] = {}
        self._replicas_made: dict[str, int] = {}
        self._scale: dict[str, tuple[int, int]] = {}
        self._keys: dict[str, str] = {}
        self._certificates: dict[str, tuple[str, str]] = {}
        self._tokens: dict[str, tuple[str, str]] = {}
        self._revocations: dict[str, str] = {}
        self._events: dict[str, tuple[str, str]] = {}
        self._event_ids: list[str] = []

    async def lead(self, holder: str, *, lease_s: float, alone: bool = False) -> Lead | None:
        self._refuse_closed()
        now, before = self._clock(), self._lease
        if not may_take(before, holder, now, alone=alone):
            self._lease = before.seen_at(now)
            return None
        self._lease = before.taken(holder, now, lease_s, lowest_epoch=1)
        return lead_after(before, self._lease)

    async def renew(self, epoch: int, lease_s: float) -> None:
        self._check_lead(epoch)
        self._lease = replace(self._lease, renewed_at=self._clock(), lease_s=lease_s)

    async def resign(self, epoch: int) -> None:
        self._refuse_closed()
        if epoch == self._lease.epoch:
            self._lease = replace(self._lease, lease_s=0.0)

    async def load(self) -> Saved:
        self._refuse_closed()
        return Saved(
            nodes=tuple(codec.NODES.decode(id, doc) for id, doc in sorted(self._nodes.items())),
            replicas=tuple(codec.REPLICAS.decode(id, doc) for id, doc in sorted(self._replicas.items())),
            drains=tuple(codec.DRAINS.decode(id, doc) for id, doc in sorted(self._drains.items())),
            engines=tuple(codec.ENGINES.decode(id, doc) for id, doc in sorted(self._engines.items())),
            keys=tuple(codec.KEYS.decode(id, doc) for id, doc in sorted(self._keys.items())),
            scale={model: replicas for model, (replicas, _) in sorted(self._scale.items())},
            scale_base={model: base for model, (_, base) in sorted(self._scale.items())},
            replicas_made=dict(sorted(self._replicas_made.items())),
            certificates=tuple(
                codec.CERTIFICATES.decode(id, doc) for id, (_, doc) in sorted(self._certificates.items())
            ),
            tokens=tuple(codec.TOKENS.decode(id, doc) for id, (_, doc) in sorted(self._tokens.items())),
            revocations=tuple(codec.REVOCATIONS.decode(id, doc) for id, doc in sorted(self._revocations.items())),
            secret=self._secret,
            admin_token_hash=self._admin_token_hash,
        )

    async def commit(self, epoch: int, change: Change) -> None:
        write = self._encoded(change)
        self._check_lead(epoch)
        write()

    def _encoded(self, change: Change) -> Callable[[], None]:
        """All that can fail is done now: what is returned leaves nothing half done."""
        nodes = {node.id: codec.encode_node(node) for node in change.nodes}
        replicas = {replica.id: codec.encode_replica(replica) for replica in change.replicas}
        drains = {drain.node: codec.encode_drain(drain) for drain in change.drains}
        engines: dict[str, str] = {history.name: codec.encode_engine(history) for history in change.engines}
        events = {event.id: (event.subject, codec.encode_event(event)) for event in change.events}
        certificates = [(each.serial, each.node, codec.encode_certificate(each)) for each in change.certificates]
        tokens = {each.id: (each.used_key, codec.encode_token(each)) for each in change.tokens}
        revocations = {each.id: codec.encode_revocation(each) for each in change.revocations}

        def write() -> None:
            self._nodes |= nodes
            self._replicas |= replicas
            self._drains |= drains
            self._engines |= engines
            self._tokens |= tokens
            self._revocations |= revocations
            for model, made in change.replicas_made.items():
                self._replicas_made[model] = max(made, self._replicas_made.get(model, made))
            for serial, node, doc in certificates:
                if self._certificates.get(serial, (node, ""))[0] == node:
                    self._certificates[serial] = (node, doc)
            self._remove(change)
            self._add_events(events)

        return write

    def _remove(self, change: Change) -> None:
        rows: tuple[tuple[dict[str, Any], Sequence[str]], ...] = (
            (self._nodes, change.removed_nodes),
            (self._replicas, change.removed_replicas),
            (self._drains, change.removed_drains),
            (self._certificates, change.removed_certificates),
            (self._tokens, change.removed_tokens),
            (self._revocations, change.removed_revocations),
        )
        for table, gone in rows:
            for id in gone:
                table.pop(id, None)

    async def claim_token(self, epoch: int, token: Token, change: Change) -> bool:
        doc, write = codec.encode_token(token), self._encoded(change)
        self._check_lead(epoch)
        found = self._tokens.get(token.id)
        if found is None or found[0] not in ("", token.used_key):
            return False
        self._tokens[token.id] = (token.used_key, doc)
        write()
        return True

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        self._check_lead(epoch)
        if replicas is None:
            self._scale.pop(model, None)
        else:
            self._scale[model] = (replicas, base)

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        doc = codec.encode_key(key)
        self._check_lead(epoch)
        self._keys[key.id] = doc

    async def set_admin_token(self, epoch: int, token_hash: str) -> None:
        self._check_lead(epoch)
        self._admin_token_hash = token_hash

    async def events(self, *, after: str | None = None, subject: str | None = None, limit: int = 100) -> list[Event]:
        self._refuse_closed()
        ids = self._event_ids if after is None else self._event_ids[bisect_right(self._event_ids, after) :]
        if subject is not None:
            ids = [id for id in ids if self._events[id][0] == subject]
        limit = max(0, limit)
        ids = ids[max(0, len(ids) - limit) :] if after is None else ids[:limit]
        return [codec.EVENTS.decode(id, self._events[id][1]) for id in ids]

    async def backup(self, path: str) -> None:
        self._refuse_closed()
        raise StoreError(
            f"nothing was written to {path}: this store is in memory and is gone with its process. "
            "Use sqlite:////path/to/llmgw.db (store: in server.yaml) to have one that can be backed up"
        )

    async def close(self) -> None:
        self._closed = True

    def _add_events(self, events: dict[str, tuple[str, str]]) -> None:
        for id, event in events.items():
            if id not in self._events:
                self._events[id] = event
                insort(self._event_ids, id)
        self._events_since_pruning += len(events)
        if self._events_since_pruning >= self._prune_every:
            self._prune()

    def _prune(self) -> None:
        surplus = max(0, len(self._event_ids) - self._events_kept)
        for id in self._event_ids[:surplus]:
            del self._events[id]
        del self._event_ids[:surplus]
        self._events_since_pruning = 0

    def _check_lead(self, epoch: int) -> None:
        self._refuse_closed()
        if epoch != self._lease.epoch or epoch <= 0:
            raise fenced(epoch, self._lease.epoch, self._lease.holder)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
