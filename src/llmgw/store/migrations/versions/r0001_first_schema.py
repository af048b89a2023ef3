"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "lease",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name=op.f("ck_lease_one_row"))),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("taken_at", sa.Text, nullable=False),
        sa.Column("writes", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
    )
    op.create_table(
        "cluster",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name=op.f("ck_cluster_one_row"))),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("admin_token_hash", sa.Text),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster")),
    )
    for table in ("nodes", "replicas", "api_keys"):
        op.create_table(
            table,
            sa.Column("id", sa.Text, nullable=False),
            sa.Column("doc", sa.Text, nullable=False),
            sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{table}")),
        )
    op.create_table(
        "replicas_made",
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("made", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_replicas_made")),
    )
    op.create_table(
        "scale",
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("replicas", sa.Integer, nullable=False),
        sa.Column("base", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_scale")),
    )
    op.create_table(
        "serials",
        sa.Column("serial", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_serials")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_subject_id"), "events", ["subject", "id"])
