"""From every schema to the next with data in it, back, and with the version before still at work.

The rows of the first schema are written out here and by SQL, so that they stay what that version wrote.
"""

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Boolean, Connection, MetaData, String, inspect, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.schema import Column, Table
from sqlalchemy.util._collections import FacadeDict

from core.database.engine import Database, Work
from core.database.migrate import (
    LOCK_PATIENCE,
    alembic_config,
    is_ready,
    lock_all_tables,
    migrating,
    upgrade,
)
from core.database.tables import Attempt, Checkpoint, Event, Job, Project, RolloutPage, TunedModel
from core.jobs import events, fairness, lifecycle, usage
from core.jobs.claim import Claim
from core.storage import files
from core.tenancy import keys
from tests.present import present
from tests.servers import Postgres

pytestmark = [pytest.mark.slow, pytest.mark.both_databases]

FIRST = "0001"
TOKEN = "sk-of-the-first-version"
# What a migration takes away or makes stricter, by its revision. It may once no version that may still run beside it
# uses that: a release earlier, the code has stopped (docs/howto/operations.md, "Writing a migration").
CONTRACTED: dict[str, set[str]] = {}


def job(seq: int, status: str, **fields: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "id": f"ftjob-{seq}",
        "organization_id": "org-1",
        "project_id": "proj_1",
        "created_at": 1700000000 + seq,
        "model": "tiny",
        "training_file": "file-1",
        "validation_file": None,
        "suffix": None,
        "seed": 2**40,
        "metadata": {"team": "übersetzung"},
        "reinforcement": {
            "grader": {"type": "string_check", "name": "g"},
            "hyperparameters": {"n_epochs": "auto", "advanced": {}},
            "response_format": None,
        },
        "status": status,
        "resolved": None,
        "error": None,
        "started_at": None,
        "finished_at": None,
        "estimated_finish": None,
        "fine_tuned_model": None,
        "result_file": None,
        "trained_tokens": 0,
        "usage": None,
        "gpu_class": "cpu",
        "epoch": 0,
        "failures": 0,
        "lease_owner": None,
        "lease_expires_at": None,
        "next_run_at": 0.0,
        "dispatched_at": 0.0,
    } | fields


DONE = {
    "epoch": 2,
    "started_at": 1700000100,
    "finished_at": 1700000200,
    "fine_tuned_model": "ft:tiny:acme::1",
    "result_file": "file-2",
    "trained_tokens": 5_000_000_000,
    "usage": {"sampled_tokens": 7},
    "resolved": {"n_epochs": 1, "batch_size": 4},
}
HELD = {"epoch": 3, "started_at": 1700000300, "lease_owner": "host/1", "lease_expires_at": 1.0}
FAILED = {"finished_at": 1700000250, "error": {"code": "bad_grader", "message": "no", "param": None}}

# Parents before children.
ROWS: dict[str, Any] = {
    "organizations": [{"id": "org-1", "name": "acme", "created_at": 1}],
    "projects": [{"id": "proj_1", "organization_id": "org-1", "name": "support", "created_at": 2}],
    "api_keys": [
        {
            "id": "key_1",
            "project_id": "proj_1",
            "name": "first",
            "sha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "last4": "sion",
            "created_at": 3,
        }
    ],
    "files": [
        {
            "seq": seq,
            "id": f"file-{seq}",
            "project_id": "proj_1",
            "filename": "ü.jsonl",
            "purpose": purpose,
            "bytes": 3_000_000_000,
            "sha256": "a" * 64,
            "blob_key": f"files/{seq}",
            "created_at": 4,
            "expires_at": None,
            "deleted_at": deleted,
        }
        for seq, purpose, deleted in [
            (1, "fine-tune", None),
            (2, "fine-tune-results", None),
            (3, "fine-tune", 9),
        ]
    ],
    "jobs": [
        job(1, "succeeded", **DONE),
        job(2, "running", **HELD),
        job(3, "queued"),
        job(4, "paused", epoch=1, started_at=1700000400),
        job(5, "validating_files", metadata=None),
        job(6, "failed", **FAILED),
    ],
    "events": [
        {
            "seq": seq,
            "id": f"ftevent-{seq}",
            "job_id": "ftjob-1",
            "created_at": 5,
            "level": "info",
            "type": "message" if seq < 3 else "metrics",
            "message": f"Step {seq}",
            "data": {"step": seq},
        }
        for seq in (1, 2, 3)
    ],
    "step_metrics": [
        {
            "job_id": "ftjob-1",
            "step": step,
            "epoch": 2,
            "created_at": 6,
            "data": {
                "step": step,
                "sampled_tokens": 7,
                "trained_tokens": 7,
                "timing": {"step": {"full_iteration": 1.5}},
            },
        }
        for step in (0, 1, 2)
    ],
    "rollout_pages": [
        {
            "job_id": "ftjob-1",
            "step": 1,
            "split": "train",
            "epoch": 2,
            "blob_key": "projects/proj_1/jobs/ftjob-1/rollouts/1.jsonl",
            "samples": 32,
            "created_at": 7,
        }
    ],
    "checkpoints": [
        {
            "seq": 1,
            "id": "ftckpt_1",
            "job_id": "ftjob-1",
            "step": 2,
            "epoch": 2,
            "blob_prefix": "projects/proj_1/jobs/ftjob-1/attempts/2/checkpoints/step-000002",
            "valid_reward": 0.1 + 0.2,  # a double, to its last bit
            "metrics": {"reward": 0.5},
            "created_at": 8,
        }
    ],
    "tuned_models": [
        {
            "seq": 1,
            "name": "ft:tiny:acme::1",
            "project_id": "proj_1",
            "job_id": "ftjob-1",
            "checkpoint_id": "ftckpt_1",
            "base_model": "tiny",
            "created_at": 9,
        }
    ],
}


