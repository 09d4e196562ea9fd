"""What is deleted because its time has come, and what nobody will ever come back for.

Rows go first, then the blobs: a crash in between leaves blobs without a row, which the sweep finds, and never a
row that promises what is gone. Files are the exception, whose rows say `deleted_at` until their contents are gone.
"""

import logging
import time
from collections.abc import Callable, Iterator

from sqlalchemy import ColumnElement, select, update

from core import files, orphans, pages, uploads
from core.blobs import BlobEntry, BlobStore
from core.db import Database
from core.jobs import FINAL
from core.models import Checkpoint, File, Job, RolloutPage, TunedModel, now
from core.settings import Settings

log = logging.getLogger(__name__)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
# What a pass deletes at most; while there is more, the next one goes on with it.
PAGES_AT_ONCE, CHECKPOINTS_AT_ONCE = 500, 20
# A sweep of a large store takes long, and the reconciler has more urgent things to do in between.
SWEEP_SECONDS = 1.0


class Retention:
    """The reconciler's passes over what lies in the blob store. `clock` is in seconds and never goes back."""

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
        self._clock = clock
        self._next_policy = clock()
        # Not at once: a worker that starts has jobs to run.
        self._next_sweep = clock() + HOUR
        self._sweeping: Iterator[list[BlobEntry]] | None = None

    @property
    def passes(self) -> list[Callable[[], None]]:
        return [self.expired_uploads, self.policies, self.orphans]

    def expired_uploads(self) -> None:
        """Close uploads whose hour is over, and delete the parts of all that ended."""
        with self.database.write() as session:
            uploads.expire(session)
        uploads.discard_parts(self.database, self.blobs)

    def policies(self) -> None:
        """Delete what the operator keeps for a while only; once a minute, and at once again while there is more."""
        if self._clock() < self._next_policy:
            return
        more = [self._old_rollouts(), self._old_checkpoints(), self._old_files()]
        if not any(more):
            self._next_policy = self._clock() + MINUTE

    def orphans(self) -> None:
        """Begin a sweep once an hour, and go on with it for a second at a time."""
        if self._sweeping is None:
            if self._clock() < self._next_sweep:
                return
            self._next_sweep = self._clock() + HOUR
            older_than = time.time() - self.settings.orphan_hours * HOUR
            self.blobs.abort_stale_uploads(older_than)
            self._sweeping = sweep(self.database, self.blobs, older_than=older_than)
        until = self._clock() + SWEEP_SECONDS
        for removed in self._sweeping:
            for entry in removed:
                log.info("removed %s (%d bytes), which nothing refers to", entry.key, entry.size)
            if self._clock() >= until:
                return
        self._sweeping = None

    def _old_rollouts(self) -> bool:
        """The graded samples of jobs that ended long ago. Returns whether there may be more."""
        if self.settings.keep_rollouts_days is None:
            return False
        with self.database.write() as session:
            ended = select(Job.id).where(_ended(self.settings.keep_rollouts_days))
            old = session.scalars(
                select(RolloutPage).where(RolloutPage.job_id.in_(ended)).limit(PAGES_AT_ONCE)
            ).all()
            for page in old:
                session.delete(page)
        self.blobs.delete_many([page.blob_key for page in old])
        return len(old) == PAGES_AT_ONCE

    def _old_checkpoints(self) -> bool:
        """Those of jobs that ended long ago, but for the ones that a model's name leads to."""
        if self.settings.keep_checkpoints_days is None:
            return False
        named = select(TunedModel.seq).where(TunedModel.checkpoint_id == Checkpoint.id).exists()
        with self.database.write() as session:
            ended = select(Job.id).where(_ended(self.settings.keep_checkpoints_days))
            old = session.scalars(
                select(Checkpoint).where(Checkpoint.job_id.in_(ended), ~named).limit(CHECKPOINTS_AT_ONCE)
            ).all()
            for checkpoint in old:
                pages.delete_row(session, checkpoint, owner=checkpoint.job_id)
        for checkpoint in old:
            self.blobs.delete_prefix(f"{checkpoint.blob_prefix}/")
        return len(old) == CHECKPOINTS_AT_ONCE

    def _old_files(self) -> bool:
        """Deletes them as their owner would have; the reconciler's pass for deleted files does the rest."""
        if self.settings.keep_files_days is None:
            return False
        old = File.created_at < time.time() - self.settings.keep_files_days * DAY
        with self.database.write() as session:
            session.execute(
                update(File)
                .where(old, File.deleted_at.is_(None), ~files.in_use())
                .values(deleted_at=now())
                .execution_options(synchronize_session=False)
            )
        return False


def sweep(
    database: Database, blobs: BlobStore, *, older_than: float, dry_run: bool = False
) -> Iterator[list[BlobEntry]]:
    """Delete the blobs that no row refers to and that were last written before this Unix time.

    It goes on as it is iterated, and yields what it removed (or with `dry_run` would have).
    """
    for batch in orphans.find(database, blobs, older_than=older_than):
        if batch and not dry_run:
            blobs.delete_many([entry.key for entry in batch])
        yield batch


def _ended(days: float) -> ColumnElement[bool]:
    """Jobs that nobody can resume, and that ended so long ago."""
    return Job.status.in_(FINAL) & (Job.finished_at < time.time() - days * DAY)
