"""Brings a database file to the schema of this llmgw. Blocking: run it in a thread, under the directory's lock."""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError

from llmgw.store import schema
from llmgw.store.base import StoreError
from llmgw.store.connect import migrating_engine, plain_connection
from llmgw.store.faults import store_error
from llmgw.version import VERSION

MIGRATIONS = Path(__file__).with_name("migrations")
SECRET_BYTES = 32

_VERSION_TABLE = "alembic_version"


def alembic_config(scripts: Path = MIGRATIONS) -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return config


def prepare(path: Path, config: Config | None = None) -> None:
    """Check the file, bring it to the newest schema, and give it its first rows, in one transaction.

    An empty file is new. Raises StoreError, with the file as it was, where it is damaged, not llmgw's, or of a
    newer llmgw. ``config`` says where the revisions are; by default those of this llmgw.
    """
    config = config or alembic_config()
    try:
        revision = _revision_of(path)
        if revision is not None:
            _refuse_newer(path, revision, ScriptDirectory.from_config(config))
        _upgrade(path, config)
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise store_error(error, path) from error


def _revision_of(path: Path) -> str | None:
    """The schema's revision in the file; None for a new one."""
    with closing(plain_connection(path)) as connection:
        _refuse_damaged(path, connection)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return None
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        rows = (
            connection.execute("SELECT version_num FROM alembic_version").fetchall() if _VERSION_TABLE in tables else []
        )
    if application != schema.APPLICATION_ID or len(rows) != 1:
        raise StoreError(
            f"{path} is a database, but not one that llmgw made (it has {', '.join(sorted(tables)[:5])}). "
            "Nothing was changed. Name another file (store: in server.yaml)"
        )
    return str(rows[0][0])


def _refuse_damaged(path: Path, connection: sqlite3.Connection) -> None:
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        found = " ".join(verdict.replace("*** in database main ***", "").split())
        raise StoreError(
            f"{path} is damaged: {found}. Keep the file for later, check the disk, "
            "and restore a backup (docs/backup.md)"
        )


def _refuse_newer(path: Path, revision: str, scripts: ScriptDirectory) -> None:
    try:
        scripts.get_revision(revision)
    except (CommandError, RevisionError) as error:
        raise StoreError(
            f"{path} was written by a newer llmgw: its schema is revision {revision}, and llmgw v{VERSION} knows "
            f"revisions up to {scripts.get_current_head()}. Nothing was changed. Run the newer llmgw, or restore a "
            "backup that was made before the upgrade (docs/backup.md)"
        ) from error


def _upgrade(path: Path, config: Config) -> None:
    engine = migrating_engine(path)
    try:
        with engine.connect() as connection:
            (mode,) = connection.exec_driver_sql("PRAGMA journal_mode").one()
            if mode != "wal":
                raise StoreError(
                    f"{path} can't keep a write-ahead log (journal mode {mode!r}): expected a local file system with "
                    "shared memory. Put the store on a local disk, not on a network mount"
                )
            connection.rollback()
            with connection.begin():
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
                _first_rows(connection)
    finally:
        engine.dispose()


def _first_rows(connection: Connection) -> None:
    connection.exec_driver_sql(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    connection.execute(
        insert(schema.cluster).values(id=1, secret=secrets.token_hex(SECRET_BYTES)).on_conflict_do_nothing()
    )
    connection.execute(
        insert(schema.lease).values(id=1, epoch=0, holder="", taken_at="", writes=0).on_conflict_do_nothing()
    )
