"""Named passes that repair rows after failures. Safe to run concurrently on many machines."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Database, Send, db_now, earliest_now
from core.database.states import JOB
from core.database.tables import File, Job, StepMetric
from core.evals import batches, catalog
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle
from core.jobs.queue import unread_queues
from core.outages import outage
from core.pipelines import lifecycle as pipelines
from core.service import workers
from core.settings import Settings
from core.storage import files
from core.storage.store import BlobStore
from core.storage.uncommitted import Uncommitted
from core.tenancy import idempotency
from worker.recording import results
from worker.supervisor import deliveries
from worker.supervisor.item_failures import ItemFailures
from worker.supervisor.retention import Retention
from worker.supervisor.scrub import Scrub
from worker.telemetry import PASS_FAILURES

log = logging.getLogger(__name__)

BROKER_AWAY = (
    "The broker is unreachable, so no worker is notified of this job; a free worker finds it within seconds."
)
BROKER_BACK = "The broker is reachable again."
# A larger difference between the elapsed time of our clock and the database's means that one of them jumped.
CLOCK_JUMP_SECONDS = 5.0
# A message without a claim after this time was lost, or arrived when all workers were busy.
STALE_WAKE_SECONDS = 10.0
# Between two passes that delete rows of a day or a month ago.
CLEANUP_SECONDS = 60.0
# Of one item of a pass, which take six minutes.
MAX_ITEM_TRIES = 10


@dataclass(frozen=True)
class _Clocks:
    """The time of the database, and ours before and after the query for it, which may wait for a connection."""

    began: float
    ended: float
    theirs: float

    def jumped_since(self, before: "_Clocks") -> float:
        """The least jump of a clock that explains both readings; positive: the database's is further ahead."""
        passed = self.theirs - before.theirs
        least, most = self.began - before.ended, self.ended - before.began
        return passed - min(max(passed, least), most)


