"""Claim a job, run it as a child process, renew its lease, and record its outcome. Never imports torch.

The child does the work and writes its own progress, fenced by the claim's epoch. The supervisor renews the lease, so
a child that blocks in a long GPU call keeps its job, and a machine that dies loses it.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core.database.engine import Database
from core.database.tables import Job
from core.errors import ModelNotFound
from core.jobs import lifecycle, run_logs
from core.jobs.claim import Claim, LeaseLost
from core.registry import InvalidRegistry, Registry
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry import logs
from worker import forking, process
from worker.forking import Started
from worker.supervise.killed import KernelMemory
from worker.supervise.live_log import LiveLog, end_of
from worker.supervise.sharing import Hold, SharedDevice, hold_command, why_alone
from worker.supervise.telemetry import Runs

log = logging.getLogger(__name__)

Command = Callable[[Path], Sequence[str]]

REPORT_SECONDS = 1.0  # between two reports of what a run is doing


def run_command(progress: Path) -> Sequence[str]:
    """Return the command of one attempt: worker/child.py, which touches the file `progress` as it makes progress."""
    return [sys.executable, "-m", "worker.child", str(os.getpid()), str(progress)]


@dataclass(frozen=True)
class ClaimedJob:
    claim: Claim
    job: Job  # as it was then


class Supervisor:
    """Runs the jobs of one GPU class: one at a time, or as many on one base model as `jobs_per_worker` says.

    `stop` drains: each run checkpoints and its job is queued again.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        command: Command = run_command,
        hold: Hold = hold_command,
    ) -> None:
        self.settings = settings
        self.database = database
        self.blobs = blobs
        self.command = command
        self.owner = f"{socket.gethostname()}/{os.getpid()}"
        self.runs = Runs(settings.gpu_class)
        self.memory = KernelMemory()
        self.log_seconds = run_logs.EVERY_SECONDS
        self._hold = hold
        self._alone: set[str] = set()  # jobs that do not fit beside others
        self._ended = threading.Event()  # a job that shares the device has
        self._slot = threading.Lock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run_waiting(self) -> int:
        """Claim and run jobs until none is queued. Returns their number; returns 0 at once if a job is running.

        The thread that runs a job checks the queue after it, so a concurrent wake-up can be dropped.
        """
        if not self._slot.acquire(blocking=False):
            return 0
        try:
            done = 0
            while not self._stopping.is_set() and (claimed := self._claim()) is not None:
                base, reason = self._base_of(claimed.job)
                if base is not None:
                    done += self._run_together(claimed.claim, base)
                    continue
                if reason:
                    log.info("%s runs alone: %s", claimed.claim.job_id, reason)
                self._run(claimed.claim)
                done += 1
            return done
        finally:
            self._slot.release()

    def _claim(self, fits: Callable[[Job], bool] = lambda job: True) -> "ClaimedJob | None":
        with self.database.write() as session:
            claim = lifecycle.claim(
                session,
                gpu_class=self.settings.gpu_class,
                owner=self.owner,
                lease_seconds=self.settings.lease_seconds,
                defaults=self.settings.default_limits,
                fits=fits,
            )
            if claim is None:
                return None
            return ClaimedJob(claim, session.scalars(select(Job).where(Job.id == claim.job_id)).one())

    def _base_of(self, job: Job) -> tuple[str | None, str]:
        """Return the base model that the job shares with others, or None and why it runs alone."""
        if self.settings.jobs_per_worker == 1:
            return None, ""
        if job.id in self._alone:
            return None, "it does not fit beside others"
        try:
            if reason := why_alone(job, self.settings):
                return None, reason
            return Registry.load(self.settings.models_file).resolve(job.model), ""
        except (InvalidRegistry, ModelNotFound) as cause:  # the run says so too, for its owner
            return None, str(cause)

    def _run_together(self, first: Claim, base: str) -> int:
        """Run a job and, as they come, others on its base, until none of them is left. Returns their number."""
        threads: list[threading.Thread] = []
        started = 0
        # Claims, not jobs: a job may be claimed again before its earlier attempt has been cleaned up.
        running: set[Claim] = set()
        claim: Claim | None = first
        with contextlib.ExitStack() as opened:
            try:
                device = opened.enter_context(SharedDevice(base, self._hold))
            except OSError as cause:
                log.warning("%s runs alone: its device cannot be shared: %s", first.job_id, cause)
                self._run(first)
                return 1
            try:
                while claim is not None:
                    running.add(claim)
                    arguments = [claim, device, running]
                    thread = threading.Thread(target=self._run_beside, args=arguments, name="run")
                    thread.start()
                    started += 1
                    # A worker that always has a job on its base keeps none of the threads that have ended.
                    threads = [*(one for one in threads if one.is_alive()), thread]
                    claim = self._next(running, device)
            finally:
                for thread in threads:
                    thread.join()
        return started

    def _next(self, running: set[Claim], device: SharedDevice) -> Claim | None:
        """Wait for a job that may join those of the device. None: the last of them has ended, and none waits."""
        while True:
            self._ended.clear()
            if self._stopping.is_set():
                return None
            if len(running) < self.settings.jobs_per_worker and device.is_open:
                try:
                    claimed = self._claim(lambda job: self._base_of(job)[0] == device.model)
                except SQLAlchemyError as cause:
                    log.warning("the database did not answer: %s", cause)
                    claimed = None
                if claimed is not None:
                    return claimed.claim
            if not running:
                return None
            self._ended.wait(self.settings.reconcile_seconds)

    def _run_beside(self, claim: Claim, device: SharedDevice, running: set[Claim]) -> None:
        try:
            self._run(claim, device)
        except Exception:
            log.exception("%s was not supervised to its end", claim.job_id)
        finally:
            running.discard(claim)
            self._ended.set()

    def _run(self, claim: Claim, device: SharedDevice | None = None) -> None:
        with logs.bound(job_id=claim.job_id, attempt=claim.epoch):
            self._run_child(claim, device)

    def _run_child(self, claim: Claim, device: SharedDevice | None) -> None:
        log.info("running %s, epoch %d", claim.job_id, claim.epoch)
        child = RunProcess(self.command)
        kills = self.memory.kills()
        peak = Peak(partial(self._peak_of, child.process))
        live = LiveLog(child.words, lambda said: self._keep(claim, said), self.log_seconds)
        with self.runs.following(child.figures):
            try:
                folder = None if device is None else device.folder
                status = self._watch(child.process, claim, child.run(claim, folder), peak)
            finally:
                live.stop()
                said = child.end()
        killed = self.memory.explain(kills, peak.bytes) if status == -signal.SIGKILL else ""
        self._finish(claim, status, killed or logs.headline(said))
        live.join()
        self._keep(claim, said)

    def _peak_of(self, child: Started) -> int | None:
        return None if child.pid is None else self.memory.peak_of(child.pid)

    def _keep(self, claim: Claim, said: str) -> None:
        """Store the run's log for the job's owner (core/jobs/run_logs.py). Best effort, without retries."""
        if not said:
            return
        try:
            with self.database.read() as session:
                project_id = session.scalars(select(Job.project_id).where(Job.id == claim.job_id)).one()
            self.blobs.put_bytes(run_logs.key(project_id, claim.job_id, claim.epoch), said.encode())
        except Exception as cause:  # stores raise errors of many libraries
            log.warning("the log of %s is lost: %r", claim.job_id, cause)

    def _watch(self, child: Started, claim: Claim, progress: "RunProgress", peak: "Peak") -> int:
        """Wait for the child's exit status, renewing the lease.

        Kills the child on a lost lease, an overlong drain, or no progress for too long.
        """
        draining = False
        drained_for = 0.0
        pause = min(self.settings.lease_seconds / 4, 0.5)
        since_heartbeat = 0.0
        while True:
            peak.look()
            self._report(claim, progress)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout=pause)
                # The child had not installed its own handler yet.
                return process.DRAINED if draining and status == -signal.SIGTERM else status
            since_heartbeat += pause
            renew = since_heartbeat >= self.settings.lease_seconds / 4
            if renew:
                since_heartbeat = 0.0
            if not self._is_ours(claim, renew):
                _kill(child)
                return process.LOST
            if progress.still_for() > self.settings.hang_seconds:
                _kill(child)
                return process.HUNG
            if self._stopping.is_set():
                if not draining:
                    draining = True
                    child.send_signal(signal.SIGTERM)
                drained_for += pause
                if drained_for > self.settings.drain_seconds:
                    # The job resumes from its last checkpoint. The operator chose the deadline, so this is no failure.
                    _kill(child)
                    return process.DRAINED

    def _report(self, claim: Claim, progress: "RunProgress") -> None:
        """Copy what the run is doing to the job's row. Best effort: the next change is another chance."""
        if (now := progress.news()) is None:
            return
        try:
            with self.database.write() as session:
                lifecycle.report(session, claim, now)
        except SQLAlchemyError as cause:
            log.warning("the database did not answer: %s", cause)

    def _is_ours(self, claim: Claim, renew: bool) -> bool:
        """Return whether the claim is still valid. Called often, so that a cancel takes effect within a second."""
        try:
            if renew:
                with self.database.write() as session:
                    return lifecycle.heartbeat(session, claim, self.settings.lease_seconds)
            with self.database.read() as session:
                epoch = session.scalar(select(Job.epoch).where(Job.id == claim.job_id))
            return epoch == claim.epoch
        except SQLAlchemyError as cause:
            # While the database is unreachable, no other worker can claim the job.
            log.warning("the database did not answer: %s", cause)
            return True

    def _finish(self, claim: Claim, status: int, cause: str) -> None:
        # Retry until the lease expires: the reconciler requeues the job then.
        patience = RetryPolicy(self.settings.lease_seconds, log.warning)
        patience(lambda: self._write_down(claim, status, cause))

    def _write_down(self, claim: Claim, status: int, cause: str) -> None:
        try:
            with lifecycle.fenced(self.database, claim) as (session, job):
                if status == process.DRAINED:
                    lifecycle.release(session, job)
                elif status == process.ALONE:
                    self._alone.add(claim.job_id)  # before another thread can claim it
                    lifecycle.leave_alone(session, job, reason=cause)
                else:
                    # The child itself records success, a lost lease, a requeue and a user error, after which `fenced`
                    # refuses the job. A job that is still ours contradicts its exit status.
                    reason = self._reason(status, cause)
                    lifecycle.crashed(session, job, reason=reason, max_failures=self.settings.max_failures)
                    log.warning("%s: %s", claim.job_id, reason)
        except LeaseLost:
            log.info("%s is over", claim.job_id)

    def _reason(self, status: int, cause: str) -> str:
        """Describe the failure in one line. `cause` comes from the kernel or the run's log."""
        if status == process.HUNG:
            limit = f"{self.settings.hang_seconds:g} s (REGRAFT_HANG_SECONDS)"
            return f"the run made no progress for {limit} and was killed"
        if status == -signal.SIGKILL:
            return cause
        how = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        )
        return f"the run {how}: {cause}" if cause else f"the run {how}"


