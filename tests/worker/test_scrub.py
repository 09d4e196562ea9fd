"""The scrub reads each file and each checkpoint once in a round, and says what it finds."""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.database.engine import Database
from core.database.tables import Checkpoint, File, ScrubRound
from core.storage.store import FolderBlobs, FolderDenied, StoreEmpty
from tests import factories
from worker.supervisor.scrub import (
    DAY,
    HELD_SECONDS,
    MAX_TRIES,
    PAUSE_SECONDS,
    SECONDS_AT_ONCE,
    Scrub,
)
from worker.telemetry import SCRUBBED

DAYS = 10.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


class Reads(FolderBlobs):
    """Notes which objects were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keys: list[Any] = []

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        self.keys.append(key)
        return super().open(key, **options)


@pytest.fixture
def database(request: pytest.FixtureRequest, database_kind: str) -> Database:
    database: Database = request.getfixturevalue(f"{database_kind}_database")
    return database


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blobs(database: Database, tmp_path: Path) -> Reads:
    blobs = Reads(tmp_path / "blobs")
    with database.write() as session:
        project = factories.project(session)
        for number in range(10):
            info = blobs.put_bytes(f"projects/p/files/{number}", b"%d" % number * 100)
            factories.file(
                session, project, id=f"file-{number}", blob_key=info.key, bytes=info.size, sha256=info.sha256
            )
    return blobs


def scrub(database: Database, blobs: Any, clock: Clock, days: float = DAYS) -> Scrub:
    return Scrub(days, database, blobs, clock, wall=clock)


def run(one: Scrub, clock: Clock, days: float) -> None:
    """As the reconciler does: one pass after the other, here every two hours."""
    for _ in range(round(days * 12)):
        clock.go(DAY / 12)
        one.scrub()


def counted(result: str) -> Any:
    samples = next(iter(SCRUBBED.collect())).samples
    return sum(s.value for s in samples if s.labels["result"] == result and s.name.endswith("_total"))


def names(blobs: Reads) -> list[Any]:
    return [key.rpartition("/")[2] for key in blobs.keys]


@pytest.mark.both_databases
@pytest.mark.slow
def test_a_day_reads_its_share_and_a_round_reads_each_object_once(
    database: Database, blobs: Reads, clock: Clock
) -> None:
    one = scrub(database, blobs, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()  # the first pass begins the round

    run(one, clock, days=1)
    assert names(blobs) == ["0"]
    run(one, clock, days=4)
    assert names(blobs) == ["0", "1", "2", "3", "4"]
    run(one, clock, days=5.1)
    assert names(blobs) == [str(number) for number in range(10)]

    run(one, clock, days=1)
    assert names(blobs)[10:] == ["0"]


@pytest.mark.both_databases
@pytest.mark.slow
def test_workers_share_the_round(database: Database, blobs: Reads, clock: Clock) -> None:
    several = [scrub(database, blobs, clock) for _ in range(3)]
    for one in several:
        clock.go(PAUSE_SECONDS)
        one.scrub()
    for _ in range(60):
        clock.go(DAY / 6)
        for one in several:
            one.scrub()

    assert sorted(names(blobs)) == [str(number) for number in range(10)]


@pytest.mark.both_databases
def test_a_round_goes_on_where_it_was_when_all_workers_were_stopped(
    database: Database, blobs: Reads, clock: Clock
) -> None:
    first = scrub(database, blobs, clock)
    clock.go(PAUSE_SECONDS)
    first.scrub()
    run(first, clock, days=3)
    run(scrub(database, blobs, clock), clock, days=3)

    assert names(blobs) == [str(number) for number in range(6)]


def test_what_is_damaged_or_missing_is_logged_and_counted(
    database: Database, blobs: Reads, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    blobs.put_bytes("projects/p/files/3", b"4" * 100)
    blobs.delete("projects/p/files/5")
    before = {result: counted(result) for result in ("whole", "damaged", "missing")}

    with caplog.at_level(logging.ERROR):
        one = scrub(database, blobs, clock)
        clock.go(PAUSE_SECONDS)
        one.scrub()
        run(one, clock, days=DAYS)

    assert [record.getMessage() for record in caplog.records] == [
        "projects/p/files/3 of file-3 is damaged; see docs/howto/storage.md (Integrity)",
        "projects/p/files/5 of file-5 is missing; see docs/howto/storage.md (Integrity)",
    ]
    grown = {result: counted(result) - count for result, count in before.items()}
    assert grown == {"whole": 8, "damaged": 1, "missing": 1}


def test_checkpoints_are_read_by_their_manifests(
    database: Database, blobs: Reads, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session))
        session.add(Checkpoint(id="ftckpt_1", job_id=job.id, step=1, epoch=1, blob_prefix="projects/p/ck"))

    one = scrub(database, blobs, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    run(one, clock, days=DAYS)

    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "projects/p/ck/manifest.json of ftckpt_1 is missing; see docs/howto/storage.md (Integrity)"
    ]


class DeletedMeanwhile(FolderBlobs):
    """Another process deletes each file, with its contents, before it is read."""

    def __init__(self, root: Path, database: Database) -> None:
        super().__init__(root)
        self.database = database

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        with self.database.write() as session:
            session.query(File).filter(File.blob_key == key).delete()
        self.delete(key)
        return super().open(key, **options)


@pytest.mark.both_databases
def test_what_is_deleted_while_it_is_read_is_no_finding(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = scrub(database, DeletedMeanwhile(tmp_path / "blobs", database), clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    run(one, clock, days=2)

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Slow(FolderBlobs):
    """A chunk takes longer than a pass may."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self.clock = clock
        self.chunks = 0

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        for byte in super().open(key, **options):
            for start in range(0, len(byte), 25):
                self.chunks += 1
                self.clock.go(SECONDS_AT_ONCE)
                yield byte[start : start + 25]


