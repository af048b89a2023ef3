"""Runs migrations on the connection, and in the transaction, that ``llmgw.store.migrate`` hands over."""

from __future__ import annotations

from alembic import context

from llmgw.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
context.run_migrations()
