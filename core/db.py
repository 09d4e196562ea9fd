"""Engine, sessions, and the unit of work: one transaction, and messages that leave only after it."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Double, Engine, Text, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from core import audit, private
from core.audit import OPERATOR, Actor


class db_now(FunctionElement[float]):
    """The database's clock in Unix seconds: leases of many machines are compared by one clock, not theirs."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "postgresql")
def _pg_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@compiles(db_now, "sqlite")
def _sqlite_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


class json_text(FunctionElement[str]):
    """json_text(column, key): what a JSON object has at that key, NULL if nothing.

    Not `column[key]`: SQLAlchemy writes the key into a JSON path there, which fails on a quotation mark in it and
    finds no key that is not ASCII.
    """

    type = Text()
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
    """SQLite in WAL mode or PostgreSQL, with the settings that make both safe for many processes."""
    if make_url(url).get_backend_name() == "sqlite":
        return _open_sqlite(url)
    # A server that vanishes without a word must not hold a heartbeat for the minutes TCP would take to notice.
    limits = {"connect_timeout": 10, "tcp_user_timeout": 20_000, "keepalives_idle": 10}
    return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=20, connect_args=limits)


def _open_sqlite(url: str) -> Engine:
    database = make_url(url).database
    if database:
        private.make_folder(Path(database).parent)
    engine = create_engine(url, connect_args={"timeout": 30}, pool_size=10, max_overflow=20)

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Any, record: Any, arguments: list[Any], options: dict[str, Any]) -> None:
        # SQLite would make it with mode 0644. It gives the -wal and -shm files the mode of the database.
        if database:
            with suppress(OSError):  # SQLite says what is wrong
                private.make_file(Path(database))

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we open transactions ourselves, below
        # FULL: a power cut takes back no commit that was answered. NORMAL would, since it syncs the WAL rarely.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at the start: a transaction that read first and then wants to write
        # would fail at once with "database is locked", whatever the busy timeout. Readers never need it.
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def is_away(error: BaseException) -> bool:
    """Whether the database may answer again if one only waits: it is restarting, out of reach, locked or full."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError)  # SQLAlchemy's own: no connection in the pool became free
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    if isinstance(error.orig, sqlite3.Error):
        # SQLite calls nearly everything operational, a missing table included.
        return any(
            word in str(error.orig) for word in ("locked", "busy", "full", "disk I/O", "unable to open")
        )
    return isinstance(error, OperationalError)


class Database:
    """The two ways to a session: `write` is one transaction that commits at the end, `read` sees one snapshot."""

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

    def close(self) -> None:
        self.engine.dispose()

    def _snapshot(self) -> dict[str, Any]:
        if self.engine.dialect.name == "sqlite":
            return {"read_only": True}  # see on_begin
        # By default every PostgreSQL statement sees what was committed before it, not before the transaction.
        return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


Send = Callable[[str, str], bool]
"""send(task name, queue): a wake-up for whoever listens on that queue. False: the broker was not reached."""


@dataclass
class Work:
    """What one request or task does to the database, for whom, and whom it will wake once that is durable."""

    session: Session
    actor: Actor = OPERATOR
    outbox: list[tuple[str, str]] = field(default_factory=list)

    def wake(self, task: str, queue: str) -> None:
        self.outbox.append((task, queue))

    def record(self, action: str, target: str, data: dict[str, Any] | None = None) -> None:
        """Into the audit log, in the same transaction; see core/audit.py."""
        audit.record(self.session, actor=self.actor, action=action, target=target, data=data)


@contextmanager
def unit_of_work(database: Database, send: Send, actor: Actor = OPERATOR) -> Iterator[Work]:
    """One transaction. Messages leave after the commit; an exception rolls back and sends nothing."""
    with database.write() as session:
        work = Work(session, actor)
        yield work
    for task, queue in work.outbox:
        send(task, queue)
