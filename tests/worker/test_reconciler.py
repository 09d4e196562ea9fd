"""What the reconciler puts right, pass by pass."""

import asyncio
import time
from typing import Any, NoReturn

import pytest
from sqlalchemy import event, select, update
from sqlalchemy.exc import OperationalError

from core.database.engine import Database, Work
from core.database.tables import (
    EvalRun,
    File,
    IdempotentRequest,
    Job,
    Pipeline,
    StepMetric,
    WebhookDelivery,
    now,
)
from core.evals import lifecycle as eval_runs
from core.hardware import GpuClass
from core.jobs import lifecycle, queue
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy.idempotency import RETENTION_SECONDS
from tests import factories
from tests.hardware import hardware_file
from tests.present import present, untyped
from tests.worker.conftest import Bench
from worker.recording import results
from worker.supervisor.reconciler import BROKER_AWAY, BROKER_BACK, Reconciler


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
    run.stop_requested = lambda: run.experience.trainer.updates == 2
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


class Stubborn(FolderBlobs):
    """A store that deletes all blobs but one."""

    def delete(self, key: str) -> None:
        if key == "files/stuck":
            raise RuntimeError("the object is locked")
        super().delete(key)


def test_a_file_that_cannot_be_deleted_stops_no_other(bench: Bench, reconciler: Reconciler) -> None:
    stored_file(bench, key="files/stuck", deleted_at=now())
    stored_file(bench, key="files/x", deleted_at=now())
    reconciler.blobs = Stubborn(bench.tmp_path / "blobs")

    reconciler.deleted_files()
    reconciler.deleted_files()

    assert list(bench.blobs.list("files/")) == ["files/stuck"]


def test_a_job_whose_result_file_cannot_be_written_stops_no_other(
    bench: Bench, reconciler: Reconciler
) -> None:
    with bench.database.write() as session:
        broken = factories.job(session, bench.project, status="failed")
        session.add(StepMetric(job_id=broken.id, step=1, epoch=1, data={"timing": "of another version"}))
        whole = factories.job(session, bench.project, status="failed")
        factories.step(session, whole, 1)

    reconciler.missing_results()

    with bench.database.read() as session:
        assert session.scalars(select(Job.id).where(Job.result_file.is_not(None))).all() == [whole.id]


def test_two_reconcilers_give_a_job_one_result_file(bench: Bench, reconciler: Reconciler) -> None:
    with bench.database.write() as session:
        ended = factories.job(session, bench.project, status="cancelled")
        factories.step(session, ended, 1)
    with bench.database.read() as session:
        job = session.get_one(Job, ended.seq)
    slow = present(results.prepare(bench.database, bench.blobs, job))
    reconciler.missing_results()

    with bench.database.write() as session:
        stale = session.merge(job, load=False)
        assert results.attach(session, stale, slow) is False

    with bench.database.read() as session:
        assert len(session.scalars(select(File).where(File.purpose == "fine-tune-results")).all()) == 1


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
        reconciler = Reconciler(settings, bench.database, bench.blobs, lambda *wake: True, clock)
        reconciler.expired_leases()
        self.passes(reconciler, clock, 8)  # longer than half of a lease
        return reconciler

    def passes(self, reconciler: Reconciler, clock: "Clock", number: int) -> None:
        """One every four seconds, which is no jump of a clock."""
        for _ in range(number):
            clock.now += 4.0
            reconciler.expired_leases()

    def late(self, bench: Bench, seconds: float = -1.0) -> None:
        with bench.database.write() as session:
            assert lifecycle.heartbeat(session, bench.claim, seconds)

    def test_the_job_of_a_silent_worker_waits_again(self, bench: Bench, reconciler: Reconciler) -> None:
        self.late(bench)

        reconciler.run_once()

        job = bench.job()
        assert (job.status, job.failures) == ("queued", 1)

    def test_a_worker_that_starts_as_the_database_comes_back_gives_the_others_time_to_renew(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        """It has not seen for how long the database was away, in which no worker could renew its lease."""
        started = Reconciler(reconciler.settings, untyped(Away()), bench.blobs, lambda *wake: True, clock)
        self.late(bench)
        started.run_once()
        started.database = bench.database

        started.expired_leases()
        self.passes(started, clock, 7)

        assert bench.job().status == "running"
        self.passes(started, clock, 1)
        assert bench.job().status == "queued"

    def test_a_database_that_answers_late_has_no_clock_that_jumps(
        self, bench: Bench, reconciler: Reconciler, clock: "Clock"
    ) -> None:
        """The pass has waited for a connection, as the heartbeats of all workers have."""
        self.late(bench)
        waits = [20.0]

        @event.listens_for(bench.database.engine, "begin")
        def on_begin(connection: Any) -> None:
            clock.now += waits.pop() if waits else 0.0

        clock.now -= 20.0
        reconciler.expired_leases()
        reconciler.expired_leases()

        assert waits == []
        [told] = bench.events("warn")
        assert told.startswith("The database was unavailable for up to")
        assert bench.job().status == "running"

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
                    project_id=job.project_id, actor="key-1", stages=[], next_run_at=late, status="running"
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
            for table, longest in ((Job, lifecycle.MAX_PUT_OFF), (EvalRun, eval_runs.PUT_OFF_SECONDS)):
                assert session.scalars(select(table.dispatched_at)).one() <= soon
                assert session.scalars(select(table.next_run_at)).one() <= soon + longest
            assert session.scalars(select(Pipeline.next_run_at)).one() <= soon + 60
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


def test_work_whose_queue_gets_no_messages_says_nothing_about_the_broker(bench: Bench) -> None:
    """Kubernetes Jobs read the database, so no message is sent for them."""
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
        other = factories.job(session, bench.project, gpu_class="pool").id
        job_id = job.id
    classes = {"pool": GpuClass(in_kubernetes_jobs=True), "cpu": GpuClass()}
    settings = Settings(data_dir=bench.tmp_path, hardware_file=hardware_file(bench.tmp_path, classes))
    unread = queue.unread_queues(settings)
    reconciler = Reconciler(
        settings, bench.database, bench.blobs, lambda task, queue, about="": queue in unread
    )

    for waiting in ([job_id, other], [other]):
        with bench.database.write() as session:
            session.execute(update(Job).values(dispatched_at=time.time()))
            session.execute(update(Job).where(Job.id.in_(waiting)).values(dispatched_at=0.0))
        reconciler.run_once()

    assert bench.events("warn") == [BROKER_AWAY]


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
