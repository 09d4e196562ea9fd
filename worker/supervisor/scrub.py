"""Verify the hash of every file and every checkpoint continuously, a share of them each day.

This detects bit rot while other copies still exist. All workers share one row with the position of the round; one
worker at a time leases it and reads.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.database.engine import Database
from core.database.ids import new_id
from core.database.tables import Checkpoint, File, ScrubRound
from core.storage import fsck
from core.storage.fsck import StorageProblem
from core.storage.store import BlobStore, check_not_empty, is_store_away
from worker.telemetry import SCRUBBED

log = logging.getLogger(__name__)

DAY = 86400.0
# Interleaved with the reconciler's other passes.
SECONDS_AT_ONCE = 1.0
# Pause of a worker after finding nothing to read, or failing to read.
PAUSE_SECONDS = 60.0
# Lease of the round.
HELD_SECONDS = 300.0
# How often an object is tried that cannot be read although the store answers, such as one without permission.
MAX_TRIES = 5


@dataclass(frozen=True)
class _Reading:
    """An object being hashed. `chunks` yields after each chunk."""

    owner: File | Checkpoint
    chunks: Iterator[None]


class Scrub:
    """The reconciler's pass that verifies due objects. A round takes `days`; 0 disables it.

    Args:
        clock: In seconds, monotonic.
        wall: Unix time, so that a round resumes at its position after all workers were stopped.
    """

    def __init__(
        self,
        days: float,
        database: Database,
        blobs: BlobStore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.days = days
        self.database = database
        self.blobs = blobs
        self._clock = clock
        self._wall = wall
        self._name = new_id("scrub_")
        # Delayed, because a worker that starts has jobs to run.
        self._next = clock() + PAUSE_SECONDS
        self._reading: _Reading | None = None
        self._done: File | Checkpoint | None = None
        self._tries = 0  # of the object that is read now

    def scrub(self) -> None:
        """Read due objects for about a second. The next pass continues with a large object."""
        until = self._clock() + SECONDS_AT_ONCE
        while self.days and self._clock() >= self._next:
            try:
                if not self._read_on(until):
                    return
            except Exception:
                # The position stays at an unreadable object, so that the next pass retries it.
                self._reading, self._next = None, self._clock() + PAUSE_SECONDS
                raise

    def _read_on(self, until: float) -> bool:
        """Continue with an object, or begin the next one. Returns whether this pass has time left."""
        reading = self._reading = self._hold()
        if reading is None:
            self._next = self._clock() + PAUSE_SECONDS
            return False
        try:
            for _ in reading.chunks:
                if self._clock() >= until:
                    return False
        except Exception as cause:
            self._tries += 1
            if is_store_away(cause) or self._tries < MAX_TRIES:
                raise
            # The objects after it must be read, too.
            log.exception("%s cannot be read; the round continues without it", reading.owner.id)
            SCRUBBED.labels("unreadable").inc()
        self._reading, self._done, self._tries = None, reading.owner, 0
        return self._clock() < until

    def _hold(self) -> _Reading | None:
        """Renew the lease on the round, record the object that was read, and select the one to read.

        Returns:
            None if no object is due, or if another worker holds the lease.
        """
        reading, done, self._done = self._reading, self._done, None
        with self.database.write() as session:
            turn = self._round(session)
            now = self._wall()
            if turn.holder == self._name:
                self._record(turn, done)
            elif now < turn.held_until <= now + HELD_SECONDS:
                return None
            else:
                reading = None  # another worker has moved the position since
            reading = reading or self._due(session, turn, now)
            turn.holder, turn.held_until = self._name, now + HELD_SECONDS if reading else 0.0
        return reading

    def _round(self, session: Session) -> ScrubRound:
        turn = session.get(ScrubRound, 1, with_for_update=True)
        if turn is not None:
            return turn
        try:
            with session.begin_nested():
                turn = ScrubRound(id=1, started_at=self._wall())
                session.add(turn)
        except IntegrityError:  # another worker inserted it first
            return session.get_one(ScrubRound, 1, with_for_update=True)
        return turn

    @staticmethod
    def _record(turn: ScrubRound, done: File | Checkpoint | None) -> None:
        if isinstance(done, File):
            turn.file_seq = done.seq
        elif done is not None:
            turn.checkpoint_seq = done.seq

    def _due(self, session: Session, turn: ScrubRound, now: float) -> _Reading | None:
        """Return the next due object of this round. At the end of the round, start the next one."""
        turn.started_at = min(turn.started_at, now)  # after a clock jump backwards, do not wait
        share = min(1.0, (now - turn.started_at) / (self.days * DAY))
        file = session.scalars(
            select(File)
            .where(File.seq > turn.file_seq, File.seq <= share * _newest(session, File))
            .where(File.deleted_at.is_(None), or_(File.expires_at.is_(None), File.expires_at > now))
            .order_by(File.seq)
            .limit(1)
        ).first()
        if file is not None:
            return self._begun(file, fsck.of_file(self.blobs, file))
        checkpoint = session.scalars(
            select(Checkpoint)
            .where(Checkpoint.seq > turn.checkpoint_seq)
            .where(Checkpoint.seq <= share * _newest(session, Checkpoint))
            .order_by(Checkpoint.seq)
            .limit(1)
        ).first()
        if checkpoint is not None:
            return self._begun(checkpoint, fsck.of_checkpoint(self.blobs, checkpoint))
        if share == 1.0:
            turn.started_at, turn.file_seq, turn.checkpoint_seq = now, 0, 0
        return None

    def _begun(self, owner: File | Checkpoint, findings: Iterator[StorageProblem | None]) -> _Reading:
        return _Reading(owner, self._read(owner, findings))

    def _read(self, owner: File | Checkpoint, findings: Iterator[StorageProblem | None]) -> Iterator[None]:
        found: list[StorageProblem] = []
        for finding in findings:
            if finding is not None:
                found.append(finding)
            yield
        if any(finding.problem == "missing" for finding in found):
            check_not_empty(self.blobs)
        if found and not self._is_there(owner):
            return
        for finding in found:
            log.error(
                "%s of %s is %s; see docs/howto/storage.md (Integrity)",
                finding.key,
                finding.owner,
                finding.problem,
            )
        SCRUBBED.labels(found[0].problem if found else "whole").inc()

    def _is_there(self, owner: File | Checkpoint) -> bool:
        """Return whether the object still exists, because it may be deleted while it is read."""
        with self.database.read() as session:
            row = session.get(type(owner), owner.seq)
            return row is not None and not (isinstance(row, File) and row.deleted_at)


def _newest(session: Session, table: type[File] | type[Checkpoint]) -> int:
    return session.scalar(select(func.max(table.seq))) or 0
