"""Retention: delete expired data and orphaned blobs.

Rows are deleted before blobs: a crash in between leaves orphaned blobs, which the sweep finds, and never a row whose
blobs are missing. Files are the exception: their rows keep `deleted_at` until their contents are deleted.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import ColumnElement, delete, select, update

from core.database import audit, pages
from core.database.engine import Database, earliest_now
from core.database.states import EVAL_RUN, JOB
from core.database.tables import (
    BackgroundRun,
    Checkpoint,
    EvalJournal,
    EvalPage,
    EvalRun,
    File,
    GraderAudit,
    Job,
    Preview,
    RolloutPage,
    TunedModel,
    now,
)
from core.results import background, lineage
from core.settings import Settings
from core.storage import files, orphans, uploads
from core.storage.store import BlobEntry, BlobStore, NotDeleted
from worker import compile_caches
from worker.supervisor.item_failures import ItemFailures
from worker.telemetry import PASS_FAILURES

log = logging.getLogger(__name__)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
# Maximum deletions per pass; the next pass continues.
PAGES_AT_ONCE, CHECKPOINTS_AT_ONCE, AUDIT_ENTRIES_AT_ONCE = 500, 20, 500
# A sweep of a large store takes long, so it is interleaved with the reconciler's other passes.
SWEEP_SECONDS = 1.0


class Retention:
    """The reconciler's passes over the blob store and caches. `clock` is in seconds and monotonic."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.database = database
        self.blobs = blobs
        self.pages_at_once, self.sweep_batch = PAGES_AT_ONCE, orphans.BATCH_SIZE
        self._clock = clock
        self._failures = ItemFailures(clock)  # of parts of uploads
        self._next_policy = clock()
        # Delayed, because a worker that starts has jobs to run.
        self._next_sweep = clock() + HOUR
        self._sweeping: Iterator[list[BlobEntry]] | None = None
        self._next_prune = clock() + HOUR

    @property
    def passes(self) -> list[Callable[[], None]]:
        return [self.expired_uploads, self.policies, self.orphans, self.compiled_kernels]

    def expired_uploads(self) -> None:
        """Expire uploads after an hour, and delete the parts of all that ended."""
        with self.database.write() as session:
            uploads.expire(session)
        waiting = self._failures.waiting()
        with _continuing("expired_uploads") as kept:
            uploads.discard_parts(self.database, self.blobs, skip=waiting)
        self._failures.forget_all_but({*waiting, *kept})
        for key in kept:
            self._failures.add(key)

    def policies(self) -> None:
        """Delete data past its retention period, once a minute, or continuously while more is due."""
        if self._clock() < self._next_policy:
            return
        more = [
            self._old_rollouts(),
            self._old_eval_items(),
            self._old_background_runs(Preview),
            self._old_background_runs(GraderAudit),
            self._old_checkpoints(),
            self._old_files(),
            self._old_audit_entries(),
        ]
        if not any(more):
            self._next_policy = self._clock() + MINUTE

    def orphans(self) -> None:
        """Start a sweep once an hour, and continue it for a second at a time."""
        if self._sweeping is None:
            if self._clock() < self._next_sweep:
                return
            self._next_sweep = self._clock() + HOUR
            with self.database.read() as session:
                older_than = earliest_now(session) - self.settings.orphan_hours * HOUR
            self.blobs.abort_stale_uploads(older_than)
            self._sweeping = sweep(
                self.database, self.blobs, older_than=older_than, batch_size=self.sweep_batch
            )
        until = self._clock() + SWEEP_SECONDS
        for removed in self._sweeping:
            for entry in removed:
                log.info("removed the orphaned blob %s (%d bytes)", entry.key, entry.size)
            if self._clock() >= until:
                return
        self._sweeping = None

    def compiled_kernels(self) -> None:
        """Once a day, delete compiled kernels of this machine that were not used for long."""
        if self._clock() >= self._next_prune:
            self._next_prune = self._clock() + DAY
            compile_caches.prune_in_background(self.settings.compile_cache)  # leases expire in this thread

    def _old_rollouts(self) -> bool:
        """Delete the graded samples of jobs past their retention. Returns whether there may be more."""
        if self.settings.keep_rollouts_days is None:
            return False
        with self.database.write() as session:
            before = earliest_now(session) - self.settings.keep_rollouts_days * DAY
            ended = select(Job.id).where(_ended(before))
            old = session.scalars(
                select(RolloutPage).where(RolloutPage.job_id.in_(ended)).limit(self.pages_at_once)
            ).all()
            for page in old:
                session.delete(page)
        with _continuing("policies"):  # a blob that stays is the sweep's
            self.blobs.delete_many([page.blob_key for page in old])
        return len(old) == self.pages_at_once

    def _old_eval_items(self) -> bool:
        """Delete the items and inline rows of eval runs past the retention of rollouts; their counts remain.

        Returns whether there may be more.
        """
        if self.settings.keep_rollouts_days is None:
            return False
        with self.database.write() as session:
            before = earliest_now(session) - self.settings.keep_rollouts_days * DAY
            ended = EvalRun.status.in_(EVAL_RUN.final) & (EvalRun.finished_at < before)
            runs = select(EvalRun.id).where(ended)
            old = session.scalars(
                select(EvalPage).where(EvalPage.run_id.in_(runs)).limit(self.pages_at_once)
            ).all()
            for page in old:
                session.delete(page)
            session.execute(delete(EvalJournal).where(EvalJournal.run_id.in_(runs)))
            rows = update(EvalRun).where(ended, EvalRun.content_bytes > 0)
            session.execute(
                rows.values(content=None, content_bytes=0).execution_options(synchronize_session=False)
            )
        with _continuing("policies"):  # a blob that stays is the sweep's
            self.blobs.delete_many([page.blob_key for page in old])
        return len(old) == self.pages_at_once

    def _old_background_runs(self, table: type[BackgroundRun]) -> bool:
        """Delete previews or audits past the retention of rollouts. Returns whether there may be more."""
        if self.settings.keep_rollouts_days is None:
            return False
        with self.database.write() as session:
            before = earliest_now(session) - self.settings.keep_rollouts_days * DAY
            return background.delete_old(session, table, before, self.pages_at_once) == self.pages_at_once

    def _old_checkpoints(self) -> bool:
        """Delete checkpoints of jobs past their retention, except for those with a model name, or that a job needs."""
        if self.settings.keep_checkpoints_days is None:
            return False
        named = select(TunedModel.seq).where(TunedModel.checkpoint_id == Checkpoint.id).exists()
        with self.database.write() as session:
            before = earliest_now(session) - self.settings.keep_checkpoints_days * DAY
            ended = select(Job.id).where(_ended(before))
            old = session.scalars(
                select(Checkpoint)
                .where(
                    Checkpoint.job_id.in_(ended),
                    ~named,
                    Checkpoint.id.not_in(lineage.checkpoints_in_use()),
                )
                .limit(CHECKPOINTS_AT_ONCE)
            ).all()
            for checkpoint in old:
                pages.delete_row(session, checkpoint, owner=checkpoint.job_id)
        for checkpoint in old:
            with _continuing("policies"):
                self.blobs.delete_prefix(f"{checkpoint.blob_prefix}/")
        return len(old) == CHECKPOINTS_AT_ONCE

    def _old_files(self) -> bool:
        """Delete files as their owner would; the reconciler's pass for deleted files removes their contents."""
        if self.settings.keep_files_days is None:
            return False
        with self.database.write() as session:
            old = File.created_at < earliest_now(session) - self.settings.keep_files_days * DAY
            session.execute(
                update(File)
                .where(old, File.deleted_at.is_(None), ~files.in_use())
                .values(deleted_at=now())
                .execution_options(synchronize_session=False)
            )
        return False

    def _old_audit_entries(self) -> bool:
        """Delete entries of the audit log past their retention. Returns whether there may be more."""
        if self.settings.keep_audit_days == 0:
            return False
        with self.database.write() as session:
            before = earliest_now(session) - self.settings.keep_audit_days * DAY
            return audit.delete_old(session, before, AUDIT_ENTRIES_AT_ONCE) == AUDIT_ENTRIES_AT_ONCE


