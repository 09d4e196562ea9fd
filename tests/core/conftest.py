import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from core.db import Database
from core.migrate import upgrade
from core.models import Table
from tests.servers import Postgres


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
