"""Named passes that make the rows true again, whatever got lost. Safe to run in many places at once."""

import logging
import threading
from collections.abc import Callable

from sqlalchemy import select

from core import jobs
from core.blobs import BlobStore
from core.db import Database, Send
from core.jobs import FINAL
from core.models import File, Job, StepMetric, now
from core.settings import Settings
from worker import results

log = logging.getLogger(__name__)

# A wake-up that nobody followed within this time was lost, or came when all were busy.
STALE_WAKE_SECONDS = 10.0


class Reconciler:
    def __init__(self, settings: Settings, database: Database, blobs: BlobStore, send: Send) -> None:
        self.settings = settings
        self.database = database
        self.blobs = blobs
        self.send = send

    @property
    def passes(self) -> list[Callable[[], None]]:
        return [self.expired_leases, self.stale_wake_ups, self.missing_results, self.deleted_files]

    def run_once(self) -> None:
        """Every pass once. One that fails is logged and does not keep the others from their work."""
        for one in self.passes:
            try:
                one()
            except Exception:
                log.exception("the reconciler's pass %s failed; it is tried again", one.__name__)

    def run_until(self, stop: threading.Event) -> None:
        while not stop.wait(self.settings.reconcile_seconds):
            self.run_once()

    def expired_leases(self) -> None:
        """Jobs whose worker has stopped answering wait again, and resume from their last checkpoint."""
        with self.database.write() as session:
            jobs.expire_leases(session, max_failures=self.settings.max_failures)

    def stale_wake_ups(self) -> None:
        """Tell somebody about work that nobody has taken."""
        with self.database.write() as session:
            waiting = jobs.to_wake(session, older_than=STALE_WAKE_SECONDS)
        for task, queue in waiting:
            self.send(task, queue)

    def missing_results(self) -> None:
        """The result file of jobs that ended without a run to write it: cancelled, or given up."""
        measured = select(StepMetric.job_id).where(StepMetric.job_id == Job.id).exists()
        with self.database.read() as session:
            ended = session.scalars(
                select(Job).where(Job.status.in_(FINAL), Job.result_file.is_(None), measured).limit(20)
            ).all()
        for job in ended:
            file = results.prepare(self.database, self.blobs, job)
            with self.database.write() as session:
                results.attach(session, session.get_one(Job, job.seq), file)

    def deleted_files(self) -> None:
        """Remove deleted files that no unfinished job reads any more: first the contents, then the row."""
        in_use = (
            select(Job.seq)
            .where(
                Job.status.not_in(FINAL), (Job.training_file == File.id) | (Job.validation_file == File.id)
            )
            .exists()
        )
        gone = File.deleted_at.is_not(None) | (File.expires_at < now())
        with self.database.read() as session:
            free = session.scalars(select(File).where(gone, ~in_use).limit(100)).all()
        for file in free:
            self.blobs.delete(file.blob_key)
            with self.database.write() as session:
                session.delete(session.get_one(File, file.seq))