def test_a_large_object_is_read_in_several_passes(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path
) -> None:
    slow = Slow(tmp_path / "blobs", clock)
    one = scrub(database, slow, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    clock.go(DAY)

    chunks = []
    for _ in range(4):
        one.scrub()
        chunks.append(slow.chunks)

    assert chunks == [1, 2, 3, 4]


class Away(FolderBlobs):
    """Away until it is not."""

    is_away = True

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        if self.is_away:
            raise ConnectionError("the store is away")
        return super().open(key, **options)


def test_what_could_not_be_read_while_the_store_was_away_is_read_afterwards(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path
) -> None:
    before = {result: counted(result) for result in ("whole", "damaged", "missing")}
    away = Away(tmp_path / "blobs")
    one = scrub(database, away, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    clock.go(5 * DAY)

    for _ in range(3):
        with pytest.raises(ConnectionError):
            one.scrub()
        one.scrub()  # waits a while before it tries again
        clock.go(PAUSE_SECONDS)
    assert {result: counted(result) for result in before} == before

    away.is_away = False
    one.scrub()
    assert counted("whole") == before["whole"] + 5


class Forbidden(Reads):
    def open(self, key: str, **options: int) -> Iterator[bytes]:
        if key.endswith("/1"):
            raise FolderDenied(errno.EACCES, "Permission denied", key)
        return super().open(key, **options)


def test_an_object_that_the_store_refuses_to_read_does_not_stop_the_round(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable, whole = counted("unreadable"), counted("whole")
    one = scrub(database, Forbidden(tmp_path / "blobs"), clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    clock.go(5 * DAY)

    for _ in range(MAX_TRIES - 1):
        with pytest.raises(FolderDenied):
            one.scrub()
        clock.go(PAUSE_SECONDS)
    one.scrub()

    assert (counted("unreadable"), counted("whole")) == (unreadable + 1, whole + 4)
    assert "file-1 cannot be read; the round continues without it" in caplog.text


def test_an_empty_store_is_an_outage_and_no_damage(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path
) -> None:
    before = {result: counted(result) for result in ("whole", "damaged", "missing")}
    one = scrub(database, FolderBlobs(tmp_path / "not mounted"), clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    clock.go(DAY)

    with pytest.raises(StoreEmpty):
        one.scrub()

    assert {result: counted(result) for result in before} == before


@pytest.mark.both_databases
def test_an_object_that_a_worker_did_not_read_to_its_end_is_read_by_the_next(
    database: Database, blobs: Reads, clock: Clock, tmp_path: Path
) -> None:
    slow = Slow(tmp_path / "blobs", clock)
    stopped = scrub(database, slow, clock)
    clock.go(PAUSE_SECONDS)
    stopped.scrub()
    clock.go(DAY)
    stopped.scrub()
    assert slow.chunks == 1

    other = scrub(database, blobs, clock)
    clock.go(HELD_SECONDS - 60)
    other.scrub()
    assert names(blobs) == []  # the first may still be at it

    clock.go(120)
    other.scrub()
    assert names(blobs) == ["0"]


@pytest.mark.slow
def test_a_round_that_began_with_a_clock_that_was_ahead_goes_on(
    database: Database, blobs: Reads, clock: Clock
) -> None:
    clock.go(365 * DAY)
    one = scrub(database, blobs, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    clock.now -= 365 * DAY

    run(scrub(database, blobs, clock), clock, days=DAYS + 1)

    assert names(blobs)[:10] == [str(number) for number in range(10)]


def test_a_file_that_has_expired_is_not_missed(
    database: Database, blobs: Reads, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with database.write() as session:
        session.query(File).update({File.expires_at: 500})
    for number in range(10):
        blobs.delete(f"projects/p/files/{number}")
    blobs.put_bytes("projects/p/files/other", b"x")

    one = scrub(database, blobs, clock)
    clock.go(PAUSE_SECONDS)
    one.scrub()
    run(one, clock, days=DAYS)

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_zero_days_read_nothing(database: Database, blobs: Reads, clock: Clock) -> None:
    run(scrub(database, blobs, clock, days=0), clock, days=20)

    assert blobs.keys == []
    with database.read() as session:
        assert session.get(ScrubRound, 1) is None