class RunProcess:
    """A process of worker/child.py, which reads its job from stdin."""

    def __init__(self, command: Command) -> None:
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes both
        self._progress = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as above
        # Its own session: Ctrl-C in a terminal does not signal it, and a kill includes the child's children.
        self.process = forking.start(
            command(Path(self._progress.name)),
            process.quiet_environment(),
            stdin=subprocess.PIPE,
            stderr=self.words,
        )

    @property
    def figures(self) -> Path:
        return process.figures_of(Path(self._progress.name))

    def run(self, claim: Claim, folder: Path | None = None) -> "RunProgress":
        """Send the job to the process. If it has died, its exit status shows it later.

        Args:
            folder: of the sockets of jobs that share the device. None: the job has it to itself.
        """
        assert self.process.stdin is not None
        line = f"{claim.job_id} {claim.epoch}" + ("" if folder is None else f" {folder}")
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(f"{line}\n".encode())
        return RunProgress(Path(self._progress.name))

    def end(self) -> str:
        """Kill the process and its descendants. Returns its stderr, truncated to the end."""
        _kill(self.process)
        assert self.process.stdin is not None
        self.process.stdin.close()
        now = process.now_of(Path(self._progress.name))
        for file in (now, process.unfinished(now)):
            file.unlink(missing_ok=True)
        with self._progress, self.words:
            return end_of(self.words.fileno())


