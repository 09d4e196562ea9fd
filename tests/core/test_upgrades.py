"""From every schema to the next: the version before keeps working, and requests are not stopped.

The first schema is that of 0.1.0: a migration after it is tried here with a row in every table.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Boolean, Connection, MetaData, String, inspect, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.schema import Column, Table
from sqlalchemy.util._collections import FacadeDict

from core.database.engine import Database
from core.database.migrate import (
    LOCK_PATIENCE,
    alembic_config,
    is_ready,
    lock_all_tables,
    migrating,
    upgrade,
)
from core.tenancy import keys
from tests.servers import Postgres

pytestmark = [pytest.mark.slow, pytest.mark.both_databases]

# What a migration takes away or makes stricter, by its revision. It may once no version that may still run beside it
# uses that: a release earlier, the code has stopped (docs/contribute/testing.md, "Migrations").
CONTRACTED: dict[str, set[str]] = {}


def to(url: str, revision: str) -> None:
    with migrating(url) as connection:
        command.upgrade(alembic_config(connection), revision)


def reflected(connection: Connection) -> FacadeDict[str, Table]:
    tables = MetaData()
    tables.reflect(connection)
    return tables.tables


def write(url: str, rows: dict[str, Any]) -> None:
    with migrating(url) as connection:
        tables = reflected(connection)
        for name, values in rows.items():
            for row in values:
                connection.execute(tables[name].insert(), row)


def stored(url: str, rows: dict[str, Any]) -> dict[str, list[dict[Any, Any]]]:
    """Of the same tables and columns as `rows`, what the database has."""
    found = {}
    with migrating(url) as connection:
        tables = reflected(connection)
        for name, values in rows.items():
            columns = [tables[name].c[column] for column in values[0]]
            primary = [column for column in columns if column.primary_key]
            found[name] = [
                dict(row._mapping) for row in connection.execute(select(*columns).order_by(*primary))
            ]
    return found


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        database.close()


def revisions() -> list[Any]:
    """All but the first, with the one before each: none until the first migration after 0.1.0."""
    script = ScriptDirectory(str(resources.files("migrations")))
    return [(one.down_revision, one.revision) for one in script.walk_revisions() if one.down_revision]


def any_value(column: Column[Any], number: int) -> dict[str, Any] | str | int:
    if isinstance(column.type, JSON):
        return {"n": number}
    if isinstance(column.type, Boolean):
        return False
    if isinstance(column.type, String):
        return f"{number}-{column.name}"[: column.type.length]
    return number


def a_row_each(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """For every table, parents first, with a value in every column, as code that knows them all writes it."""
    tables = MetaData()
    tables.reflect(connection)
    rows: dict[str, Any] = {}
    for table in tables.sorted_tables:
        if table.name == "alembic_version":
            continue
        row = {column.name: any_value(column, 1) for column in table.columns}
        for column in table.columns:
            for key in column.foreign_keys:
                row[column.name] = rows[key.column.table.name][0][key.column.name]
        rows[table.name] = [row]
    return rows


@pytest.mark.parametrize(("before", "after"), revisions())
def test_the_version_before_can_write_and_read_on_the_new_schema(
    empty_url: str, before: Any, after: Any
) -> None:
    """It knows no new column, so each is NULL or has a default in the database itself."""
    to(empty_url, before)

    rows, found = written_after(empty_url, lambda: to(empty_url, after))

    assert found == rows


def written_after(url: str, change: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows that code with the schema of today writes after a change of the schema, and what it then reads."""
    with migrating(url) as connection:
        rows = a_row_each(connection)
    change()
    write(url, rows)
    return rows, stored(url, rows)


def execute(url: str, statement: str) -> None:
    with migrating(url) as connection:
        connection.execute(text(statement))


def test_a_new_column_with_a_default_is_nothing_to_code_that_does_not_know_it(empty_url: str) -> None:
    upgrade(empty_url)
    added = "alter table jobs add column colour varchar(8) default 'red' not null"

    rows, found = written_after(empty_url, lambda: execute(empty_url, added))

    assert rows.keys() >= {"jobs", "projects", "evals"}
    assert found == rows


def test_code_that_reads_a_column_that_is_gone_fails(empty_url: str) -> None:
    upgrade(empty_url)

    with pytest.raises(KeyError, match="archived_at"):
        written_after(empty_url, lambda: execute(empty_url, "alter table projects drop column archived_at"))


@pytest.mark.parametrize(("before", "after"), revisions())
def test_a_migration_takes_nothing_away_that_the_version_before_uses(
    empty_url: str, before: Any, after: Any
) -> None:
    """First expand, then contract, a release later: docs/contribute/testing.md, Migrations."""
    to(empty_url, before)
    with migrating(empty_url) as connection:
        old = what_code_relies_on(connection)
    to(empty_url, after)
    with migrating(empty_url) as connection:
        new = what_code_relies_on(connection)

    assert contracted(old, new) == CONTRACTED.get(after, set())


