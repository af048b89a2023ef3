"""Certificates with all that is known of them, join tokens, and what was revoked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0004"
down_revision = "r0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "certificates",
        sa.Column("serial", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_certificates")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("used_key", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_table(
        "revocations",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revocations")),
    )
    serials = sa.table("serials", sa.column("serial", sa.Text), sa.column("node", sa.Text))
    certificates = sa.table("certificates", sa.column("serial"), sa.column("node"), sa.column("doc"))
    doc = sa.func.json_object("serial", serials.c.serial, "node", serials.c.node, "source", "file")
    op.execute(
        certificates.insert().from_select(["serial", "node", "doc"], sa.select(serials.c.serial, serials.c.node, doc))
    )
    op.drop_table("serials")
