"""What the reconciler puts right, pass by pass."""

import asyncio
import time
from typing import Any, NoReturn

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from core.database.engine import Database, Work
from core.database.tables import EvalRun, File, IdempotentRequest, Job, Pipeline, WebhookDelivery, now
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle, queue
from core.settings import Settings
from core.tenancy.idempotency import RETENTION_SECONDS
from tests import factories
from tests.present import present, untyped
from tests.worker.conftest import Bench
from worker.supervise.reconciler import BROKER_AWAY, BROKER_BACK, Reconciler


@pytest.fixture
def sent() -> list[Any]:
    return []


@pytest.fixture
def reconciler(bench: Bench, sent: list[Any]) -> Reconciler:
    return Reconciler(
        Settings(data_dir=bench.tmp_path),
        bench.database,
        bench.blobs,
        factories.noting(sent),
    )


def test_the_job_of_a_silent_worker_waits_again(bench: Bench, reconciler: Reconciler) -> None:
    with bench.database.write() as session:
        assert lifecycle.heartbeat(session, bench.claim, -1.0)

    reconciler.run_once()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1)


def test_a_waiting_job_that_nobody_took_is_announced_again_but_not_at_every_pass(
    bench: Bench, reconciler: Reconciler, sent: list[Any]
) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)

    reconciler.run_once()
    reconciler.run_once()

    assert sent == [("regraft.run_next", "gpu.cpu")]


def test_a_cancelled_job_gets_its_result_file(bench: Bench, reconciler: Reconciler) -> None:
    run = bench.run()
    run.stop_requested = lambda: run.trainer.updates == 2
    asyncio.run(run.train())
    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.get_one(Job, bench.job().seq))

    reconciler.run_once()

    job = bench.job()
    assert job.result_file is not None
    assert job.usage is not None
    assert job.usage["trained_tokens"] == 2 * 2 * 8


def test_a_deleted_file_stays_while_an_unfinished_job_reads_it(bench: Bench, reconciler: Reconciler) -> None:
    file = stored_file(bench, deleted_at=now())
    with bench.database.write() as session:
        session.get_one(Job, bench.job().seq).training_file = file.id

    reconciler.run_once()
    assert list(bench.blobs.list("files/")) == ["files/x"]

    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.get_one(Job, bench.job().seq))
    reconciler.run_once()
    assert list(bench.blobs.list("files/")) == []
    with bench.database.read() as session:
        assert session.query(File).count() == 0


def test_a_content_that_another_file_shares_goes_with_the_last_of_them(
    bench: Bench, reconciler: Reconciler
) -> None:
    first = stored_file(bench, deleted_at=now())
    with bench.database.write() as session:
        copy = {column.name: getattr(first, column.name) for column in File.__table__.columns}
        session.add(File(**{**copy, "seq": None, "id": "file-second", "deleted_at": None}))

    reconciler.run_once()
    with bench.database.write() as session:
        [left] = session.query(File).all()
        assert (left.id, list(bench.blobs.list("files/"))) == ("file-second", ["files/x"])
        left.deleted_at = now()

    reconciler.run_once()
    assert list(bench.blobs.list("files/")) == []


def test_an_expired_file_goes_and_one_that_is_kept_stays(bench: Bench, reconciler: Reconciler) -> None:
    stored_file(bench, expires_at=now() - 1)
    stored_file(bench, key="files/kept")

    reconciler.run_once()

    assert list(bench.blobs.list("files/")) == ["files/kept"]


def test_an_idempotency_key_is_forgotten_after_a_day(bench: Bench, reconciler: Reconciler) -> None:
    with bench.database.write() as session:
        for key, age in (("old", RETENTION_SECONDS + 10), ("young", RETENTION_SECONDS - 1000)):
            row = {"fingerprint": "", "status_code": 200, "answer": {}, "created_at": now() - age}
            session.add(IdempotentRequest(project_id=bench.project.id, key=key, **row))

    reconciler.run_once()

    with bench.database.read() as session:
        assert [row.key for row in session.query(IdempotentRequest)] == ["young"]


def test_a_pass_that_fails_does_not_stop_the_others(
    bench: Bench, reconciler: Reconciler, sent: list[Any]
) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)

    class Broken(Reconciler):
        def expired_leases(self) -> None:
            raise RuntimeError("no such table")

    Broken(
        Settings(data_dir=bench.tmp_path),
        bench.database,
        bench.blobs,
        factories.noting(sent),
    ).run_once()

    assert sent == [("regraft.run_next", "gpu.cpu")]


def test_rows_that_are_kept_for_days_are_not_looked_for_at_every_pass(bench: Bench) -> None:
    moments, rounds = [0.0], list[float]()

    class Noting(Reconciler):
        def forgotten_answers(self) -> None:
            rounds.append(moments[-1])

    settings = Settings(data_dir=bench.tmp_path)
    reconciler = Noting(settings, bench.database, bench.blobs, lambda *wake: True, lambda: moments[-1])

    for moment in (0.0, 2.0, 58.0, 60.0, 62.0):
        moments.append(moment)
        reconciler.run_once()

    assert rounds == [0.0, 60.0]


def stored_file(bench: Bench, key: str = "files/x", **columns: Any) -> File:
    info = bench.blobs.put_bytes(key, b"{}\n")
    file = File(
        project_id=bench.project.id,
        filename="x.jsonl",
        purpose="fine-tune",
        bytes=info.size,
        sha256=info.sha256,
        blob_key=info.key,
        **columns,
    )
    with bench.database.write() as session:
        session.add(file)
    return file


