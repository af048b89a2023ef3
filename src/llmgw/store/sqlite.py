"""The Store on one SQLite file: one process, one writer, every step on the disk before it counts.

Each verb is one function that runs whole in a thread: a caller that is cancelled leaves no transaction half way.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Float, Table, bindparam, delete, func, select, update
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import Executable

from llmgw.store import codec, schema
from llmgw.store.backup import back_up
from llmgw.store.base import ApiKey, Change, Event, Lead, Saved, StoreError
from llmgw.store.bounds import EVENTS_KEPT, PRUNE_EVERY
from llmgw.store.connect import OLDEST_SQLITE, reading_engine, writing_engine
from llmgw.store.faults import file_error, store_error
from llmgw.store.fencing import fenced
from llmgw.store.identities import Token
from llmgw.store.leasing import Lease, lead_after, may_take
from llmgw.store.lock import DirectoryLock
from llmgw.store.migrate import prepare

R = TypeVar("R")
Rows = list[dict[str, Any]]
Transaction = Callable[[Connection], R]

_NOW = ((func.julianday("now") - 2440587.5) * 86400.0).cast(Float)
"""The database's clock, in Unix seconds with their fraction."""

READERS = 2
"""Reads that run at once; more wait their turn."""


class SqliteStore:
    """Made by ``open``. See the Store protocol for what the verbs promise."""

    def __init__(self, path: Path, lock: DirectoryLock, *, events_kept: int, prune_every: int) -> None:
        self.path = path
        self._lock = lock
        self._writing = writing_engine(path)
        self._reading = reading_engine(path, READERS)
        self._writer = ThreadPoolExecutor(1, "store-writer")  # One thread is what makes it one writer, in order.
        self._readers = ThreadPoolExecutor(READERS, "store-reader")
        self._closed = False
        self._pruning = _Pruning(events_kept, prune_every)

    @classmethod
    async def open(cls, path: Path, *, events_kept: int = EVENTS_KEPT, prune_every: int = PRUNE_EVERY) -> Self:
        """Open the database at an absolute ``path``, making it (0600) and its directory (0700) where missing.

        Raises StoreLocked where another process has the directory, StoreError where the file can't be used.
        """
        _refuse_old_sqlite()
        # In one go: whoever is cancelled meanwhile must not give the lock back under a migration that still runs.
        lock = await asyncio.to_thread(_claim, path)
        return cls(path, lock, events_kept=events_kept, prune_every=prune_every)

    async def lead(self, holder: str, *, lease_s: float, alone: bool = False) -> Lead | None:
        return await self._write(lambda connection: _take_lead(connection, holder, lease_s, alone))

    async def renew(self, epoch: int, lease_s: float) -> None:
        await self._write_as(epoch, _run(update(schema.lease).values(renewed_at=_NOW, lease_s=lease_s)))

    async def resign(self, epoch: int) -> None:
        ending = update(schema.lease).where(schema.lease.c.epoch == epoch).values(lease_s=0.0)
        await self._write(_run(ending))

    async def load(self) -> Saved:
        return await self._read(_load)

    async def commit(self, epoch: int, change: Change) -> None:
        writes = _writes(change)

        def write(connection: Connection) -> None:
            for statement, rows in writes:
                connection.execute(statement, rows)
            self._pruning.after(connection, len(change.events))

        await self._write_as(epoch, write)

    async def claim_token(self, epoch: int, token: Token, change: Change) -> bool:
        claim = (
            update(schema.tokens)
            .where(schema.tokens.c.id == token.id, schema.tokens.c.used_key.in_(("", token.used_key)))
            .values(used_key=token.used_key, doc=codec.encode_token(token))
        )
        writes = _writes(change)

        def write(connection: Connection) -> bool:
            if connection.execute(claim).rowcount != 1:
                return False
            for statement, rows in writes:
                connection.execute(statement, rows)
            return True

        return await self._write_as(epoch, write)

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        table = schema.scale
        if replicas is None:
            await self._write_as(epoch, _run(delete(table).where(table.c.model == model)))
        else:
            await self._write_as(epoch, _run(_UPSERT_SCALE.values(model=model, replicas=replicas, base=base)))

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        await self._write_as(epoch, _run(_UPSERT_KEY.values(id=key.id, doc=codec.encode_key(key))))

    async def set_admin_token(self, epoch: int, token_hash: str) -> None:
        await self._write_as(epoch, _run(update(schema.cluster).values(admin_token_hash=token_hash)))

    async def events(self, *, after: str | None = None, subject: str | None = None, limit: int = 100) -> list[Event]:
        table = schema.events
        query = select(table.c.id, table.c.doc).limit(max(0, limit))
        if subject is not None:
            query = query.where(table.c.subject == subject)
        query = query.order_by(table.c.id.desc()) if after is None else query.where(table.c.id > after).order_by("id")
        rows = await self._read(lambda connection: connection.execute(query).all())
        return [codec.EVENTS.decode(id, doc) for id, doc in (reversed(rows) if after is None else rows)]

    async def backup(self, path: str) -> None:
        self._refuse_closed()
        await self._in(self._readers, partial(back_up, self.path, Path(path)))

    async def close(self) -> None:
        """Lets what was begun end first. Afterwards every verb raises StoreError."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.to_thread(self._end)
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._readers.shutdown()
        self._reading.dispose()
        self._writer.shutdown()
        self._writing.dispose()  # The last connection: SQLite folds the log into the database and removes it.

    async def _write(self, transaction: Transaction[R]) -> R:
        """Run a transaction that holds the write lock from its first statement on."""
        self._refuse_closed()

        def run() -> R:
            with self._writing.begin() as connection:
                return transaction(connection)

        return await self._in(self._writer, run)

    async def _write_as(self, epoch: int, transaction: Transaction[R]) -> R:
        """The same, for the leader of ``epoch`` alone. Raises Fenced."""

        def run(connection: Connection) -> R:
            _check_lead(connection, epoch)
            return transaction(connection)

        return await self._write(run)

    async def _read(self, transaction: Transaction[R]) -> R:
        """Run a transaction that sees one state of the database throughout."""
        self._refuse_closed()

        def run() -> R:
            with self._reading.begin() as connection:
                return transaction(connection)

        return await self._in(self._readers, run)

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[[], R]) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except SQLAlchemyError as error:
            raise store_error(error, self.path) from error
        except (UnicodeError, OverflowError) as error:
            raise StoreError(f"{error}: it can't be stored, and nothing of this step was written") from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.path} is closed")


class _Pruning:
    """Keeps the events within their bound. Lives in the writer's thread."""

    def __init__(self, kept: int, every: int) -> None:
        self._kept = kept
        self._every = every
        self._written = every  # What an earlier run left is not known: look at the first step.

    def after(self, connection: Connection, written: int) -> None:
        """Count what a step wrote; prune, within its transaction, when it is time.

        A step that fails later has only brought the next pruning forward, or put it off by one interval.
        """
        self._written += written
        if self._written < self._every:
            return
        table = schema.events
        newest_to_go = select(table.c.id).order_by(table.c.id.desc()).limit(1).offset(self._kept)
        connection.execute(delete(table).where(table.c.id <= newest_to_go.scalar_subquery()))
        self._written = 0