def to(url: str, revision: str) -> None:
    """Migrate up or down, whichever it is."""
    with migrating(url) as connection:
        config = alembic_config(connection)
        known = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]
        there = MigrationContext.configure(connection).get_current_revision()
        down = there is not None and known.index(revision) > known.index(there)
        (command.downgrade if down else command.upgrade)(config, revision)


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


@pytest.fixture
def first_url(empty_url: str) -> str:
    """A database as the first version left it, with data in every table."""
    to(empty_url, FIRST)
    with migrating(empty_url) as connection:
        assert ROWS.keys() == reflected(connection).keys() - {"alembic_version"}, "a table has no rows here"
    write(empty_url, ROWS)
    with migrating(empty_url) as connection:
        if connection.dialect.name == "postgresql":  # its sequences count what came without a number
            for name in (name for name, rows in ROWS.items() if "seq" in rows[0]):
                moved = f"select setval(pg_get_serial_sequence('{name}', 'seq'), {len(ROWS[name])})"
                connection.execute(text(moved))
    return empty_url


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        database.close()


def test_nothing_of_the_first_version_changes_on_the_way_up_down_and_up_again(first_url: str) -> None:
    upgrade(first_url)
    assert stored(first_url, ROWS) == ROWS

    to(first_url, FIRST)
    assert stored(first_url, ROWS) == ROWS

    upgrade(first_url)
    assert stored(first_url, ROWS) == ROWS


def test_new_rows_get_new_numbers_after_an_upgrade(first_url: str) -> None:
    """A table that was copied must not begin to count at 1 again: its `seq` is the cursor of lists."""
    upgrade(first_url)

    with opened(first_url) as database, database.write() as session:
        assert events.append(session, "ftjob-1", "new").seq == 4


def test_the_rows_of_the_first_version_are_of_use_to_this_one(first_url: str) -> None:
    upgrade(first_url)

    with opened(first_url) as database:
        with database.write() as session:
            key, project = keys.authenticate(session, TOKEN)
            keys.require(key, "admin")
            assert (key.scope, key.owner, key.expires_at) == ("admin", "", None)
            assert (project.limits, project.last_turn, project.archived_at) == (None, 0, None)
            listed = lifecycle.page(session, project.id, limit=10, metadata={"team": "übersetzung"}).items
            assert [one.id for one in listed] == [f"ftjob-{seq}" for seq in (6, 4, 3, 2, 1)]
            assert {one.budget for one in listed} == {None}
            assert {one.gpu_seconds for one in listed} == {0.0}
            assert [one.id for one in files.page(session, project.id, limit=10).items] == ["file-2", "file-1"]
            said = events.page(session, "ftjob-1", limit=10).items
            assert [(one.message, one.step) for one in said] == [(f"Step {n}", None) for n in (3, 2, 1)]
            assert [one.data["step"] for one in events.steps(session, "ftjob-1")] == [0, 1, 2]
            page = session.get_one(RolloutPage, ("ftjob-1", 1, "train"))
            assert (page.total, page.bytes, page.summary) == (0, 0, None)
            assert session.scalars(select(TunedModel.checkpoint_id)).one() == "ftckpt_1"
            assert session.scalars(select(Checkpoint.valid_reward)).one() == 0.1 + 0.2
            usage.recount(session, listed[-1])

        with database.write() as session:
            waits = session.scalars(select(Job).where(Job.id == "ftjob-3")).one()
            assert fairness.places(session, [waits])["ftjob-3"].position == 1
            paused = session.scalars(select(Job).where(Job.id == "ftjob-4")).one()
            lifecycle.resume(Work(session), paused)
            lifecycle.cancel(Work(session), paused)