class TestLeasesThatEndedForNoFaultOfTheirWorkers:
    """A silent worker loses its job. One that could not be heard, or that a jump of the clock made late, does not."""

    @pytest.fixture
    def clock(self) -> "Clock":
        return Clock()

    @pytest.fixture
    def reconciler(self, bench: Bench, clock: "Clock") -> Reconciler:
        settings = Settings(data_dir=bench.tmp_path)
        return Reconciler(settings, bench.database, bench.blobs, lambda *wake: True, clock)

    def late(self, bench: Bench, seconds: float = -1.0) -> None:
        with bench.database.write() as session:
            assert lifecycle.heartbeat(session, bench.claim, seconds)

    def test_after_a_jump_of_the_clock_every_worker_gets_the_time_of_a_lease(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        reconciler.run_once()
        self.late(bench)
        clock.now -= 3600  # as seen from ours, the database's clock went an hour ahead

        reconciler.run_once()

        assert bench.job().status == "running"
        assert "The clock jumped by +3600 s" in bench.events("warn")[-1]
        with bench.database.write() as session:
            assert lifecycle.heartbeat(session, bench.claim, 60)

    def test_a_lease_that_a_jump_put_far_into_the_future_ends_in_time(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        reconciler.run_once()
        self.late(bench, 3600.0)
        clock.now += 3600

        reconciler.run_once()

        assert present(bench.job().lease_expires_at) < time.time() + 61

    def test_the_next_pass_takes_back_the_job_of_a_worker_that_stays_silent(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        reconciler.run_once()
        clock.now -= 3600
        reconciler.run_once()
        self.late(bench)

        reconciler.run_once()

        assert bench.job().status == "queued"

    def test_after_an_outage_of_the_database_nobody_is_late(
        self, bench: Bench, reconciler: Reconciler
    ) -> None:
        reconciler.run_once()
        self.late(bench)
        away = reconciler.database
        reconciler.database = untyped(Away())
        reconciler.run_once()
        reconciler.database = away

        reconciler.run_once()

        assert bench.job().status == "running"
        assert "The database was unavailable" in bench.events("warn")[-1]

    @pytest.mark.parametrize("was_seen", [True, False], ids=["seen", "before the worker started"])
    def test_nothing_waits_for_a_time_from_before_the_clock_was_set_back(
        self, bench: Bench, clock: "Clock", was_seen: bool
    ) -> None:
        sent: list[Any] = []
        settings = Settings(data_dir=bench.tmp_path)
        reconciler = Reconciler(settings, bench.database, bench.blobs, factories.noting(sent), clock)
        if was_seen:
            reconciler.run_once()
            clock.now += 3600
        late = time.time() + 3599
        job = bench.job()
        with bench.database.write() as session:
            values = {"status": "queued", "dispatched_at": late, "next_run_at": late}
            session.execute(update(Job).values(**values, lease_owner=None, lease_expires_at=None))
            session.add(
                EvalRun(eval_id="e", project_id=job.project_id, name="r", data_source={}, total=1, **values)
            )
            session.add(
                Pipeline(
                    project_id=job.project_id, actor="key-1", stages=[], held_until=late, status="running"
                )
            )
            session.add(
                WebhookDelivery(
                    endpoint_id="we-1", job_id=job.id, type="t", body="", attempts=1, next_attempt_at=late
                )
            )

        reconciler.run_once()

        soon = time.time() + 1
        with bench.database.read() as session:
            for table in (Job, EvalRun):
                assert session.scalars(select(table.dispatched_at)).one() <= soon
                assert session.scalars(select(table.next_run_at)).one() <= soon + 60
            assert session.scalars(select(Pipeline.held_until)).one() <= soon + 60
            assert session.scalars(select(WebhookDelivery.next_attempt_at)).one() <= soon + 120
        with bench.database.write() as session:
            for each in (Job, EvalRun):
                session.execute(update(each).values(next_run_at=0.0))
        assert {task for task, _ in woken(bench.database)} == {queue.RUN, queue.EVAL}

    def test_several_reconcilers_say_it_once(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        second = Reconciler(reconciler.settings, bench.database, bench.blobs, lambda *wake: True, clock)
        reconciler.run_once()
        second.run_once()
        self.late(bench)
        clock.now -= 3600

        reconciler.run_once()
        second.run_once()

        assert len([e for e in bench.events("warn") if "jumped" in e]) == 1


def test_a_broker_that_is_away_is_an_event_of_the_jobs_that_wait_and_so_is_its_return(bench: Bench) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
    answers = [False, False, True, True]
    settings = Settings(data_dir=bench.tmp_path)
    reconciler = Reconciler(settings, bench.database, bench.blobs, lambda *wake: answers.pop(0))

    for _ in range(4):
        with bench.database.write() as session:
            session.get_one(Job, bench.job().seq).dispatched_at = 0.0  # as if the ten seconds had passed
        reconciler.run_once()

    assert answers == []
    assert bench.events("warn") == [BROKER_AWAY, BROKER_BACK]


class Clock:
    def __init__(self) -> None:
        self.start, self.now = time.monotonic(), 0.0

    def __call__(self) -> float:
        return self.now + time.monotonic() - self.start


class Away:
    """A database that cannot be reached."""

    def write(self) -> NoReturn:
        raise OperationalError("select 1", {}, Exception("connection refused"))

    read = write


def woken(database: Database) -> list[tuple[str, str]]:
    """The wake-ups that are due for what was sent none in this second."""
    with database.write() as session:
        return [*lifecycle.to_wake(session, older_than=-1.0), *eval_runs.to_wake(session, older_than=-1.0)]