def _run(statement: Executable) -> Transaction[None]:
    """A transaction of one statement."""

    def run(connection: Connection) -> None:
        connection.execute(statement)

    return run


def _load(connection: Connection) -> Saved:
    scale = connection.execute(select(schema.scale).order_by("model")).all()
    made = connection.execute(select(schema.replicas_made).order_by("model")).all()
    certificates = connection.execute(select(schema.certificates).order_by("serial")).all()
    cluster = connection.execute(select(schema.cluster)).one()
    return Saved(
        nodes=tuple(codec.NODES.decode(id, doc) for id, doc in _docs(connection, schema.nodes)),
        replicas=tuple(codec.REPLICAS.decode(id, doc) for id, doc in _docs(connection, schema.replicas)),
        drains=tuple(codec.DRAINS.decode(id, doc) for id, doc in _docs(connection, schema.drains)),
        engines=tuple(codec.ENGINES.decode(id, doc) for id, doc in _docs(connection, schema.engines)),
        keys=tuple(codec.KEYS.decode(id, doc) for id, doc in _docs(connection, schema.api_keys)),
        scale={row.model: row.replicas for row in scale},
        scale_base={row.model: row.base for row in scale},
        replicas_made={row.model: row.made for row in made},
        certificates=tuple(codec.CERTIFICATES.decode(row.serial, row.doc) for row in certificates),
        tokens=tuple(codec.TOKENS.decode(id, doc) for id, doc in _docs(connection, schema.tokens)),
        revocations=tuple(codec.REVOCATIONS.decode(id, doc) for id, doc in _docs(connection, schema.revocations)),
        secret=cluster.secret,
        admin_token_hash=cluster.admin_token_hash,
    )


