from pathlib import Path

import pytest

from core.database.engine import Database
from tests.servers import Postgres


@pytest.fixture
def database(request: pytest.FixtureRequest, database_kind: str) -> Database:
    """Migrated and empty."""
    database: Database = request.getfixturevalue(f"{database_kind}_database")
    return database


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> str:
    """A database without any table."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