class RunProgress:
    """Watches the progress file of a run. Uses our own clock, because that of the file may jump."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._seen = path.stat().st_mtime_ns
        self._since = clock()
        self._told: dict[str, Any] | None = None
        self._told_at = clock() - REPORT_SECONDS

    def still_for(self) -> float:
        """Return the seconds since the call that first saw the latest progress."""
        now = self.path.stat().st_mtime_ns
        if now != self._seen:
            self._seen, self._since = now, self._clock()
        return self._clock() - self._since

    def news(self) -> dict[str, Any] | None:
        """Return what the run is doing if that has changed, at most once in `REPORT_SECONDS`; else None."""
        if self._clock() - self._told_at < REPORT_SECONDS:
            return None
        try:
            now = json.loads(process.now_of(self.path).read_text())
        except FileNotFoundError:  # it has not started
            return None
        if now == self._told:
            return None
        self._told, self._told_at = now, self._clock()
        return self._told


class Peak:
    """The peak memory of a process. Sampled while it runs, because the kernel drops the value on exit."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self.bytes: int | None = None

    def look(self) -> None:
        now = self._read()
        self.bytes = now if self.bytes is None else max(self.bytes, now or 0)


def _kill(child: Started) -> None:
    """Kill the child and its descendants, if any are left."""
    child.poll()  # its id may have come
    if child.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # one that has not begun its session yet
    child.wait()
