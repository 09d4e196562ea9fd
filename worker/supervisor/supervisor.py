"""Claim a job, run it as a child process, renew its lease, and record its outcome. Never imports torch.

The child does the work and writes its own progress, fenced by the claim's epoch. The supervisor renews the lease, so
a child that blocks in a long GPU call keeps its job, and a machine that dies loses it.
"""

import contextlib
import errno
import json
import logging
import math
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
from typing import IO, Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.database.tables import Job
from core.errors import ModelNotFound
from core.jobs import lifecycle, run_logs
from core.registry import InvalidRegistry, Registry
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry import logs
from worker import forking, process
from worker.forking import ForkServer, Started
from worker.heartbeat import ProgressFile
from worker.supervisor.killed import KernelMemory
from worker.supervisor.live_log import LiveLog, end_of
from worker.supervisor.sharing import Hold, SharedDevice, hold_command, why_alone
from worker.telemetry import Runs

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


# A worker that lacks what the start of a run needs claims no job for so long.
REST_SECONDS = 60.0
# Jobs in a row that could not use the GPU, after which the worker ends: only an operator can help, and sees that.
MAX_GPU_FAILURES = 5


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
        fork_server: ForkServer = forking.SERVER,
        clock: Callable[[], float] = time.monotonic,
        follow_log: Callable[[IO[bytes], Callable[[str], None], float], LiveLog] = LiveLog,
        on_claim: Callable[[], object] = lambda: None,
        has_members: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_members`: whether all machines of the group are there. Without them no job is claimed."""
        self.settings = settings
        self.database = database
        self.blobs = blobs
        self.command = command
        self._on_claim = on_claim
        self._has_members = has_members
        self.owner = f"{socket.gethostname()}/{os.getpid()}"
        self.runs = Runs(settings.gpu_class)
        self.memory = KernelMemory()
        self.log_seconds = run_logs.EVERY_SECONDS
        self._hold = hold
        self._fork_server = fork_server
        self._clock = clock
        self._follow_log = follow_log
        self._resting_until = (
            0.0  # a machine that cannot start a run leaves the queue to other workers for a while
        )
        self._gpu_failures = 0  # in a row
        self._alone: set[str] = set()  # jobs that do not fit beside others
        self._ended = threading.Event()  # a job that shares the device has
        self.recorded = 0  # attempts whose outcome is in the database
        self.has_lost_device = False  # it stops, and its worker has to end
        self._slot = threading.Lock()
        self._counting = threading.Lock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run_waiting(self, most: float = math.inf) -> int:
        """Claim and run jobs until none is queued. Returns their number; returns 0 at once if a job is running.

        The thread that runs a job checks the queue after it, so a concurrent wake-up can be dropped.

        Args:
            most: the number of jobs after which no other is claimed.
        """
        if not self._slot.acquire(blocking=False):
            return 0
        try:
            done = 0
            while done < most and not self._stopping.is_set() and (claimed := self._claim()) is not None:
                base, reason = self._base_of(claimed.job)
                if base is not None:
                    done += self._run_together(claimed.claim, base, most - done)
                    continue
                if reason:
                    log.info("%s runs alone: %s", claimed.claim.job_id, reason)
                self._run(claimed.claim)
                done += 1
            return done
        finally:
            self._slot.release()

    def _claim(self, fits: Callable[[Job], bool] = lambda job: True) -> "ClaimedJob | None":
        if self._clock() < self._resting_until or not self._has_members():
            return None
        with self.database.write() as session:
            claim = lifecycle.claim(
                session,
                gpu_class=self.settings.gpu_class,
                owner=self.owner,
                lease_seconds=self.settings.lease_seconds,
                defaults=self.settings.default_limits,
                fits=fits,
                job_id=self.settings.claim,
            )
            if claim is None:
                return None
            claimed = ClaimedJob(claim, session.scalars(select(Job).where(Job.id == claim.job_id)).one())
        self._on_claim()
        return claimed

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

    def _run_together(self, first: Claim, base: str, most: float) -> int:
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
                    started += 1
                    # A worker that always has a job on its base keeps none of the threads that have ended.
                    threads = [one for one in threads if one.is_alive()]
                    try:
                        thread.start()
                        threads.append(thread)
                    except RuntimeError as cause:  # the system has no other thread now
                        running.discard(claim)
                        self._unstarted(claim, OSError(errno.EAGAIN, str(cause)))
                    claim = self._next(running, device) if started < most else None
            finally:
                for thread in threads:
                    thread.join()
        if device.is_stuck:
            self._get_stuck("the process that held the base model")
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
        kills = self.memory.kills()
        try:
            child = RunProcess(self.command, self._fork_server)
        except OSError as cause:
            self._unstarted(claim, cause)
            return
        try:
            live = self._follow_log(child.words, lambda said: self._keep(claim, said), self.log_seconds)
        except OSError as cause:
            child.end()
            self._unstarted(claim, cause)
            return
        peak = Peak(partial(self._peak_of, child.process))
        try:
            with self.runs.following(child.figures):
                folder = None if device is None else device.folder
                status = self._watch(child, claim, child.run(claim, folder), peak)
        finally:
            live.stop()
            said = child.end()
            if child.is_stuck:
                self._get_stuck(f"the run of {claim.job_id}")
        reason = self.memory.explain(kills, peak.bytes) if status == -signal.SIGKILL else ""
        if child.is_stuck:
            reason = "its process does not end, as in a driver that hangs"
        self._finish(claim, status, reason or ("" if status == process.HUNG else logs.headline(said)))
        live.join()
        self._keep(claim, said)

    def _get_stuck(self, what: str) -> None:
        self._lose_device(
            f"{what} does not end {process.KILLED_SECONDS:g} s after SIGKILL, as in a driver that hangs, and still "
            "uses the device"
        )

    def _lose_device(self, reason: str) -> None:
        """Drain the other runs and claim no job any more. The owner of this supervisor ends the worker then."""
        log.error(
            "This worker stops: %s. Restart the machine if the next worker cannot use it either.", reason
        )
        self.has_lost_device = True
        self.stop()

    def _rest_after(self, status: int) -> None:
        """Leave the queue to other workers for a while if the run met what other jobs would meet here too."""
        if status in (process.UNSTARTED, process.RESTS, process.GPU_UNUSABLE):
            self._resting_until = self._clock() + REST_SECONDS
        self._gpu_failures = self._gpu_failures + 1 if status == process.GPU_UNUSABLE else 0
        if self._gpu_failures >= MAX_GPU_FAILURES:
            self._lose_device(f"{MAX_GPU_FAILURES} jobs in a row could not use its GPU")

    def _unstarted(self, claim: Claim, cause: OSError) -> None:
        self._finish(claim, process.UNSTARTED, cause.strerror or type(cause).__name__)

    def _peak_of(self, child: Started) -> int | None:
        return None if (pid := child.pid) is None else self.memory.peak_of(pid)

    def _keep(self, claim: Claim, output: str) -> None:
        """Store the run's log for the job's owner (core/jobs/run_logs.py). Best effort, without retries."""
        if not output:
            return
        try:
            with self.database.read() as session:
                project_id = session.scalars(select(Job.project_id).where(Job.id == claim.job_id)).one()
            self.blobs.put_bytes(run_logs.key(project_id, claim.job_id, claim.epoch), output.encode())
        except Exception as cause:  # stores raise errors of many libraries
            log.warning("the log of %s is lost: %r", claim.job_id, cause)

    def _watch(self, child: "RunProcess", claim: Claim, progress: "RunProgress", peak: "Peak") -> int:
        """Wait for the child's exit status, renewing the lease.

        Kills the child on a lost lease, an overlong drain, or no progress for too long.
        """
        drain_by: float | None = None
        every = self.settings.lease_seconds / 4
        # Of our clock: a round may take seconds beyond its pause, while the database answers late.
        renew_at = self._clock() + every
        while True:
            peak.look()
            self._report(claim, progress)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.process.wait(timeout=min(every, 0.5))
                # The child had not installed its own handler yet.
                return process.DRAINED if drain_by is not None and status == -signal.SIGTERM else status
            renew = (now := self._clock()) >= renew_at
            if renew:
                renew_at = now + every
            if not self._is_ours(claim, renew):
                child.kill()
                return process.LOST
            if progress.still_for() > self.settings.hang_seconds:
                child.kill()
                return process.HUNG
            if self._stopping.is_set():
                if drain_by is None:
                    drain_by = self._clock() + self.settings.drain_seconds
                    child.process.send_signal(signal.SIGTERM)
                if self._clock() >= drain_by:
                    # The job resumes from its last checkpoint. The operator chose the deadline, so this is no failure.
                    child.kill()
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
        self._rest_after(status)
        # Retry until the lease expires: the reconciler requeues the job then.
        patience = RetryPolicy(self.settings.lease_seconds, log.warning)
        patience(lambda: self._write_down(claim, status, cause))
        with self._counting:
            self.recorded += 1

    def _write_down(self, claim: Claim, status: int, cause: str) -> None:
        try:
            with lifecycle.fenced(self.database, claim) as (session, job):
                if status in (process.DRAINED, process.ROLLED_BACK):
                    lifecycle.release(session, job, is_rolled_back=status == process.ROLLED_BACK)
                elif status == process.ALONE:
                    self._alone.add(claim.job_id)  # before another thread can claim it
                    lifecycle.run_exclusively(session, job, reason=cause)
                elif status == process.UNSTARTED:
                    lifecycle.put_off(session, job, reason=f"its worker cannot start it: {cause}")
                    log.warning("%s was not started: %s", claim.job_id, cause)
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
            killed = f"the run made no progress for {limit} and was killed"
            return f"{killed}: {cause}" if cause else killed
        if status == -signal.SIGKILL:
            return cause
        how = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        )
        return f"the run {how}: {cause}" if cause else f"the run {how}"


class RunProcess:
    """A process of worker/child.py, which reads its job from stdin.

    Raises OSError: no memory, process or file descriptor is free.
    """

    def __init__(self, command: Command, fork_server: ForkServer = forking.SERVER) -> None:
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes both
        self._progress = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as above
        self.is_stuck = False  # it was killed, and has not ended
        try:
            # Its own session: Ctrl-C in a terminal does not signal it, and a kill includes the child's children.
            self.process = forking.start(
                command(Path(self._progress.name)),
                process.quiet_environment(),
                stdin=subprocess.PIPE,
                stderr=self.words,
                server=fork_server,
            )
        except OSError:
            self._progress.close()
            self.words.close()
            raise

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

    def kill(self) -> None:
        """Kill the process and its descendants, if any are left. Blocks for KILLED_SECONDS at most, once."""
        if (pid := self.process.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        # By its id too: it may not have begun its session yet.
        self.is_stuck = not forking.kill(self.process, 0.0 if self.is_stuck else process.KILLED_SECONDS)

    def end(self) -> str:
        """Kill the process and its descendants. Returns its stderr, truncated to the end."""
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        now = process.now_of(Path(self._progress.name))
        for file in (now, process.unfinished(now)):
            file.unlink(missing_ok=True)
        with self._progress, self.words:
            return end_of(self.words.fileno())


class RunProgress(ProgressFile):
    """The progress file of a run, and what the run says that it is doing."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path, clock)
        self._reported: dict[str, Any] | None = None
        self._reported_at = clock() - REPORT_SECONDS

    def news(self) -> dict[str, Any] | None:
        """Return what the run is doing if that has changed, at most once in `REPORT_SECONDS`; else None."""
        if self._clock() - self._reported_at < REPORT_SECONDS:
            return None
        try:
            now = json.loads(process.now_of(self.path).read_text())
        except OSError:  # it has not started, or no descriptor is free: the next call is another chance
            return None
        if now == self._reported:
            return None
        self._reported, self._reported_at = now, self._clock()
        return self._reported


class Peak:
    """The peak memory of a process. Sampled while it runs, because the kernel drops the value on exit."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self.bytes: int | None = None

    def look(self) -> None:
        now = self._read()
        self.bytes = now if self.bytes is None else max(self.bytes, now or 0)