def sweep(
    database: Database,
    blobs: BlobStore,
    *,
    older_than: float,
    dry_run: bool = False,
    batch_size: int = orphans.BATCH_SIZE,
) -> Iterator[list[BlobEntry]]:
    """Delete orphaned blobs that were last written before this Unix time.

    Advances as it is iterated, and yields the removed blobs (with `dry_run`, those it would remove). One that cannot be
    deleted stays, and is logged.
    """
    for batch in orphans.find(database, blobs, older_than=older_than, batch_size=batch_size):
        kept: list[str] = []
        if batch and not dry_run:
            with _continuing("orphans") as kept:
                blobs.delete_many([entry.key for entry in batch])
        yield [entry for entry in batch if entry.key not in kept]


@contextmanager
def _continuing(name: str) -> Iterator[list[str]]:
    """Log and count blobs that cannot be deleted, so that the pass `name` continues. Gets their keys at the end."""
    kept: list[str] = []
    try:
        yield kept
    except NotDeleted as some:
        kept += some.causes
        PASS_FAILURES.labels(name).inc()
        for key, cause in some.causes.items():
            log.error("the blob %s cannot be deleted, so it stays: %r", key, cause)


def _ended(before: float) -> ColumnElement[bool]:
    """Select final jobs that ended before this Unix time."""
    return Job.status.in_(JOB.final) & (Job.finished_at < before)
