"""Bring a database to the schema of this version of the code."""

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
from core.db import Database, open_engine

log = logging.getLogger(__name__)

# Any number, as long as no other program locks the same one in this database.
LOCK_KEY = 0x7265_6772_6166_74  # "regraft"
# A change of a table waits for whoever reads it, such as a pg_dump, and all others wait behind the change. It gives
# up before they notice, and whoever started it tries again.
LOCK_PATIENCE = "5s"
LOCK_SECONDS, LOCK_TRY = 5.0, "50ms"


class InvalidDatabaseUrl(ValueError):
    """There can be no database at this URL. The message does not quote it: it may have a password."""


class SchemaNotReady(Exception):
    """There is no database, or it has the schema of an older version. The message is for operators."""


def open_unchanged(database_url: str) -> Database:
    """Open a database without migrating or creating it.

    Raises:
        InvalidDatabaseUrl: as `upgrade`.
        SchemaNotReady: this version cannot work on it before a migration.
    """
    name = make_url(database_url).database if _backend_of(database_url) == "sqlite" else None
    if name is not None and not Path(name).is_file():
        raise SchemaNotReady(f"There is no database at {name}.")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    database = Database(database_url)
    try:
        with database.read() as session:
            if not is_ready(session.connection()):
                raise SchemaNotReady(
                    "The database has no schema, or that of an older version: run `regraft-server migrate` first."
                )
    except BaseException:
        database.close()
        raise
    return database


def upgrade(database_url: str) -> None:
    """Apply the migrations that are missing, all of them or none. Any number of processes may call it at once.

    The first does the work while the others wait, and then find nothing left to do. So does a version that finds the
    schema of a later one, which it can use (docs/operations.md): it starts again beside its successor, or instead.

    Raises:
        InvalidDatabaseUrl: it is no URL, of another kind of database, or of SQLite in memory.
    """
    with migrating(database_url) as connection:
        if is_later(connection):
            log.warning("the database is of a later version of regraft; its schema is used as it is")
            return
        if connection.dialect.name == "postgresql" and not is_ready(connection):
            lock_all_tables(connection)
        command.upgrade(alembic_config(connection), "head")


def is_ready(connection: Connection) -> bool:
    """Whether this version can work on the schema: it is its own, or that of a later version."""
    ours = ScriptDirectory.from_config(alembic_config(connection)).get_heads()
    return set(_current(connection)) == set(ours) or is_later(connection)


def is_later(connection: Connection) -> bool:
    """Whether a migration was applied that this version has never heard of."""
    known = {one.revision for one in ScriptDirectory.from_config(alembic_config(connection)).walk_revisions()}
    return not known.issuperset(_current(connection))


def _current(connection: Connection) -> tuple[str, ...]:
    return MigrationContext.configure(connection).get_current_heads()


@contextmanager
def migrating(database_url: str) -> Iterator[Connection]:
    """A transaction that nobody else has at the same time, for changes of the schema."""
    # Its INFO lines say at every start that there is a database.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if _backend_of(database_url) == "sqlite":
        with _file_lock(database_url), _transaction(database_url) as connection:
            yield connection
    else:
        with _transaction(database_url) as connection:
            # The lock of the transaction, not of the session: a session from a pool may outlive its user.
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
            connection.execute(text(f"set local lock_timeout = '{LOCK_PATIENCE}'"))
            yield connection


def _backend_of(database_url: str) -> str:
    """ "sqlite" or "postgresql"."""
    try:
        backend = make_url(database_url).get_backend_name()
    except (ArgumentError, ValueError) as cause:  # ValueError: the port is no number
        raise InvalidDatabaseUrl(
            "it is no URL of a database, such as postgresql://user:password@host/name or sqlite:////folder/regraft.db"
        ) from cause
    if backend not in ("sqlite", "postgresql"):
        raise InvalidDatabaseUrl(
            f"{backend} is not supported: use PostgreSQL (postgresql://…) or SQLite (sqlite:///…)"
        )
    return backend


def alembic_config(connection: Connection) -> Config:
    """What Alembic's commands need to work on this connection, without an alembic.ini."""
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
                # SQLite changes a table by copying it, and dropping the original would then delete or refuse the
                # rows that refer to it. The switch does nothing inside a transaction, so it comes before ours.
                connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                yield connection
    finally:
        engine.dispose()


def lock_all_tables(connection: Connection, seconds: float = LOCK_SECONDS) -> None:
    """Have all tables to ourselves, or after so many seconds none of them: OperationalError, "lock timeout".

    A migration that took them one by one would meet a request that holds one and asks for another, and PostgreSQL
    would end one of the two after a second, as a deadlock. This lets go of all it has before that, and tries again.
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
            time.sleep(0.05)  # whoever waited for us goes first


@contextmanager
def _file_lock(database_url: str) -> Iterator[None]:
    # BEGIN IMMEDIATE would do for the migration, but not for the switch to WAL that comes before it: two processes
    # that open a new database at once can fail there with "database is locked".
    name = make_url(database_url).database
    if name is None or name in ("", ":memory:"):
        raise InvalidDatabaseUrl(
            "SQLite in memory is not supported: every process would have a database of its own"
        )
    database = Path(name)
    private.make_folder(database.parent)
    with Path(f"{database}.migrate.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go by the close
        yield
