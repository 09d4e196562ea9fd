"""Migrates a database to the schema of this version."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, OperationalError

from core import private
from core.addresses import check_is_escaped
from core.database.engine import Database, open_engine

log = logging.getLogger(__name__)

# Any constant that no other program locks in this database.
LOCK_KEY = 0x7265_6772_6166_74  # "regraft"
# Altering a table waits for its readers, such as a pg_dump, and all others queue behind it. It times out before users
# notice; restart the migration then.
LOCK_PATIENCE = "5s"
LOCK_SECONDS, LOCK_TRY = 5.0, "50ms"
OLDER_SCHEMA = "The database schema is older than this version: run the migrations."


class InvalidDatabaseUrl(ValueError):
    """No database can exist at this URL. The message omits the URL, which may contain a password."""


class SchemaNotReady(Exception):
    """The database does not exist or has an older schema. The message is for operators."""


def open_unchanged(database_url: str) -> Database:
    """Open a database without migrating or creating it.

    Raises:
        InvalidDatabaseUrl: as in `upgrade`.
        SchemaNotReady: the database needs a migration.
    """
    name = make_url(database_url).database if backend_of(database_url) == "sqlite" else None
    if name is not None and not Path(name).is_file():
        raise SchemaNotReady(f"There is no database at {name}.")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    database = Database(database_url)
    try:
        with database.read() as session:
            if not is_ready(session.connection()):
                raise SchemaNotReady(
                    "The database schema is missing or older than this version: run `regraft-server migrate` first."
                )
    except BaseException:
        database.close()
        raise
    return database


def upgrade(database_url: str) -> None:
    """Apply the missing migrations in one transaction. Safe to call from any number of processes concurrently.

    One process migrates while the others wait, and then find nothing to do. A version that finds a later schema uses it
    unchanged (docs/howto/upgrade.md), so that it can run beside its successor or after a rollback.

    Raises:
        InvalidDatabaseUrl: it is invalid, of an unsupported database, or of SQLite in memory.
    """
    with migrating(database_url) as connection:
        if is_later(connection):
            log.warning("the database is of a later version of regraft; its schema is used as it is")
            return
        if connection.dialect.name == "postgresql" and not is_ready(connection):
            lock_all_tables(connection)
        command.upgrade(alembic_config(connection), "head")


def is_ready(connection: Connection) -> bool:
    """Whether this version can use the schema: it is its own, or a later one."""
    ours = ScriptDirectory.from_config(alembic_config(connection)).get_heads()
    return set(_current(connection)) == set(ours) or is_later(connection)


def other_schema(connection: Connection) -> str | None:
    """The sentence for a schema that is not this version's own, which may lack what it reads. None: it is."""
    if is_later(connection):
        return "The database schema is of a later version than this one, which it cannot serve: upgrade this one."
    return None if is_ready(connection) else OLDER_SCHEMA


def is_later(connection: Connection) -> bool:
    """Whether an unknown, later migration was applied."""
    known = {one.revision for one in ScriptDirectory.from_config(alembic_config(connection)).walk_revisions()}
    return not known.issuperset(_current(connection))


def _current(connection: Connection) -> tuple[str, ...]:
    return MigrationContext.configure(connection).get_current_heads()


@contextmanager
def migrating(database_url: str) -> Iterator[Connection]:
    """An exclusive transaction for changes of the schema."""
    # Alembic's INFO lines would appear on every start.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if backend_of(database_url) == "sqlite":
        with _file_lock(database_url), _transaction(database_url) as connection:
            yield connection
    else:
        with _transaction(database_url) as connection:
            # A lock of the transaction, not of the session: a pooled session may outlive its user.
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
            connection.execute(text(f"set local lock_timeout = '{LOCK_PATIENCE}'"))
            yield connection


def backend_of(database_url: str) -> str:
    """ "sqlite" or "postgresql"."""
    try:
        url = make_url(database_url)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError) as cause:  # ValueError: invalid port
        raise InvalidDatabaseUrl(
            "it is not a database URL such as postgresql://user:password@host/name or sqlite:////folder/regraft.db"
        ) from cause
    if backend not in ("sqlite", "postgresql"):
        raise InvalidDatabaseUrl(
            f"{backend} is not supported: use PostgreSQL (postgresql://…) or SQLite (sqlite:///…)"
        )
    if url.drivername not in ("sqlite", "postgresql", "postgresql+psycopg"):
        raise InvalidDatabaseUrl(f"{url.drivername}:// names another driver: use {backend}://")
    if backend == "sqlite" and (url.query or (url.database or "").startswith("file:")):
        # Options of SQLite's own URIs switch off locks, among others.
        raise InvalidDatabaseUrl("a URL of SQLite has a path and no options, as sqlite:////folder/regraft.db")
    if backend == "postgresql":
        try:
            check_is_escaped(database_url)
        except ValueError as problem:
            raise InvalidDatabaseUrl(str(problem)) from None
    return backend


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration for this connection, without an alembic.ini."""
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _transaction(database_url: str) -> Iterator[Connection]:
    engine = open_engine(database_url)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                # SQLite alters a table by copying it, and dropping the original would then delete or block the rows
                # that
                # refer to it. The pragma has no effect inside a transaction, so it comes first.
                connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                yield connection
    finally:
        engine.dispose()


def lock_all_tables(connection: Connection, seconds: float = LOCK_SECONDS) -> None:
    """Lock all tables exclusively, or raise OperationalError ("lock timeout") after this many seconds.

    A migration that locked them one by one could deadlock with a request that holds one and requests another, and
    PostgreSQL would abort one of the two after a second. This releases all locks before that, and retries.
    """
    names = inspect(connection).get_table_names()
    if not names:
        return
    quoted = ", ".join(connection.dialect.identifier_preparer.quote(name) for name in names)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with connection.begin_nested():
                connection.execute(text(f"set local lock_timeout = '{LOCK_TRY}'"))
                connection.execute(text(f"lock table {quoted} in access exclusive mode"))
                connection.execute(text(f"set local lock_timeout = '{LOCK_PATIENCE}'"))
            return
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # gives the waiting requests a turn


@contextmanager
def _file_lock(database_url: str) -> Iterator[None]:
    # BEGIN IMMEDIATE would suffice for the migration, but not for the switch to WAL before it: two processes that
    # create a
    # database concurrently can fail there with "database is locked".
    name = make_url(database_url).database
    if name is None or name in ("", ":memory:"):
        raise InvalidDatabaseUrl(
            "SQLite in memory is not supported: every process would have its own database"
        )
    database = Path(name)
    private.make_folder(database.parent)
    with Path(f"{database}.migrate.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by close
        yield
