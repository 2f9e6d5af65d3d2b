"""What alembic runs: the steps, on the connection that it was given, within the transaction that is open there."""

from __future__ import annotations

from alembic import context

from belljar.service.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite changes a column by copying the table
)
with context.begin_transaction():
    context.run_migrations()
