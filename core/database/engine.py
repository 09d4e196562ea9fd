"""Engine, sessions, and the unit of work: one transaction, and messages that leave only after it."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    Connection,
    Double,
    Engine,
    ExceptionContext,
    create_engine,
    event,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from core import outages, private
from core.database import audit
from core.database.audit import OPERATOR, Actor
from core.database.columns import StorableText
from core.text import to_json


class db_now(FunctionElement[float]):
    """The database's clock in Unix seconds: leases of many machines must be compared by one clock."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "postgresql")
def _pg_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@compiles(db_now, "sqlite")
def _sqlite_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


def earliest_now(session: Session) -> float:
    """The earlier of this machine's time and the database's, by which data is deleted: a clock that is ahead deletes
    nothing early, unless both are.
    """
    return min(time.time(), session.scalars(select(db_now())).one())


class json_text(FunctionElement[str]):
    """json_text(column, key): the value of a key of a JSON object as text, NULL if absent.

    Not `column[key]`: SQLAlchemy writes the key into a JSON path, which fails on quotation marks and does not find
    non-ASCII keys.
    """

    type = StorableText()
    inherit_cache = True


@compiles(json_text, "postgresql")
def _pg_json_text(element: json_text, compiler: SQLCompiler, **kw: Any) -> str:
    column, key = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({column} ->> {key})"


@compiles(json_text, "sqlite")
def _sqlite_json_text(element: json_text, compiler: SQLCompiler, **kw: Any) -> str:
    column, key = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"(SELECT value FROM json_each({column}) WHERE key = {key})"


def open_engine(url: str) -> Engine:
    """Open SQLite in WAL mode or PostgreSQL, with settings that are safe for many processes."""
    if make_url(url).get_backend_name() == "sqlite":
        return _open_sqlite(url)
    options = {
        # A server that disappears must not block a heartbeat until the TCP timeout, which takes minutes.
        "connect_timeout": 10,
        "tcp_user_timeout": 20_000,
        "keepalives_idle": 10,
        # A prepared statement belongs to one server connection, and poolers such as pgbouncer give each transaction
        # another one. psycopg would prepare after five uses.
        "prepare_threshold": None,
    }
    engine = create_engine(
        url, pool_pre_ping=True, pool_size=10, max_overflow=20, connect_args=options, json_serializer=to_json
    )

    @event.listens_for(engine, "checkin")
    def on_checkin(connection: Any, record: Any) -> None:
        # SQLAlchemy resets the READ ONLY of `Database.read` to READ WRITE, which overrides the server's own default
        # and fails on a standby. psycopg sends neither of them for None.
        if connection is not None and not connection.closed:
            connection.read_only = None

    @event.listens_for(engine, "handle_error")
    def on_error(context: ExceptionContext) -> None:
        # A ping succeeds on a standby and behind a pooler, so the connection would be used again for ever.
        error = context.sqlalchemy_exception
        if isinstance(error, DBAPIError) and outages.spoils_connection(error):
            context.is_disconnect = True
            context.invalidate_pool_on_disconnect = outages.leads_to_standby(error)

    return engine


def _open_sqlite(url: str) -> Engine:
    database = make_url(url).database
    if database:
        private.make_folder(Path(database).parent)
    engine = create_engine(
        url, connect_args={"timeout": 30}, pool_size=10, max_overflow=20, json_serializer=to_json
    )

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Any, record: Any, arguments: list[Any], options: dict[str, Any]) -> None:
        # SQLite would create it with mode 0644. The -wal and -shm files inherit the mode of the database.
        if database:
            with suppress(OSError):  # SQLite reports the error
                private.make_file(Path(database))

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions are opened in on_begin
        use_wal(connection)
        # FULL: a power failure loses no committed transaction. NORMAL could, since it syncs the WAL rarely.
        for pragma in ("synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at the start: a transaction that reads first and writes later would fail
        # with "database is locked", regardless of the busy timeout. Readers do not need it.
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch the database to WAL.

    Raises:
        sqlite3.OperationalError: the filesystem has no shared memory, which WAL needs. SQLite keeps its rollback
            journal then, with which every reader blocks the writers.
    """
    [mode] = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the filesystem has no shared memory for WAL (journal_mode: {mode})")


READ_ONLY = "The database accepts no writes: it is a standby, or default_transaction_read_only is set."


class Database:
    """Provides sessions: `write` is one transaction that commits at the end, `read` sees one snapshot."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)
        self._write = sessionmaker(self.engine, expire_on_commit=False)
        self._read = sessionmaker(self.engine.execution_options(**self._snapshot()), expire_on_commit=False)

    def write(self) -> AbstractContextManager[Session]:
        return self._write.begin()

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._read() as session:
            yield session

    def accepts_writes(self) -> bool:
        """False on a standby, and where `default_transaction_read_only` is set, as for a disk that is nearly full.

        SQLite: always True; it has no such state.
        """
        if self.engine.dialect.name == "sqlite":
            return True
        with self.write() as session:
            return bool(session.scalar(text("show transaction_read_only")) == "off")

    def close(self) -> None:
        self.engine.dispose()

    def _snapshot(self) -> dict[str, Any]:
        if self.engine.dialect.name == "sqlite":
            return {"read_only": True}  # see on_begin
        # By default each PostgreSQL statement sees the commits before it, not those before the transaction.
        return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class WakeMessage(NamedTuple):
    """A message that wakes the workers of a queue. `about` is the id of a job or run, for logs and monitors only."""

    task: str
    queue: str
    about: str


class Send(Protocol):
    """Wakes up the workers of a queue. `about` is the id of a job or run, for logs and monitors of the broker.

    False: the broker was not reached.
    """

    def __call__(self, task: str, queue: str, about: str = "") -> bool: ...


@dataclass
class Work:
    """The session of one request or task, its author, and the wake-ups to send after the commit."""

    session: Session
    actor: Actor = OPERATOR
    outbox: list[WakeMessage] = field(default_factory=list)

    def wake(self, task: str, queue: str, about: str) -> None:
        self.outbox.append(WakeMessage(task, queue, about))

    def record(self, action: str, target: str, data: dict[str, Any] | None = None) -> None:
        """Append to the audit log in the same transaction; see core/database/audit.py."""
        audit.record(self.session, actor=self.actor, action=action, target=target, data=data)


@contextmanager
def unit_of_work(database: Database, send: Send, actor: Actor = OPERATOR) -> Iterator[Work]:
    """One transaction. Messages leave after the commit; an exception rolls back and sends nothing."""
    with database.write() as session:
        work = Work(session, actor)
        yield work
    for wake_up in work.outbox:
        send(*wake_up)
