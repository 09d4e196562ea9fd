from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from core.database.engine import Database, Work
from core.database.tables import Project
from tests import factories
from tests.servers import Postgres


@pytest.fixture
def database(request: pytest.FixtureRequest, database_kind: str) -> Database:
    """Migrated and empty."""
    database: Database = request.getfixturevalue(f"{database_kind}_database")
    return database


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with database.write() as session:
        yield session


@pytest.fixture
def project(session: Session) -> Project:
    return factories.project(session)


@pytest.fixture
def work(session: Session) -> Work:
    return Work(session)


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> str:
    """A database without any table."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
