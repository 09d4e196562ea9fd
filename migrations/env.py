"""Run by Alembic for every command. core/database/migrate.py passes a connection with an open transaction."""

from alembic import context

from core.database.tables import Table

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Table.metadata,
    # SQLite cannot alter most of a table in place; there, Alembic copies it.
    render_as_batch=connection.dialect.name == "sqlite",
)
context.run_migrations()