def test_a_column_that_is_taken_away_and_a_rule_that_is_added_are_both_found(empty_url: str) -> None:
    upgrade(empty_url)
    with migrating(empty_url) as connection:
        old = what_code_relies_on(connection)
    with migrating(empty_url) as connection:
        connection.execute(text("alter table projects drop column archived_at"))
        connection.execute(text("create unique index ix_projects_name on projects (name)"))
    with migrating(empty_url) as connection:
        new = what_code_relies_on(connection)

    assert contracted(old, new) == {
        "column projects archived_at was BIGINT null=True, is None",
        "rule projects ix_projects_name is new",
    }


def contracted(old: dict[str, str], new: dict[str, str]) -> set[str]:
    """What the version before would miss: columns and rules that changed, and rules that its tables got."""
    taken = {
        f"{name} was {was}, is {new.get(name)}"
        for name, was in old.items()
        if new.get(name) != was and not is_longer(was, new.get(name, ""))
    }
    tables = {name.split()[1] for name in old}
    added = {name for name in new.keys() - old.keys() if name.startswith("rule ")}
    return taken | {f"{name} is new" for name in added if name.split()[1] in tables}


def is_longer(was: str, now: str) -> bool:
    """Whether a column of text has only been given more places."""
    length = re.compile(r"VARCHAR\((\d+)\)")
    before, after = length.search(was), length.search(now)
    if before is None or after is None or length.sub("", was) != length.sub("", now):
        return False
    return int(after[1]) > int(before[1])


def what_code_relies_on(connection: Connection) -> dict[str, str]:
    """Columns with their types, and rules (unique, foreign keys, checks) by the table they bind."""
    look = inspect(connection)
    found = {}
    for table in look.get_table_names():
        for column in look.get_columns(table):
            found[f"column {table} {column['name']}"] = f"{column['type']} null={column['nullable']}"
        rules = (
            look.get_unique_constraints(table)
            + look.get_foreign_keys(table)
            + look.get_check_constraints(table)
        )
        found |= {f"rule {table} {rule['name']}": "there" for rule in rules}
        unique = [index for index in look.get_indexes(table) if index["unique"]]
        found |= {f"rule {table} {index['name']}": "there" for index in unique}
    return found


@pytest.fixture
def later_url(empty_url: str) -> str:
    """Migrated by a version after this one, which has added a column."""
    upgrade(empty_url)
    with migrating(empty_url) as connection:
        connection.execute(text("alter table jobs add column colour varchar(8) default 'red' not null"))
        connection.execute(text("update alembic_version set version_num = '9999'"))
    return empty_url


def test_a_version_that_starts_on_the_schema_of_its_successor_uses_it_as_it_is(later_url: str) -> None:
    """A pod of the old version that is moved during a rollout, and the way back after one."""
    upgrade(later_url)

    with opened(later_url) as database:
        with database.write() as session:
            assert keys.bootstrap(session) is not None
        with database.read() as session:
            assert is_ready(session.connection())
    with migrating(later_url) as connection:
        assert connection.scalar(text("select version_num from alembic_version")) == "9999"


def test_a_version_that_waits_for_its_own_migration_is_not_ready(empty_url: str) -> None:
    with opened(empty_url) as database, database.read() as session:
        assert not is_ready(session.connection())


def test_a_request_that_reads_one_table_after_another_is_not_ended_by_a_migration(postgres: Postgres) -> None:
    """A migration that held the second and waited for the first would be a deadlock, and one of the two would fail."""
    upgrade(url := postgres.new_database())
    waits = text("select count(*) from pg_locks where relation = 'projects'::regclass and not granted")
    with opened(url) as database, opened(url) as watcher, ThreadPoolExecutor(1) as other:
        with database.read() as request:
            request.execute(text("select 1 from projects"))
            migration = other.submit(lock_as_a_migration, url)
            while not migration.done():
                with watcher.read() as session:
                    if session.scalar(waits):
                        break
            request.execute(text("select 1 from api_keys"))
        migration.result(60)


def lock_as_a_migration(url: str) -> None:
    with migrating(url) as connection:
        lock_all_tables(connection)


def test_a_migration_gives_up_before_requests_queue_behind_it_for_long(postgres: Postgres) -> None:
    """Somebody reads for longer than it may wait, such as a pg_dump. It may be tried again."""
    upgrade(url := postgres.new_database())
    with opened(url) as database:
        with database.read() as backup:
            backup.execute(text("select 1 from jobs"))
            with pytest.raises(OperationalError, match="lock timeout"), migrating(url) as migration:
                lock_all_tables(migration, seconds=0.1)

        with migrating(url) as migration:
            lock_all_tables(migration, seconds=0.1)


def test_a_migration_does_not_queue_up_behind_a_backup(postgres: Postgres) -> None:
    """ALTER TABLE would wait for a pg_dump, and every request for the ALTER TABLE."""
    with migrating(postgres.new_database()) as connection:
        assert connection.scalar(text("show lock_timeout")) == LOCK_PATIENCE
