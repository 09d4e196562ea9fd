"""Reads every file and every checkpoint against its hash, again and again, a share of them each day.

A byte that changes on a disk is found while other copies are still around, and not on the day it is needed. All
workers share one row that says how far the round has come, so each object is read once in a round.
"""

import logging
import time
from collections.abc import Callable, Iterator

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core import fsck
from core.blobs import BlobStore
from core.db import Database
from core.fsck import Finding
from core.models import Checkpoint, File, ScrubRound
from worker.telemetry import SCRUBBED

log = logging.getLogger(__name__)

DAY = 86400.0
# The reconciler has more urgent things to do in between.
SECONDS_AT_ONCE = 1.0
# How long a worker that has nothing to read waits before it looks again.
PAUSE_SECONDS = 60.0


class Scrub:
    """The reconciler's pass that reads what is due. A round takes `days`; 0: nothing is ever read.

    Args:
        clock: In seconds, never goes back.
        wall: Unix time: a round goes on where it was when all workers had been stopped.
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
        # Not at once: a worker that starts has jobs to run.
        self._next = clock() + PAUSE_SECONDS
        self._reading: Iterator[None] | None = None

    def run_for_a_second(self) -> None:
        """Read what is due. A large object is gone on with in the next pass."""
        until = self._clock() + SECONDS_AT_ONCE
        while self.days and (self._reading is not None or self._clock() >= self._next):
            reading, self._reading = self._reading or self._take(), None  # one that fails is not gone on with
            if reading is None:
                self._next = self._clock() + PAUSE_SECONDS
                return
            for _ in reading:
                if self._clock() >= until:
                    self._reading = reading
                    return

    def _take(self) -> Iterator[None] | None:
        """Claim the next object that is due and begin to read it. None: nothing is due."""
        with self.database.write() as session:
            turn = session.get(ScrubRound, 1, with_for_update=True)
            if turn is None:
                turn = ScrubRound(id=1, started_at=self._wall(), file_seq=0, checkpoint_seq=0)
                session.add(turn)
            share = min(1.0, (self._wall() - turn.started_at) / (self.days * DAY))
            file = session.scalars(
                select(File)
                .where(File.seq > turn.file_seq, File.seq <= share * _newest(session, File))
                .where(File.deleted_at.is_(None))
                .order_by(File.seq)
                .limit(1)
            ).first()
            if file is not None:
                turn.file_seq = file.seq
                return self._read(file, fsck.of_file(self.blobs, file))
            checkpoint = session.scalars(
                select(Checkpoint)
                .where(Checkpoint.seq > turn.checkpoint_seq)
                .where(Checkpoint.seq <= share * _newest(session, Checkpoint))
                .order_by(Checkpoint.seq)
                .limit(1)
            ).first()
            if checkpoint is not None:
                turn.checkpoint_seq = checkpoint.seq
                return self._read(checkpoint, fsck.of_checkpoint(self.blobs, checkpoint))
            if share == 1.0:
                turn.started_at, turn.file_seq, turn.checkpoint_seq = self._wall(), 0, 0
        return None

    def _read(self, owner: File | Checkpoint, reading: Iterator[Finding | None]) -> Iterator[None]:
        found: list[Finding] = []
        for finding in reading:
            if finding is not None:
                found.append(finding)
            yield
        if found and not self._is_there(owner):
            return
        for finding in found:
            log.error("%s of %s is %s; the scrub has found it", finding.key, finding.owner, finding.problem)
        SCRUBBED.labels(found[0].problem if found else "whole").inc()

    def _is_there(self, owner: File | Checkpoint) -> bool:
        """Whether it was not deleted while it was read."""
        with self.database.read() as session:
            row = session.get(type(owner), owner.seq)
            return row is not None and not (isinstance(row, File) and row.deleted_at)


def _newest(session: Session, table: type[File] | type[Checkpoint]) -> int:
    return session.scalar(select(func.max(table.seq))) or 0
