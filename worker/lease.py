"""Renew the lease of a claim while this process does its work: validation and eval runs have no supervisor."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.jobs import lifecycle

log = logging.getLogger(__name__)

# Longer than a grade's deadline in the dry run (30 s) with the start of a sandbox, or a read from a slow blob store.
STALL_SECONDS = 180.0


class LeaseKeeper:
    """Renews a claim's lease in its own thread, within a `with` block, for as long as the work makes progress.

    Once the work has stalled for `stall_seconds`, the keeper stops renewing; the lease expires and another worker
    claims the job.
    """

    def __init__(
        self,
        database: Database,
        claim: Claim,
        lease_seconds: float,
        *,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        heartbeat: Callable[[Session, Claim, float], bool] = lifecycle.heartbeat,
    ) -> None:
        self._heartbeat = heartbeat
        self.database, self.claim, self.lease_seconds = database, claim, lease_seconds
        self.stall_seconds = stall_seconds
        self._clock = clock
        self._moved_at = clock()
        self._lost = threading.Event()
        self._ended = threading.Event()
        self._on_loss: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def moved(self) -> None:
        """The work got somewhere. Cheap: call it for every row and every grade."""
        self._moved_at = self._clock()

    def progressed(self) -> None:
        """As `moved`, where the work can stop.

        Raises:
            LeaseLost: the job is no longer this claim's.
        """
        self.moved()
        if self._lost.is_set():
            raise LeaseLost(f"{self.claim.owner} no longer holds {self.claim.job_id}")

    def when_lost(self, stop: Callable[[], object]) -> None:
        """Have `stop` called, in the keeper's thread, as soon as the lease is lost; at once if it is already."""
        self._on_loss = stop
        if self._lost.is_set():
            stop()

    def renew(self) -> None:
        """Renew the lease once, unless the work has stalled. If the database is unavailable, the next call retries."""
        if self._clock() - self._moved_at > self.stall_seconds:
            return
        try:
            with self.database.write() as session:
                ours = self._heartbeat(session, self.claim, self.lease_seconds)
        except SQLAlchemyError as cause:
            log.warning("the database did not answer: %s", cause)
            return
        if not ours:
            self._lost.set()
            self._on_loss()

    def _run(self) -> None:
        while not self._lost.is_set() and not self._ended.wait(self.lease_seconds / 4):
            try:
                self.renew()
            except (
                Exception
            ):  # without renewals the lease expires, and all work since the last checkpoint is lost
                log.exception("the lease of %s could not be renewed; retrying", self.claim.job_id)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
