"""The tables. A row of a thing is its key and ``doc``, the thing as JSON (see ``llmgw.store.codec``).

Whatever changes here needs a migration (``llmgw.store.migrations``); a test holds the two together.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Float, Index, Integer, MetaData, Table, Text

APPLICATION_ID = 0x6C6C6D67
""""llmg", in the header of each of our SQLite files: tells them from other programs' databases."""

metadata = MetaData(
    naming_convention={
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="one_row"), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("holder", Text, nullable=False),
    Column("taken_at", Text, nullable=False),
    Column("writes", Integer, nullable=False),
    Column("renewed_at", Float, nullable=False, server_default="0"),
    Column("lease_s", Float, nullable=False, server_default="0"),
)

cluster = Table(
    "cluster",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="one_row"), primary_key=True),
    Column("secret", Text, nullable=False),
    Column("admin_token_hash", Text),
)

nodes = Table("nodes", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))

replicas = Table("replicas", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))

drains = Table("drains", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))
"""By node."""

engines = Table("engines", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))
"""By name: which builds of each were in effect, and are."""

replicas_made = Table(
    "replicas_made", metadata, Column("model", Text, primary_key=True), Column("made", Integer, nullable=False)
)

scale = Table(
    "scale",
    metadata,
    Column("model", Text, primary_key=True),
    Column("replicas", Integer, nullable=False),
    Column("base", Integer, nullable=False),
)

api_keys = Table("api_keys", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))

certificates = Table(
    "certificates",
    metadata,
    Column("serial", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("doc", Text, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("used_key", Text, nullable=False),
    Column("doc", Text, nullable=False),
)

revocations = Table("revocations", metadata, Column("id", Text, primary_key=True), Column("doc", Text, nullable=False))

events = Table(
    "events",
    metadata,
    Column("id", Text, primary_key=True),
    Column("subject", Text, nullable=False),
    Column("doc", Text, nullable=False),
    Index("ix_events_subject_id", "subject", "id"),
)