class Reconciler:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        *,
        wake: Callable[[str], object] = lambda task: None,
    ) -> None:
        """`wake` has this worker look for the work of a task, and returns at once."""
        self.wake = wake
        self.settings = settings
        self.database = database
        self.blobs = blobs
        self.send = send
        self._clock = clock
        self._seen: _Clocks | None = None  # in the last pass that reached the database
        self._expires_from = float("inf")  # by our clock
        self._database_was_away = False
        self._broker_is_away = False
        self._next_cleanup = float("-inf")
        self._failures = ItemFailures(clock)
        self.retention = Retention(settings, database, blobs, clock)
        self.scrubber = Scrub(settings.scrub_days, database, blobs, clock)

    @property
    def passes(self) -> list[Callable[[], None]]:
        return [
            self.expired_leases,
            self.stale_wake_ups,
            self.unannounced_work,
            self.missing_results,
            self.files_of_batches,
            *self.retention.passes,
            self.scrubber.scrub,
            self.deleted_files,
        ]

    @property
    def cleanups(self) -> list[Callable[[], None]]:
        return [self.old_deliveries, self.forgotten_answers, self.silent_workers]

    def run_once(self) -> None:
        """Run every pass that is due. A failed pass is logged and does not stop the others."""
        passes = self.passes
        if self._clock() >= self._next_cleanup:
            self._next_cleanup = self._clock() + CLEANUP_SECONDS
            passes += self.cleanups
        for one in passes:
            try:
                one()
            except Exception:
                PASS_FAILURES.labels(one.__name__).inc()
                log.exception("the reconciler pass %s failed; it will be retried", one.__name__)

    def run_until(self, stop: threading.Event) -> None:
        while not stop.wait(self.settings.reconcile_seconds):
            self.run_once()

    def expired_leases(self) -> None:
        """Requeue jobs whose leases expired; they resume from their last checkpoints.

        A lease may also expire because the database was unreachable or its clock jumped. Then all workers get the
        duration of a lease to renew theirs. A process that has just started cannot know of either: it expires no lease
        before it has reached the database for half the duration of one, in which living workers renew theirs twice.
        """
        try:
            with self.database.write() as session:
                is_first = self._seen is None
                if (excuse := self._excuse(session)) is not None:
                    lifecycle.extend_leases(session, self.settings.lease_seconds, excuse)
                    eval_runs.extend_leases(session, self.settings.lease_seconds)
                    pipelines.extend_leases(session, pipelines.LEASE_SECONDS)
                    log.warning("%s", excuse)
                    self._expires_from = self._clock()  # all leases have just begun anew
                if is_first or excuse is not None:  # a jump before the first pass is not seen
                    self._bound_times(session)
                if is_first:
                    self._expires_from = self._clock() + self.settings.lease_seconds / 2
                if self._clock() >= self._expires_from:
                    lifecycle.expire_leases(session, max_failures=self.settings.max_failures)
                    eval_runs.expire_leases(session)
                eval_runs.expire_batches(session, batches.WINDOW_SECONDS)
        except SQLAlchemyError:
            self._database_was_away = True
            raise
        self._database_was_away = False

    def _excuse(self, session: Session) -> str | None:
        """Return why leases may have expired although their workers are alive, or None."""
        began = self._clock()
        theirs = session.scalars(select(db_now())).one()
        before, self._seen = self._seen, _Clocks(began, self._clock(), theirs)
        if before is None:
            return None
        jump = self._seen.jumped_since(before)
        if abs(jump) > CLOCK_JUMP_SECONDS:
            return f"The clock jumped by {jump:+.0f} s; no lease expires because of it."
        if self._database_was_away or self._seen.ended - self._seen.began > CLOCK_JUMP_SECONDS:
            passed = self._seen.ended - before.ended
            return f"The database was unavailable for up to {passed:.0f} s; no lease expires because of it."
        return None

    def _bound_times(self, session: Session) -> None:
        """Nothing waits for a time that was written before the clock was set back."""
        lifecycle.bound_times(session, self.settings.lease_seconds)
        eval_runs.bound_times(session, self.settings.lease_seconds)
        pipelines.bound_times(session, pipelines.LEASE_SECONDS)
        deliveries.bound_times(session)

    def stale_wake_ups(self) -> None:
        """Notify workers of queued work that no worker has claimed."""
        with self.database.write() as session:
            waiting = [
                *lifecycle.to_wake(session, older_than=STALE_WAKE_SECONDS),
                *eval_runs.to_wake(session, older_than=STALE_WAKE_SECONDS),
            ]
        # A queue that no worker reads gets no message, which says nothing about the broker.
        unread = unread_queues(self.settings)
        sent = [self.send(task, queue) for task, queue in waiting if queue not in unread]
        if sent and self._broker_is_away == all(sent):
            self._broker_is_away = not all(sent)
            with self.database.write() as session:
                lifecycle.notify_queued(session, BROKER_AWAY if self._broker_is_away else BROKER_BACK)

    def unannounced_work(self) -> None:
        """Wake this worker for queued work, because messages are lost and the broker may be unreachable."""
        with self.database.read() as session:
            tasks = [
                *lifecycle.tasks_waiting(session, self.settings.gpu_class),
                *eval_runs.tasks_waiting(session),
            ]
        for task in tasks:
            self.wake(task)

    def missing_results(self) -> None:
        """Write the result file of jobs that ended without a run: cancelled, or failed after too many attempts."""
        measured = select(StepMetric.job_id).where(StepMetric.job_id == Job.id).exists()
        lacking = select(Job).where(Job.status.in_(JOB.final), Job.result_file.is_(None), measured)
        with self.database.read() as session:
            ended = session.scalars(lacking.where(Job.id.not_in(self._failures.waiting())).limit(20)).all()
        for job in ended:
            with self._tried(job.id, "missing_results"):
                self._write_result(job)

    def _write_result(self, job: Job) -> None:
        if (file := results.prepare(self.database, self.blobs, job)) is None:
            return
        with Uncommitted(self.blobs, file.blob_key) as uncommitted, self.database.write() as session:
            if results.attach(session, session.get_one(Job, job.seq), file):
                uncommitted.keep_all()

    def files_of_batches(self) -> None:
        """Write the files of batches that ended without a worker: cancelled, expired or failed."""
        with self.database.read() as session:
            ended = [batch.id for batch in batches.due(session, self._failures.waiting())]
        for batch_id in ended:
            with self._tried(batch_id, "files_of_batches", give_up=partial(batches.give_up, self.database)):
                batches.write_files(self.database, self.blobs, batch_id)

    def deleted_files(self) -> None:
        """Remove deleted files that no unfinished job reads: first the contents, then the row.

        Contents that another file shares stay.
        """
        with self.database.read() as session:
            gone = File.deleted_at.is_not(None) | (File.expires_at < earliest_now(session))
            gone &= File.id.not_in(self._failures.waiting())
            free = session.scalars(select(File).where(gone, ~files.in_use()).limit(100)).all()
        for file in free:
            with self._tried(file.id, "deleted_files"):
                self._remove(file)

    def _remove(self, file: File) -> None:
        with self.database.read() as session:
            is_shared = files.is_shared(session, file)
        if not is_shared:
            self.blobs.delete_many([file.blob_key])  # whose error is about this file only
        with self.database.write() as session:
            row = session.scalar(select(File).where(File.seq == file.seq).with_for_update())
            if row is not None:  # else another reconciler was faster
                pages.delete_row(session, row, owner=row.project_id)

    @contextmanager
    def _tried(
        self, item_id: str, name: str, *, give_up: Callable[[str], None] = lambda item_id: None
    ) -> Iterator[None]:
        """Log the failure of one item of the pass `name`, so that the pass continues with the others.

        An outage ends the pass, because every other item would meet it. After MAX_ITEM_TRIES `give_up` is called with
        the id.
        """
        try:
            yield
        except Exception as cause:
            if outage(cause) is not None:
                raise
            PASS_FAILURES.labels(name).inc()
            log.exception("the reconciler pass %s failed for %s; it will be retried", name, item_id)
            if self._failures.add(item_id) >= MAX_ITEM_TRIES:
                give_up(item_id)
        else:
            self._failures.forget(item_id)

    def old_deliveries(self) -> None:
        """Delete webhook deliveries that were settled a month ago."""
        deliveries.remove_old(self.database)

    def forgotten_answers(self) -> None:
        """Delete idempotency keys after a day, and tombstones of deleted rows (for cursors) after a month."""
        with self.database.write() as session:
            idempotency.forget(session)
            pages.forget_past_cursors(session, earliest_now(session))
            catalog.forget_deleted(session)

    def silent_workers(self) -> None:
        """Remove workers that have not reported themselves for a day."""
        with self.database.write() as session:
            workers.forget(session)
