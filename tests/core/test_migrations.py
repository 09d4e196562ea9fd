import logging
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from core.database.engine import open_engine
from core.database.migrate import alembic_config, migrating, upgrade
from core.database.tables import Table

pytestmark = [pytest.mark.slow, pytest.mark.both_databases]


def tables(url: str) -> set[str]:
    engine = open_engine(url)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    return names


ALL_TABLES = {table.name for table in Table.metadata.sorted_tables} | {"alembic_version"}


def test_an_empty_database_gets_every_table_that_the_models_want(empty_url: str) -> None:
    upgrade(empty_url)

    assert tables(empty_url) == ALL_TABLES


def test_the_migrations_and_the_models_agree(empty_url: str) -> None:
    upgrade(empty_url)

    with migrating(empty_url) as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []


def test_a_second_upgrade_changes_nothing_and_loses_nothing(empty_url: str) -> None:
    upgrade(empty_url)
    with migrating(empty_url) as connection:
        connection.execute(text("insert into organizations values ('org-1', 'acme', 0)"))

    upgrade(empty_url)

    with migrating(empty_url) as connection:
        assert connection.scalar(text("select name from organizations")) == "acme"


def test_every_migration_can_be_taken_back(empty_url: str) -> None:
    upgrade(empty_url)

    with migrating(empty_url) as connection:
        command.downgrade(alembic_config(connection), "base")

    assert tables(empty_url) == {"alembic_version"}


def test_a_migration_that_fails_leaves_the_database_as_it_was(empty_url: str) -> None:
    with migrating(empty_url) as connection:
        connection.execute(text("create table tuned_models (oops integer)"))

    with pytest.raises(DBAPIError):
        upgrade(empty_url)

    assert tables(empty_url) == {"tuned_models"}


def test_an_upgrade_does_not_fill_the_log(empty_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    upgrade(empty_url)

    assert caplog.messages == []


def test_processes_that_start_at_once_all_find_a_database_that_is_ready(empty_url: str) -> None:
    start = [sys.executable, "-c", f"from core.database.migrate import upgrade; upgrade({empty_url!r})"]
    processes = [subprocess.Popen(start, stderr=subprocess.PIPE, text=True) for _ in range(4)]

    errors = [process.communicate(timeout=60)[1] for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    assert tables(empty_url) == ALL_TABLES


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused_and_leaves_no_lock_behind(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match="in memory is not supported"):
        upgrade(url)

    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_file_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    upgrade(f"sqlite:///{tmp_path}/data/regraft.db")

    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / "regraft.db.migrate.lock").exists()
