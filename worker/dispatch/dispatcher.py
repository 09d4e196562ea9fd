"""The pass that keeps one Kubernetes Job for each job that may start (docs/adr/0025-a-dispatcher-by-choice.md).

It decides from the rows and from the list of Jobs alone, so it may be killed at any time and run twice at once. A Job
has the name of its attempt (`templates.name_of`), so that a second one cannot be created.

    list the Jobs of the release      first, or the Job of a row that is claimed meanwhile would look like a second one;
                                      once for all classes
    delete                            those of rows that are cancelled or paused, and what blocks a name, of any class
    create                            for rows in fair order, up to `max_jobs`, and in each queue of Kueue `max_pending`
    note                              what each waiting row waits for, for the position that the API shows
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.engine import Database
from core.database.tables import Job, Project
from core.jobs import fairness, pods
from core.jobs.pods import PodNote, PodState
from core.tenancy.limits import Limits
from worker.dispatch.kubernetes import KubernetesApi, Manifest, ManifestRefused
from worker.dispatch.templates import (
    JOB_LABEL,
    QUEUE_LABEL,
    InvalidTemplates,
    JobTemplate,
    SizeNotAllowed,
    name_of,
)
from worker.supervisor.item_failures import ItemFailures
from worker.telemetry import PASS_FAILURES

log = logging.getLogger(__name__)

# A worker may have ended without its job, as without a database. Another one is started after this time.
RETRY_SECONDS = 300.0
# How long the log of a pod stays. Kubernetes removes Jobs itself (ttlSecondsAfterFinished), but not TrainJobs.
KEEP_SECONDS = 3600.0
# Statuses of a row whose Job is not needed, or no more. In any other, the worker ends by itself.
WITHOUT_JOB = ("cancelled", "paused")


@dataclass(frozen=True)
class DispatchedJob:
    """A Job, or TrainJob, that the dispatcher created."""

    name: str
    uid: str
    job_id: str
    queue: str  # of Kueue; empty: none
    suspended: bool
    deleting: bool
    finished_at: float | None  # Unix seconds; None: it has not

    @classmethod
    def of(cls, found: Manifest) -> Self:
        metadata, spec = found["metadata"], found["spec"]
        labels = metadata["labels"]
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            job_id=labels.get(JOB_LABEL, ""),
            queue=labels.get(QUEUE_LABEL, ""),
            suspended=bool(spec.get("suspend")),
            deleting="deletionTimestamp" in metadata,
            finished_at=_finished_at(found.get("status") or {}),
        )

    @property
    def note(self) -> PodNote:
        """Of a job that its worker has not claimed."""
        if self.finished_at is not None:
            return PodNote(PodState.ENDED)
        return PodNote(PodState.QUOTA, self.queue) if self.suspended else PodNote(PodState.STARTING)


def _finished_at(status: Manifest) -> float | None:
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()
    return None


class _Room:
    """The Jobs that may still be created, by queue of Kueue: one without quota holds up no other.

    Args:
        active: the unfinished Jobs.
        waiting: those of them whose worker has not claimed its job.
    """

    def __init__(
        self, template: JobTemplate, active: Sequence[DispatchedJob], waiting: Sequence[DispatchedJob]
    ) -> None:
        self._template = template
        self._started = sum(not one.suspended for one in active)
        self._suspended = Counter(one.queue for one in active if one.suspended)
        self._pending = Counter(one.queue for one in waiting)

    def is_full(self, queue: str) -> bool:
        jobs = self._started + self._suspended[queue]
        return jobs >= self._template.max_jobs or self._pending[queue] >= self._template.max_pending

    def full_queues(self) -> list[str]:
        return [queue for queue in self._suspended | self._pending if self.is_full(queue)]

    def take(self, queue: str) -> None:
        self._pending[queue] += 1
        if queue:
            self._suspended[queue] += 1
        else:
            self._started += 1

    @property
    def most(self) -> int:
        """The most Jobs that a queue without any may get."""
        return min(self._template.max_jobs - self._started, self._template.max_pending)


class Dispatcher:
    """Args:
    templates: by GPU class; read in each pass, because the operator changes them.
    defaults: limits of projects without their own.
    """

    def __init__(
        self,
        database: Database,
        kubernetes: KubernetesApi,
        templates: Callable[[], Mapping[str, JobTemplate]],
        *,
        defaults: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = database
        self.kubernetes = kubernetes
        self.templates = templates
        self.defaults = defaults
        self._clock = clock
        self._refused = ItemFailures(clock)

    def run_until(self, stop: threading.Event, seconds: float) -> None:
        while not stop.is_set():
            self.run_once()
            stop.wait(seconds)

    def run_once(self) -> None:
        """Dispatch the jobs of each class. A failure is logged, and the next pass retries; it stops no other class."""
        try:
            templates = self.templates()
        except InvalidTemplates:
            _report("of any class")
            return
        for classes in _by_list(templates):
            try:
                listed = self._list(next(iter(classes.values())))
            except Exception:
                _report(f"of class {', '.join(classes)}")
                continue
            for gpu_class, template in classes.items():
                try:
                    self._dispatch(gpu_class, template, listed)
                except Exception:
                    _report(f"of class {gpu_class}")

    def _list(self, template: JobTemplate) -> Sequence[tuple[DispatchedJob, Job | None]]:
        """List the Jobs of the template's kind, each with its row, and delete those that are in the way."""
        jobs = [DispatchedJob.of(one) for one in self.kubernetes.list(template.kind, template.labels)]
        jobs = [one for one in jobs if one.job_id]
        with self.database.read() as session:
            rows = _rows(session, [one.job_id for one in jobs])
        listed = [(one, rows.get(one.job_id)) for one in jobs]
        for job, row in listed:
            if self._is_in_the_way(job, row):
                self.kubernetes.delete(template.kind, job.name, job.uid)
                log.info("deleted the Job %s of %s", job.name, job.job_id)
        return listed

    def _dispatch(
        self, gpu_class: str, template: JobTemplate, listed: Sequence[tuple[DispatchedJob, Job | None]]
    ) -> None:
        known = [(job, row) for job, row in listed if row is not None and row.gpu_class == gpu_class]
        # A Job that is being deleted still has its GPUs, and its name.
        active = [job for job, _ in known if job.finished_at is None]
        waiting = [(job, row) for job, row in known if job.finished_at is None and row.status == "queued"]
        blocked = [(job, row) for job, row in known if job.finished_at is not None and _blocks(job, row)]
        room = _Room(template, active, [job for job, _ in waiting])
        self._fill(
            gpu_class, template, room, {job.job_id for job in active} | {job.job_id for job, _ in blocked}
        )
        self._note([*waiting, *blocked])

    def _is_in_the_way(self, job: DispatchedJob, row: Job | None) -> bool:
        """Whether to delete it."""
        if job.deleting:
            return False
        if job.finished_at is None:
            return row is None or row.status in WITHOUT_JOB
        keep = RETRY_SECONDS if _blocks(job, row) else KEEP_SECONDS
        return self._clock() - job.finished_at > keep

    def _fill(self, gpu_class: str, template: JobTemplate, room: _Room, without: set[str]) -> None:
        """Create Jobs for the rows that may start, until each of their queues is full."""
        while rows := self._next(gpu_class, template, room, without):
            for job, project in rows:
                queue = template.queue_of(project.kueue)
                if not room.is_full(queue):
                    room.take(queue)
                    without.add(job.id)
                    self._create(template, job, project)

    def _next(
        self, gpu_class: str, template: JobTemplate, room: _Room, without: set[str]
    ) -> Sequence[tuple[Job, Project]]:
        """The next rows to start, each with its project. The first one's queue is not full.

        A row whose Job was refused lets others go first for a while.
        """
        with self.database.read() as session:
            return fairness.in_turn(
                session,
                gpu_class,
                self.defaults,
                without=without.union(self._refused.waiting()),
                most=room.most,
                full_queues=room.full_queues(),
                pool_queue=template.queue_of(None),
            )

    def _create(self, template: JobTemplate, job: Job, project: Project) -> None:
        name = name_of(job.id, job.epoch)
        try:
            manifest = template.manifest_of(
                job.id, job.epoch, project.id, project.kueue, gpus=job.gpus, nodes=job.nodes
            )
            is_new = self.kubernetes.create(template.kind, manifest)
        except SizeNotAllowed as cause:
            log.error("no Job is created for %s: %s", job.id, cause)
            self._refused.add(job.id)
            noted = PodNote(PodState.TOO_LARGE)
        except ManifestRefused as cause:
            log.error("Kubernetes refuses the Job %s of %s: %s", name, job.id, cause)
            self._refused.add(job.id)
            noted = PodNote(PodState.REFUSED)
        else:
            # If it exists, this process was killed before it saw that, or another dispatcher was faster.
            log.info("created the Job %s of %s" if is_new else "the Job %s of %s exists", name, job.id)
            self._refused.forget(job.id)
            queue = template.queue_of(project.kueue)
            noted = PodNote(PodState.QUOTA, queue) if queue else PodNote(PodState.STARTING)
        with self.database.write() as session:
            pods.note(session, job.id, job.epoch, noted)

    def _note(self, known: Sequence[tuple[DispatchedJob, Job]]) -> None:
        """Write what has changed."""
        changed = [(one, row) for one, row in known if row.pod != one.note.to_row(row.epoch)]
        if not changed:
            return
        with self.database.write() as session:
            for one, row in changed:
                pods.note(session, row.id, row.epoch, one.note)


def _report(which: str) -> None:
    PASS_FAILURES.labels("dispatch").inc()
    log.exception("jobs %s were not dispatched; the dispatcher will retry", which)


def _rows(session: Session, job_ids: Sequence[str]) -> Mapping[str, Job]:
    return {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(job_ids)))}


def _by_list(templates: Mapping[str, JobTemplate]) -> list[Mapping[str, JobTemplate]]:
    """The templates by GPU class, of each list of Jobs that has those of these classes."""
    lists: dict[tuple[str, ...], dict[str, JobTemplate]] = {}
    for gpu_class, template in templates.items():
        selects = (template.kind.name, *sorted(f"{key}={value}" for key, value in template.labels.items()))
        lists.setdefault(selects, {})[gpu_class] = template
    return [*lists.values()]


def _blocks(job: DispatchedJob, row: Job | None) -> bool:
    """Whether a finished Job has the name of the row's next attempt: its worker did not claim the row."""
    return row is not None and row.status == "queued" and job.name == name_of(row.id, row.epoch)
