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

SECRET_BYTES = 32


def alembic_config() -> Config:
    config = Config()
    scripts = Path(__file__).with_name("migrations")
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return config


def head_revision() -> str:
    """The newest schema that this llmgw knows."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None, "llmgw comes with at least one revision"
    return head


def prepare(path: Path) -> None:
    """Check the file, bring it to the newest schema, and give it its first rows, in one transaction.

    An empty file is new. Raises StoreError, with the file as it was, where it is damaged, not llmgw's, or of a
    newer llmgw.
    """
    try:
        revision = _revision_of(path)
        if revision is not None:
            _refuse_newer(path, revision)
        _upgrade(path)
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
        rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if _VERSION in tables else []
    if application != schema.APPLICATION_ID or len(rows) != 1:
        raise StoreError(
            f"{path} is a database, but not one that llmgw made (it has {', '.join(sorted(tables)[:5])}). "
            "Nothing was changed. Name another file (store: in server.yaml)"
        )
    return str(rows[0][0])


_VERSION = "alembic_version"


def _refuse_damaged(path: Path, connection: sqlite3.Connection) -> None:
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StoreError(
            f"{path} is damaged: {verdict}. Keep the file for later, check the disk, "
            "and restore a backup (docs/backup.md)"
        )


def _refuse_newer(path: Path, revision: str) -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    try:
        scripts.get_revision(revision)
    except (CommandError, RevisionError) as error:
        raise StoreError(
            f"{path} was written by a newer llmgw: its schema is revision {revision}, and llmgw v{VERSION} knows "
            f"revisions up to {head_revision()}. Nothing was changed. Run the newer llmgw, or restore a backup that "
            "was made before the upgrade (docs/backup.md)"
        ) from error


def _upgrade(path: Path) -> None:
    config = alembic_config()
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