def test_jobs_that_waited_ran_or_were_validated_during_the_upgrade_go_on(first_url: str) -> None:
    upgrade(first_url)

    with opened(first_url) as database:
        with database.write() as session:  # its worker has stopped, and has written no attempt
            assert lifecycle.expire_leases(session, max_failures=3) == 1
            session.scalars(select(Job).where(Job.id == "ftjob-2")).one().next_run_at = 0.0
            validation = lifecycle.claim_validation(session, owner="new", lease_seconds=60)
        assert validation is not None
        with lifecycle.fenced(database, validation) as (session, held):
            lifecycle.validated(session, held)
        claimed = []
        for _ in range(3):
            with database.write() as session:
                claimed.append(lifecycle.claim(session, gpu_class="cpu", owner="new", lease_seconds=60))
            with lifecycle.fenced(database, present(claimed[-1])) as (session, held):
                lifecycle.succeed(session, held, fine_tuned_model="m")
        with database.read() as session:
            ended = session.scalars(
                select(Attempt).where(Attempt.kind == "run").order_by(Attempt.started_at)
            ).all()

    assert [present(claim).job_id for claim in claimed] == ["ftjob-2", "ftjob-3", "ftjob-5"]
    assert [(one.worker, one.outcome) for one in ended] == [("new", "succeeded")] * 3


def test_a_run_of_the_version_before_still_writes_after_the_upgrade(first_url: str) -> None:
    """It holds its claim by the epoch alone; nothing that is new may take that from it."""
    upgrade(first_url)

    with opened(first_url) as database:
        held = Claim("ftjob-2", 3, "host/1")
        with database.write() as session:
            assert lifecycle.heartbeat(session, held, 60)
        with lifecycle.fenced(database, held) as (session, row):
            lifecycle.release(session, row)
        with database.read() as session:
            assert session.scalars(select(Job.status).where(Job.id == "ftjob-2")).one() == "queued"


def test_going_back_gives_no_key_more_than_it_had(first_url: str) -> None:
    upgrade(first_url)
    with opened(first_url) as database, database.write() as session:
        project = session.scalars(select(Project)).one()
        work = Work(session)
        keys.create_key(work, project, "reads", scope="read")
        keys.create_key(work, project, "ends", expires_at=2**31)
        keys.create_key(work, project, "lasts")

    to(first_url, FIRST)

    left = stored(first_url, {"api_keys": [{"name": None}]})["api_keys"]
    assert sorted(row["name"] for row in left) == ["first", "lasts"]


def test_going_back_forgets_what_was_said_of_steps_that_were_done_again(first_url: str) -> None:
    upgrade(first_url)
    with opened(first_url) as database, database.write() as session:
        session.scalars(select(Event).where(Event.id == "ftevent-2")).one().superseded = True

    to(first_url, FIRST)

    left = stored(first_url, {"events": [{"id": None}]})["events"]
    assert sorted(row["id"] for row in left) == ["ftevent-1", "ftevent-3"]


# Two versions side by side.


def revisions() -> list[Any]:
    """All but the first, with the one before each."""
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
    with migrating(empty_url) as connection:
        rows = a_row_each(connection)
    to(empty_url, after)

    write(empty_url, rows)

    assert stored(empty_url, rows) == rows


@pytest.mark.parametrize(("before", "after"), revisions())
def test_a_migration_takes_nothing_away_that_the_version_before_uses(
    empty_url: str, before: Any, after: Any
) -> None:
    """First expand, then contract, a release later: docs/howto/operations.md."""
    to(empty_url, before)
    with migrating(empty_url) as connection:
        old = what_code_relies_on(connection)
    to(empty_url, after)
    with migrating(empty_url) as connection:
        new = what_code_relies_on(connection)

    taken = {
        f"{name} was {was}, is {new.get(name)}"
        for name, was in old.items()
        if new.get(name) != was and not is_longer(was, new.get(name, ""))
    }
    stricter = {f"{name} is new" for name in new.keys() - old.keys() if name.startswith("rule ")}
    stricter = {rule for rule in stricter if rule.split()[1] in {name.split()[1] for name in old}}
    assert taken | stricter == CONTRACTED.get(after, set())


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
    to(empty_url, FIRST)

    with opened(empty_url) as database, database.read() as session:
        assert not is_ready(session.connection())


def test_a_request_that_reads_one_table_after_another_is_not_ended_by_a_migration(postgres: Postgres) -> None:
    """A migration that held the second and waited for the first would be a deadlock, and one of the two would fail."""
    to(url := postgres.new_database(), FIRST)
    waits = text("select count(*) from pg_locks where relation = 'projects'::regclass and not granted")
    with opened(url) as database, opened(url) as watcher, ThreadPoolExecutor(1) as other:
        with database.read() as request:
            request.execute(text("select 1 from projects"))
            migration = other.submit(upgrade, url)
            while not migration.done():
                with watcher.read() as session:
                    if session.scalar(waits):
                        break
            request.execute(text("select 1 from api_keys"))
        migration.result(60)

        with database.read() as session:
            assert is_ready(session.connection())


def test_a_migration_gives_up_before_requests_queue_behind_it_for_long(postgres: Postgres) -> None:
    """Somebody reads for longer than it may wait, such as a pg_dump. It may be tried again."""
    to(url := postgres.new_database(), FIRST)
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