def _refuse_old_sqlite() -> None:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(f"this Python comes with SQLite {sqlite3.sqlite_version}; llmgw needs {oldest} or newer")


def _claim(path: Path) -> DirectoryLock:
    """Lock the directory, and make it and the database in it what they should be."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, path.parent, "make the data directory") from error
    lock = DirectoryLock.acquire(path.parent)
    try:
        _make_private(path)
        prepare(path)
    except OSError as error:
        lock.release()
        raise file_error(error, path, "open the store") from error
    except BaseException:
        lock.release()
        raise
    return lock


def _make_private(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _take_lead(connection: Connection, holder: str, lease_s: float, alone: bool) -> Lead | None:
    """Judge and write in one transaction, which holds the write lock from its beginning."""
    lease = schema.lease
    columns = (lease.c.epoch, lease.c.holder, lease.c.renewed_at, lease.c.lease_s)
    row = connection.execute(select(*columns, _NOW.label("now"))).one()
    before = Lease(epoch=row.epoch, holder=row.holder, renewed_at=row.renewed_at, lease_s=row.lease_s)
    if not may_take(before, holder, row.now, alone=alone):
        connection.execute(update(lease).values(renewed_at=before.seen_at(row.now).renewed_at))
        return None
    # An epoch is never lower than the database's clock: one that was restored from a backup must not hand out
    # epochs again that agents have already seen.
    taken = before.taken(holder, row.now, lease_s, lowest_epoch=int(row.now))
    connection.execute(
        update(lease).values(
            epoch=taken.epoch,
            holder=taken.holder,
            renewed_at=taken.renewed_at,
            lease_s=taken.lease_s,
            taken_at=func.datetime("now"),
        )
    )
    return lead_after(before, taken)


def _check_lead(connection: Connection, epoch: int) -> None:
    """Write with the epoch in the WHERE, first in the transaction: whoever is not the leader writes nothing after it.

    A write and not a read, so that it holds the row until the end also where writers run side by side.
    """
    lease = schema.lease
    held = update(lease).where(lease.c.epoch == epoch, lease.c.epoch > 0).values(writes=lease.c.writes + 1)
    if connection.execute(held).rowcount == 1:
        return
    now = connection.execute(select(lease)).one()
    raise fenced(epoch, now.epoch, now.holder)


def _docs(connection: Connection, table: Table) -> list[tuple[str, str]]:
    rows = connection.execute(select(table.c.id, table.c.doc).order_by(table.c.id))
    return [(row.id, row.doc) for row in rows]


def _writes(change: Change) -> list[tuple[Executable, Rows]]:
    """The statements of a step, without those that have nothing to write. Removals come last and win."""
    writes: list[tuple[Executable, Rows]] = [
        (_UPSERT_NODE, [{"id": node.id, "doc": codec.encode_node(node)} for node in change.nodes]),
        (_UPSERT_REPLICA, [{"id": replica.id, "doc": codec.encode_replica(replica)} for replica in change.replicas]),
        (_UPSERT_DRAIN, [{"id": drain.node, "doc": codec.encode_drain(drain)} for drain in change.drains]),
        (_UPSERT_ENGINE, [{"id": each.name, "doc": codec.encode_engine(each)} for each in change.engines]),
        (_RAISE_MADE, [{"model": model, "made": made} for model, made in change.replicas_made.items()]),
        (
            _ENTER_CERTIFICATE,
            [
                {"serial": each.serial, "node": each.node, "doc": codec.encode_certificate(each)}
                for each in change.certificates
            ],
        ),
        (
            _UPSERT_TOKEN,
            [{"id": each.id, "used_key": each.used_key, "doc": codec.encode_token(each)} for each in change.tokens],
        ),
        (_UPSERT_REVOCATION, [{"id": each.id, "doc": codec.encode_revocation(each)} for each in change.revocations]),
        (_ADD_EVENT, [_event_row(event) for event in change.events]),
        (_REMOVE_NODE, [{"gone": node} for node in change.removed_nodes]),
        (_REMOVE_REPLICA, [{"gone": replica} for replica in change.removed_replicas]),
        (_REMOVE_DRAIN, [{"gone": node} for node in change.removed_drains]),
        (_REMOVE_CERTIFICATE, [{"gone": serial} for serial in change.removed_certificates]),
        (_REMOVE_TOKEN, [{"gone": token} for token in change.removed_tokens]),
        (_REMOVE_REVOCATION, [{"gone": revocation} for revocation in change.removed_revocations]),
    ]
    return [(statement, rows) for statement, rows in writes if rows]


def _event_row(event: Event) -> dict[str, str]:
    return {"id": event.id, "subject": event.subject, "doc": codec.encode_event(event)}


def _upsert(table: Table, *columns: str) -> Insert:
    statement = insert(table)
    key = table.primary_key.columns
    return statement.on_conflict_do_update(key, set_={column: statement.excluded[column] for column in columns})


def _raise_made() -> Insert:
    table = schema.replicas_made
    statement = insert(table)
    return statement.on_conflict_do_update(
        [table.c.model], set_={"made": func.max(table.c.made, statement.excluded.made)}
    )


def _enter_certificate() -> Insert:
    """A serial stays with the node that it was first entered for."""
    table = schema.certificates
    statement = insert(table)
    same_node = table.c.node == statement.excluded.node
    return statement.on_conflict_do_update([table.c.serial], set_={"doc": statement.excluded.doc}, where=same_node)


_UPSERT_NODE = _upsert(schema.nodes, "doc")
_UPSERT_REPLICA = _upsert(schema.replicas, "doc")
_UPSERT_DRAIN = _upsert(schema.drains, "doc")
_UPSERT_ENGINE = _upsert(schema.engines, "doc")
_UPSERT_KEY = _upsert(schema.api_keys, "doc")
_UPSERT_SCALE = _upsert(schema.scale, "replicas", "base")
_RAISE_MADE = _raise_made()
_ENTER_CERTIFICATE = _enter_certificate()
_UPSERT_TOKEN = _upsert(schema.tokens, "used_key", "doc")
_UPSERT_REVOCATION = _upsert(schema.revocations, "doc")
_ADD_EVENT = insert(schema.events).on_conflict_do_nothing()  # A step that is committed again adds no event twice.
_REMOVE_NODE = delete(schema.nodes).where(schema.nodes.c.id == bindparam("gone"))
_REMOVE_DRAIN = delete(schema.drains).where(schema.drains.c.id == bindparam("gone"))
_REMOVE_REPLICA = delete(schema.replicas).where(schema.replicas.c.id == bindparam("gone"))
_REMOVE_CERTIFICATE = delete(schema.certificates).where(schema.certificates.c.serial == bindparam("gone"))
_REMOVE_TOKEN = delete(schema.tokens).where(schema.tokens.c.id == bindparam("gone"))
_REMOVE_REVOCATION = delete(schema.revocations).where(schema.revocations.c.id == bindparam("gone"))
