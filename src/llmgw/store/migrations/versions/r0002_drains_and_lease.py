"""Drains, and how long a lead lasts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drains",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drains")),
    )
    op.add_column("lease", sa.Column("renewed_at", sa.Float, nullable=False, server_default="0"))
    op.add_column("lease", sa.Column("lease_s", sa.Float, nullable=False, server_default="0"))
