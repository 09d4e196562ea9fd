"""The worker of a Kubernetes Job: it claims a job, runs it and exits (docs/adr/0023-pools-of-jobs.md).

Other workers validate files, run evals, deliver webhooks and reconcile, so that this one needs no broker. It imports no
torch before it has claimed a job: until then KEDA may start other pods for the same job.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from core.database.engine import Database
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry.metrics import MetricsCollector
from worker.supervisor import liveness
from worker.supervisor.reporter import Reporter
from worker.supervisor.supervisor import Command, Supervisor, run_command
from worker.telemetry import Gpus

log = logging.getLogger(__name__)

RECORDED, NOT_RECORDED = 0, 1


def claimed_file(data_dir: Path) -> Path:
    """The file that exists once a job is claimed: the readiness of the pod."""
    return data_dir / "worker.claimed"


class OneShot:
    """Runs some jobs and ends, or ends when none is queued for a while.

    Args:
        jobs: the number after which it ends.
        idle_seconds: how long it waits for a job to claim.
        store_problem: tests the blob store. Returns None if that works: without it, each run would fail.
        has_members: whether all machines of the group are there. They are waited for before the first claim.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        *,
        jobs: int,
        idle_seconds: float,
        store_problem: Callable[[], Exception | None] = lambda: None,
        has_members: Callable[[], bool] = lambda: True,
        command: Command = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.idle_seconds = idle_seconds
        self.store_problem = store_problem
        self.supervisor = Supervisor(
            settings, database, blobs, command, on_claim=self._note_claim, has_members=has_members
        )
        self._has_members = has_members
        gpus = Gpus()
        self.collectors: tuple[MetricsCollector, ...] = (self.supervisor.runs, gpus)
        self.reporter = Reporter(settings, database, self.supervisor.owner, gpus, self.supervisor.memory)
        self._clock = clock
        self._claims = 0
        self._store_works = False
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Drain: a run in progress saves a checkpoint and its job is queued again."""
        self._stopping.set()
        self.supervisor.stop()

    def run(self) -> int:
        """Run jobs until the end. Call it in the main thread, whose signal handlers may call `stop`.

        Returns:
            RECORDED: each attempt has its outcome in the database, or no job was queued. NOT_RECORDED: the outcome
            could not be written, so that the lease has to expire, or no job could be claimed without database, store or
            the other machines of the group.
        """
        claimed_file(self.settings.data_dir).unlink(missing_ok=True)
        ended = threading.Event()
        status: list[int] = []
        runs = threading.Thread(target=lambda: status.append(self._run_jobs()), name="runs")
        beside = [
            threading.Thread(
                target=partial(
                    liveness.touch_while_alive, liveness.file_in(self.settings.data_dir), [runs], ended
                ),
                name="alive",
                daemon=True,
            ),
            threading.Thread(
                target=partial(self.reporter.run_until, self._stopping, ended), name="reporter", daemon=True
            ),
        ]
        for thread in (runs, *beside):
            thread.start()
        runs.join()
        self._stopping.set()
        ended.set()
        for thread in beside:
            thread.join()
        return status[0] if status else NOT_RECORDED

    def _run_jobs(self) -> int:
        if not self._gather():
            return NOT_RECORDED
        done, idle_since = 0, self._clock()
        problem: Exception | None = None
        while done < self.jobs and not self._stopping.is_set() and not self.supervisor.has_lost_device:
            try:
                ended, problem = self._run_waiting(self.jobs - done)
            except SQLAlchemyError as cause:
                if not self._is_recorded:
                    log.error("the outcome of the attempt was not recorded: %s", cause)
                    return NOT_RECORDED
                # Jobs may have ended before the one that could not be claimed.
                ended, problem = self.supervisor.recorded - done, cause
            done += ended
            if ended:
                idle_since = self._clock()
            elif self._clock() - idle_since >= self.idle_seconds:
                break
            else:
                self._stopping.wait(self.settings.reconcile_seconds)
        if done == 0 and problem is not None:
            log.error("no job could be claimed: %s", problem)
            return NOT_RECORDED
        log.info("ran %d jobs", done)
        return RECORDED if self._is_recorded else NOT_RECORDED

    @property
    def _is_recorded(self) -> bool:
        return self.supervisor.recorded == self._claims

    def _gather(self) -> bool:
        """Wait for the machines of the group. Returns False if one is missing for REGRAFT_PATIENCE_SECONDS."""
        patience, begun = self.settings.patience_seconds, self._clock()
        while not self._has_members() and not self._stopping.wait(self.settings.reconcile_seconds):
            if self._clock() - begun >= patience:
                log.error("no job was claimed: the group was not complete within %.0f s", patience)
                return False
        return True

    def _run_waiting(self, most: int) -> tuple[int, Exception | None]:
        """Return the number of jobs that ended, and why none could be claimed."""
        if not self._store_works and (problem := self.store_problem()) is not None:
            return 0, problem
        self._store_works = True
        return self.supervisor.run_waiting(most), None

    def _note_claim(self) -> None:
        self._claims += 1
        try:
            claimed_file(self.settings.data_dir).touch()
        except OSError as cause:  # a full disk, which the claimed job waits for
            log.warning("the pod does not become ready: %s", cause)
