"""Handles on the real servers that the tests start."""

import itertools
from typing import Any

from sqlalchemy import create_engine, text


class Postgres:
    """A PostgreSQL server of our own, and any number of databases in it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._numbers = itertools.count()
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            self._execute(f"alter system set {setting} = off")  # nothing here must survive a power cut
        self._execute("select pg_reload_conf()")

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        self._execute(f"create database {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        uri: str = self._server.get_uri(database)
        return uri.replace("postgresql://", "postgresql+psycopg://", 1)

    def _execute(self, statement: str) -> None:
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()
