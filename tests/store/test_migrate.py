from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from llmgw.store import schema
from llmgw.store.base import Change, StoreError
from llmgw.store.connect import migrating_engine
from llmgw.store.migrate import MIGRATIONS, alembic_config, prepare
from llmgw.store.sqlite import SqliteStore
from llmgw.version import VERSION

from .leading import lead
from .samples import certificate, event, node, replica, revocation, token

DATABASES = Path(__file__).with_name("databases")

NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "r9999", "{head}", None, None
def upgrade():
    op.add_column("nodes", sa.Column("rack", sa.Text))
    op.execute("UPDATE nodes SET rack = 'a3'")
    op.execute("{last}")
"""


def head() -> str:
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert revision is not None
    return revision


def newer_llmgw(directory: Path, last: str = "SELECT 1") -> Path:
    """Revisions with one more than this llmgw has, whose last statement is ``last``."""
    scripts = directory / "newer"
    shutil.copytree(MIGRATIONS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "r9999_racks.py").write_text(NEXT_REVISION.format(head=head(), last=last))
    return scripts


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "llmgw.db"
    store = await SqliteStore.open(path)
    epoch = await lead(store, "a")
    await store.commit(epoch, Change(nodes=[node()], replicas=[replica()], events=[event(1)]))
    await store.close()
    return path


def test_the_migrations_make_what_the_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.db"
    path.touch()
    prepare(path)
    engine = migrating_engine(path)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()
    assert rows(path, "SELECT version_num FROM alembic_version") == [(head(),)]


async def test_opening_again_keeps_everything(filled: Path) -> None:
    before = rows(filled, "SELECT secret, doc, epoch FROM cluster, nodes, lease")
    await (await SqliteStore.open(filled)).close()
    assert rows(filled, "SELECT secret, doc, epoch FROM cluster, nodes, lease") == before


async def test_a_database_of_a_newer_llmgw_is_refused_with_both_revisions(tmp_path: Path, filled: Path) -> None:
    prepare(filled, alembic_config(newer_llmgw(tmp_path)))
    content = filled.read_bytes()
    with pytest.raises(StoreError) as refused:
        await SqliteStore.open(filled)
    assert str(refused.value) == (
        f"{filled} was written by a newer llmgw: its schema is revision r9999, and llmgw v{VERSION} knows revisions up "
        f"to {head()}. Nothing was changed. Run the newer llmgw, or restore a backup that was made before the upgrade "
        "(docs/backup.md)"
    )
    assert filled.read_bytes() == content


def test_an_upgrade_keeps_what_is_there(tmp_path: Path, filled: Path) -> None:
    before = rows(filled, "SELECT secret, epoch, nodes.doc, events.doc FROM cluster, lease, nodes, events")
    prepare(filled, alembic_config(newer_llmgw(tmp_path)))
    assert rows(filled, "SELECT secret, epoch, nodes.doc, events.doc FROM cluster, lease, nodes, events") == before
    assert rows(filled, "SELECT rack FROM nodes") == [("a3",)]


async def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path, filled: Path) -> None:
    def everything() -> list[str]:
        with closing(sqlite3.connect(filled)) as connection:
            return list(connection.iterdump())

    before = everything()
    with pytest.raises(StoreError, match="no such table: nowhere"):
        prepare(filled, alembic_config(newer_llmgw(tmp_path, last="DELETE FROM nowhere")))
    assert everything() == before
    store = await SqliteStore.open(filled)
    assert len((await store.load()).nodes) == 1
    await store.close()


@pytest.mark.parametrize("dump", sorted(DATABASES.glob("*.sql")), ids=lambda dump: dump.stem)
async def test_what_an_earlier_llmgw_wrote_is_read(tmp_path: Path, dump: Path) -> None:
    """Each revision leaves one such file here when it is made; none is ever changed."""
    path = tmp_path / "llmgw.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())
        connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    store = await SqliteStore.open(path)
    saved, events = await store.load(), await store.events()
    assert await lead(store, "a") > 1_764_439_403
    await store.close()
    assert [(node.id, node.state) for node in saved.nodes] == [("llmgw-node01", "ready")]
    assert [(replica.id, replica.generation, len(replica.story)) for replica in saved.replicas] == [("m-abcde", 3, 3)]
    assert (saved.scale, saved.scale_base, saved.replicas_made) == ({"m": 2}, {"m": 1}, {"m": 1})
    assert [key.id for key in saved.keys] == ["key-abcde"]
    assert [(each.serial, each.node, each.state) for each in saved.certificates] == [("0a", "llmgw-node01", "current")]
    assert (saved.secret, saved.admin_token_hash) == ("00" * 32, "cd" * 32)
    if dump.stem >= "r0004":
        assert (saved.certificates, saved.tokens, saved.revocations) == (
            (certificate(state="current"),),
            (token(),),
            (revocation("n9"),),
        )
    assert [event.words for event in events] == ["is ready"]
    assert [each.name for each in saved.engines] == (["llamacpp"] if dump.stem >= "r0003" else [])
    assert [drain.node for drain in saved.drains] == (["llmgw-node01"] if dump.stem >= "r0002" else [])


def test_every_revision_left_a_database() -> None:
    revisions = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    assert {dump.stem for dump in DATABASES.glob("*.sql")} == revisions
