"""Claim eval runs and work on them in threads: a run waits for servers most of the time."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.database.tables import EvalRun
from core.evals import lifecycle
from core.evals.batches import Prepare
from core.outages import Resource, outage
from core.registry import InvalidRegistry
from core.reloaded import Reloaded, current
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry import logs
from graders.backends import Backends
from graders.environments.catalog import EnvironmentNotBuilt
from worker.evals.attempt import RunAttempt, RunFailed
from worker.evals.record import QuotaReached
from worker.lease import LeaseKeeper
from worker.refusals import NotKnownYet

log = logging.getLogger(__name__)

RUNS_AT_ONCE = 4  # so that a long run of one project does not delay the short ones of others


class EvalRunner:
    """Works on the eval runs of this worker, RUNS_AT_ONCE at a time. `stop` drains: they are queued again."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        backends: Backends | Reloaded[Backends],
        owner: str,
        prepare: Prepare,
    ) -> None:
        """`prepare` converts the requests of batches, whose formats belong to the API."""
        self.prepare = prepare
        self.settings, self.database, self.blobs, self.backends = settings, database, blobs, backends
        self.owner = owner
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._tasks: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = set()

    def wake(self) -> None:
        """Look for queued runs in another thread, unless all are busy. They look again after each run.

        Without a free thread nothing happens: the reconciler calls this again while runs wait.
        """
        with self._lock:
            if self._stopping.is_set() or len(self._threads) >= RUNS_AT_ONCE:
                return
            thread = threading.Thread(target=self._work, name="eval-run", daemon=True)
            try:
                thread.start()
            except RuntimeError as cause:  # the system has no other thread now
                log.warning("no thread for eval runs: %s", cause)
                return
            self._threads.add(thread)

    def run_waiting(self) -> int:
        """Work on queued runs until there is none, and return their number."""
        done = 0
        while not self._stopping.is_set() and (claim := self.claim()) is not None:
            self.wake()  # another thread takes the next run
            self.run(claim)
            done += 1
        return done

    def stop(self) -> None:
        """Stop all runs, record what they have paid for, and queue them again. Blocks."""
        self._stopping.set()
        with self._lock:
            threads = list(self._threads)
            for loop, task in self._tasks:
                loop.call_soon_threadsafe(task.cancel)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        try:
            self.run_waiting()
        except Exception:
            log.exception("an eval run could not be claimed or ended; the reconciler retries it")
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def claim(self) -> Claim | None:
        with self.database.write() as session:
            return lifecycle.claim(
                session,
                owner=self.owner,
                lease_seconds=self.settings.lease_seconds,
                defaults=self.settings.default_limits,
            )

    def run(self, claim: Claim) -> None:
        """Make one attempt and record how it ended."""
        with logs.bound(job_id=claim.job_id, attempt=claim.epoch):
            log.info("running %s, epoch %d", claim.job_id, claim.epoch)
            lease = LeaseKeeper(
                self.database,
                claim,
                self.settings.lease_seconds,
                stall_seconds=self.settings.hang_seconds,
                heartbeat=lifecycle.heartbeat,
            )
            retry = RetryPolicy(
                self.settings.patience_seconds,
                log.warning,
                wait=self._stopping.wait,
                during=partial(self._noted, claim),
            )
            with ExitStack() as held:
                try:
                    held.enter_context(lease)
                    # An attempt resumes from what earlier ones have recorded, so it can be repeated.
                    retry(lambda: asyncio.run(self._attempt(claim, lease, retry)))
                except LeaseLost:
                    log.info("%s was cancelled or claimed by another worker", claim.job_id)
                except RunFailed as failed:
                    self._end(claim, failed)
                except QuotaReached as reached:
                    self._end(claim, RunFailed("insufficient_quota", str(reached)))
                except (asyncio.CancelledError, EnvironmentNotBuilt, NotKnownYet) as cause:
                    self._end(claim, cause)
                except Exception as cause:
                    log.exception("%s was interrupted", claim.job_id)
                    is_drained = self._stopping.is_set() and outage(cause) is not None
                    self._end(claim, asyncio.CancelledError() if is_drained else cause)

    @contextmanager
    def _noted(self, claim: Claim, resource: Resource) -> Iterator[None]:
        """Show users what the run waits for. Best effort: it may be the database."""
        try:
            with self.database.write() as session:
                lifecycle.wait_for(session, claim, resource)
        except SQLAlchemyError as cause:
            log.warning("%s cannot be noted: %s", claim.job_id, cause)
        yield

    async def _attempt(self, claim: Claim, lease: LeaseKeeper, retry: RetryPolicy) -> None:
        lease.moved()
        attempt = RunAttempt(
            self.settings, self.database, self.blobs, current(self.backends), claim, retry, self.prepare
        )
        attempt.moved = lease.moved
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        entry = (loop, task)
        with self._lock:
            self._tasks.add(entry)
            if self._stopping.is_set():
                task.cancel()
        try:
            await attempt.run()
        finally:
            with self._lock:
                self._tasks.discard(entry)

    def _end(self, claim: Claim, cause: BaseException) -> None:
        """Record the end, retrying an unavailable database until the lease expires. CancelledError: drained."""

        def write() -> None:
            try:
                with lifecycle.fenced(self.database, claim) as (session, run):
                    if isinstance(cause, asyncio.CancelledError):
                        lifecycle.release(session, run)
                    elif isinstance(cause, EnvironmentNotBuilt):
                        lifecycle.put_off(session, run, reason=str(cause))
                    elif isinstance(cause, NotKnownYet):
                        self._wait_for_name(session, run, cause)
                    elif isinstance(cause, RunFailed):
                        lifecycle.fail(run, code=cause.code, message=cause.message)
                    elif isinstance(cause, InvalidRegistry):
                        lifecycle.put_off(session, run, reason=str(cause))
                    else:
                        reason = str(cause) or type(cause).__name__
                        lifecycle.crashed(
                            session, run, reason=reason, max_failures=self.settings.max_failures
                        )
            except LeaseLost:
                log.info("%s is over", claim.job_id)

        RetryPolicy(self.settings.lease_seconds, log.warning)(write)

    def _wait_for_name(self, session: Session, run: EvalRun, cause: NotKnownYet) -> None:
        """Put off a run that names what the files here do not have, or fail it if none has had it for too long."""
        patience = self.settings.patience_seconds
        if not lifecycle.put_off_within(session, run, patience, reason=str(cause)):
            lifecycle.fail(run, code=cause.mistake.code, message=cause.mistake.message)
