"""Databases that outlive a test: an engine keeps what it has compiled, which is half of the work of a short test."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import event
from sqlalchemy.engine.events import ConnectionEvents, DialectEvents
from sqlalchemy.pool.events import PoolEvents

from core.database.engine import Database

NO_SYNC = "PRAGMA synchronous=OFF"


class SharedDatabase:
    """A `Database` that is lent to one test after the other. Each gets new connections.

    A test that has left a listener on the engine was the last to get it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._database: Database | None = None

    @contextmanager
    def lent(self) -> Iterator[Database]:
        database = self._database or self._new()
        self._database = None
        before = listeners(database)
        yield database
        database.close()
        if listeners(database) == before:
            self._database = database

    def _new(self) -> Database:
        database = Database(self.url)
        if database.engine.dialect.name == "sqlite":
            # Each commit would wait for the disk, and nothing here must survive a power cut.
            event.listen(database.engine, "connect", lambda connection, _: connection.execute(NO_SYNC))
        return database


def listeners(database: Database) -> list[int]:
    """How many functions listen to each event of the engine."""
    engine = database.engine
    kinds = (
        (engine.dispatch, ConnectionEvents),
        (engine.dialect.dispatch, DialectEvents),
        (engine.pool.dispatch, PoolEvents),
    )
    return [
        len(getattr(dispatch, name))
        for dispatch, events in kinds
        for name in sorted(vars(events))
        if not name.startswith("_") and name != "dispatch"
    ]
