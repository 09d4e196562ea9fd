import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.database.engine import Database, db_now, json_text, unit_of_work, use_wal
from core.database.migrate import upgrade
from core.database.tables import Job, Organization, Project
from tests import factories
from tests.present import present

pytestmark = pytest.mark.both_databases


def count(session: Session) -> Any:
    return session.scalar(select(func.count()).select_from(Organization))


def test_messages_leave_when_what_they_announce_can_be_seen(database: Database) -> None:
    seen = []

    def send(task: str, queue: str, about: str = "") -> bool:
        with database.read() as session:
            seen.append((task, queue, count(session)))
        return True

    with unit_of_work(database, send) as work:
        factories.organization(work.session)
        work.wake("run", "gpu.cpu", "ftjob-1")
        work.wake("validate", "default", "ftjob-1")
        assert seen == []

    assert seen == [("run", "gpu.cpu", 1), ("validate", "default", 1)]


def test_a_rollback_writes_nothing_and_sends_nothing(database: Database) -> None:
    sent: list[tuple[str, str]] = []

    def give_up() -> None:
        with unit_of_work(database, factories.noting(sent)) as work:
            factories.organization(work.session)
            work.wake("run", "gpu.cpu", "ftjob-1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()

    with database.read() as session:
        assert (count(session), sent) == (0, [])


def test_a_commit_that_fails_sends_nothing(database: Database) -> None:
    sent: list[tuple[str, str]] = []

    def add_orphan() -> None:
        with unit_of_work(database, factories.noting(sent)) as work:
            work.session.add(Project(organization_id="org-nobody", name="orphan"))  # found out by the flush
            work.wake("run", "gpu.cpu", "ftjob-1")

    with pytest.raises(IntegrityError):
        add_orphan()

    assert sent == []


def test_a_reader_sees_one_moment_however_long_it_reads(database: Database) -> None:
    with database.read() as session:
        assert count(session) == 0
        with database.write() as writer:
            factories.organization(writer)

        assert count(session) == 0

    with database.read() as session:
        assert count(session) == 1


def test_what_was_written_can_be_used_after_the_commit(database: Database) -> None:
    with database.write() as session:
        organization = factories.organization(session, name="acme")

    assert organization.name == "acme"


def test_writers_that_read_first_do_not_lose_each_others_changes(database: Database) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session))

    def add_one(_: Any) -> None:
        with database.write() as session:
            row = session.scalars(select(Job).where(Job.id == job.id).with_for_update()).one()
            row.failures += 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add_one, range(20)))

    with database.read() as session:
        assert session.scalars(select(Job)).one().failures == 20


def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    """2 is FULL. Under NORMAL a power cut takes back commits that were answered."""
    database = Database(f"sqlite:///{tmp_path}/regraft.db")
    with database.write() as first, database.read() as second:  # two connections
        assert [session.scalar(text("PRAGMA synchronous")) for session in (first, second)] == [2, 2]
    database.close()


def test_a_filesystem_without_shared_memory_is_refused(tmp_path: Path) -> None:
    """SQLite's `unix-none` has none, as some network filesystems, and reports no error for `journal_mode=WAL`."""
    without = sqlite3.connect(f"file:{tmp_path}/regraft.db?vfs=unix-none", uri=True)

    with closing(without), pytest.raises(sqlite3.OperationalError, match="no shared memory"):
        use_wal(without)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_sqlite_database_is_its_owners_only(tmp_path: Path) -> None:
    """It has secrets of webhooks in clear. The log beside it has what was written last."""
    file = tmp_path / "data" / "regraft.db"
    url = f"sqlite:///{file}"

    upgrade(url)
    database = Database(url)
    with database.write() as session:
        factories.organization(session)

    assert mode(file.parent) == 0o700
    assert [mode(Path(f"{file}{end}")) for end in ("", "-wal", "-shm")] == [0o600] * 3
    database.close()


def test_the_modes_of_a_sqlite_database_and_its_folder_that_exist_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "regraft.db"
    file.touch()
    file.chmod(0o640)
    tmp_path.chmod(0o750)

    upgrade(f"sqlite:///{file}")

    assert (mode(tmp_path), mode(file)) == (0o750, 0o640)


def test_the_databases_clock_counts_unix_seconds(database: Database) -> None:
    with database.read() as session:
        assert present(session.scalar(select(db_now()))) == pytest.approx(time.time(), abs=5)


def test_the_databases_clock_does_not_stand_still_in_a_transaction(database: Database) -> None:
    with database.write() as session:
        first = present(session.scalar(select(db_now())))

        assert any(present(session.scalar(select(db_now()))) > first for _ in range(10_000))


def test_the_databases_clock_can_be_calculated_with(database: Database) -> None:
    with database.read() as session:
        assert session.scalar(select(db_now() + 60.0 > db_now()))


@pytest.mark.parametrize("key", ["plain", 'with "quotes"', "größe", "a.b", "back\\slash"])
def test_json_text_finds_a_key_whatever_it_looks_like(database: Database, key: str) -> None:
    with database.write() as session:
        factories.job(session, factories.project(session), metadata_={"other": "no", key: "yes"})

        assert session.scalar(select(json_text(Job.metadata_, key))) == "yes"


def test_json_text_of_an_absent_key_or_object_is_null(database: Database) -> None:
    with database.write() as session:
        project = factories.project(session)
        factories.job(session, project, metadata_={"a": "b"})
        factories.job(session, project, metadata_=None)

        assert list(session.scalars(select(json_text(Job.metadata_, "c")))) == [None, None]
