"""How every connection to our SQLite files is set up."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

BUSY_TIMEOUT_S = 5.0
"""How long a write waits for another program that has the database open (a shell)."""

OLDEST_SQLITE = (3, 35, 0)
"""The first with RETURNING."""

_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "journal_size_limit=67108864")


def writing_engine(path: Path) -> Engine:
    """One connection at most; each transaction takes the write lock when it begins."""
    engine = create_engine(_url(path), connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=1, max_overflow=0)
    _set_up(engine, _PRAGMAS, "BEGIN IMMEDIATE")
    return engine


def reading_engine(path: Path, connections: int) -> Engine:
    """Connections that can't write. Each transaction sees one state of the database, while others write on."""
    engine = create_engine(_url(path), connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=connections, max_overflow=0)
    _set_up(engine, ("query_only=ON",), "BEGIN")
    return engine


def migrating_engine(path: Path) -> Engine:
    """For once, before anything else has the file open."""
    engine = create_engine(_url(path), connect_args={"timeout": BUSY_TIMEOUT_S}, poolclass=NullPool)
    _set_up(engine, _PRAGMAS, "BEGIN IMMEDIATE")
    return engine


def plain_connection(path: Path) -> sqlite3.Connection:
    """A connection without any set-up, in autocommit, to look at a file. It must exist."""
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _url(path: Path) -> URL:
    return URL.create("sqlite+pysqlite", database=str(path))


def _set_up(engine: Engine, pragmas: tuple[str, ...], begin: str) -> None:
    # The driver would begin transactions by itself, deferred and not before every statement: here they are ours.
    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
