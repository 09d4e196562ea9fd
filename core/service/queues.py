"""The queues of the service: how many wait, how long the first of them has waited, and what they wait for."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from core.database.engine import db_now
from core.database.states import JOB
from core.database.tables import Attempt, EvalRun, Event, Job, Project
from core.evals import lifecycle as eval_runs
from core.jobs import fairness, pods
from core.jobs.lifecycle import RESUMING
from core.service.workers import Seen
from core.tenancy.limits import Limits

# A pod may wait for a node and its image for so long. The alert RegraftNoPod fires at the same time.
POD_SECONDS = 900.0
FREE = "a free worker is about to start the next one"


@dataclass(frozen=True)
class Queue:
    """One queue. Workers of every class take from those without a class."""

    kind: str  # jobs, validations or eval_runs
    gpu_class: str | None
    length: int  # that a free worker would start
    oldest_seconds: float  # how long the longest-waiting of these has waited
    held_back: int  # whose project runs as many as it may
    backing_off: int  # until some time after an interruption
    running: int
    workers: int  # that are not silent
    reason: str | None  # None: nothing waits


@dataclass(frozen=True)
class Waiting:
    """A job that a free worker would start.

    Args:
        for_quota: its Kubernetes Job waits for quota of Kueue, or it has none yet and that of another job of the same
            class and queue of Kueue does.
    """

    seconds: float
    for_quota: bool = False


def waiting_jobs(session: Session, defaults: Limits) -> dict[str, list[Waiting]]:
    """The jobs that a free worker would start, by GPU class; all classes that have jobs."""
    # The waiting time starts when the last attempt ended (at least a validation), the back-off ended, or on resume.
    ended = select(func.max(Attempt.ended_at)).where(Attempt.job_id == Job.id).scalar_subquery()
    resumed = (
        select(func.max(Event.created_at))
        .where(Event.job_id == Job.id, Event.message == RESUMING)
        .scalar_subquery()
    )
    queue = fairness.queue_of_project("").label("queue")
    begins = (Job.created_at, Job.next_run_at, ended, resumed)
    rows = session.execute(
        select(Job.gpu_class, queue, Job.pod, Job.epoch, db_now(), *begins)
        .join(Project, Project.id == Job.project_id)
        .where(Job.seq.in_(fairness.RUNS.startable(defaults).with_only_columns(Job.seq)))
    ).all()
    without_quota = {(row.gpu_class, row.queue) for row in rows if pods.is_without_quota(row.pod, row.epoch)}
    waiting: dict[str, list[Waiting]] = {
        name: [] for name in session.scalars(select(Job.gpu_class).distinct())
    }
    for gpu_class, kueue_queue, pod, epoch, now, *since in rows:
        seconds = max(0.0, now - max(begin for begin in since if begin is not None))
        # The dispatcher creates no Job behind those that wait for quota. One that has a note has, or had, its Job.
        has_note = pods.is_current(pod, epoch)
        for_quota = (
            pods.is_without_quota(pod, epoch) if has_note else (gpu_class, kueue_queue) in without_quota
        )
        waiting[gpu_class].append(Waiting(seconds, for_quota))
    return waiting


def validation_queue(session: Session) -> tuple[int, float]:
    """How many jobs wait for the validation of their files, and how long the longest-waiting has, in seconds."""
    now = select(db_now()).scalar_subquery()
    since = case((Job.next_run_at > Job.created_at, Job.next_run_at), else_=Job.created_at)
    waiting = select(func.count(), now - func.min(since)).where(fairness.VALIDATIONS.free(Job))
    length, oldest = session.execute(waiting).one()
    return length, max(0.0, oldest or 0.0)


def queues(
    session: Session,
    defaults: Limits,
    workers: Sequence[Seen],
    pod_classes: Collection[str] = frozenset(),
) -> list[Queue]:
    """The queue of each GPU class that has jobs or workers, that of validations, and that of eval runs.

    `pod_classes`: of the hardware file.
    """
    alive = [seen for seen in workers if seen.status != "silent"]
    # The pod of a Job runs jobs and nothing else.
    lasting = [seen for seen in alive if seen.worker.gpu_class not in pod_classes]
    waits = waiting_jobs(session, defaults)
    classes = sorted({*waits, *(seen.worker.gpu_class for seen in workers)})
    return [
        *(
            _of_class(session, gpu_class, waits.get(gpu_class, []), alive, gpu_class in pod_classes)
            for gpu_class in classes
        ),
        _validations(session, lasting),
        _eval_runs(session, defaults, lasting),
    ]


def _of_class(
    session: Session, gpu_class: str, waits: Sequence[Waiting], alive: Sequence[Seen], in_pods: bool
) -> Queue:
    now = select(db_now()).scalar_subquery()
    state = case((Job.status != "queued", "running"), (Job.next_run_at > now, "backing_off"), else_="ready")
    counted = (
        select(state, func.count())
        .where(Job.gpu_class == gpu_class, Job.status.in_(("queued", *JOB.running)))
        .group_by(state)
    )
    counts = Counter[str]()
    for name, number in session.execute(counted):
        counts[name] = number
    mine = [seen for seen in alive if seen.worker.gpu_class == gpu_class]
    held_back = max(0, counts["ready"] - len(waits))
    reason: str | None
    if waits:
        reason = _of_pods(waits, mine, gpu_class) if in_pods else _of_workers(mine, gpu_class)
    elif held_back:
        reason = "their projects run as many jobs as they may"
    else:
        reason = "they back off after an interruption" if counts["backing_off"] else None
    return Queue(
        kind="jobs",
        gpu_class=gpu_class,
        length=len(waits),
        oldest_seconds=max((job.seconds for job in waits), default=0.0),
        held_back=held_back,
        backing_off=counts["backing_off"],
        running=counts["running"],
        workers=len(mine),
        reason=reason,
    )


def _of_pods(waits: Sequence[Waiting], workers: Sequence[Seen], gpu_class: str) -> str:
    seconds = max((job.seconds for job in waits if not job.for_quota), default=None)
    if seconds is None:
        return "they wait for quota of Kueue"
    if not workers and seconds > POD_SECONDS:
        return (
            f"no pod of class {gpu_class} was started in {seconds / 60:.0f} minutes; see "
            "`kubectl get scaledjobs,jobs,pods` and the dispatcher, if there is one"
        )
    return f"a pod of class {gpu_class} will be started for each"


def _of_workers(workers: Sequence[Seen], gpu_class: str) -> str:
    if not workers:
        return f"no worker of class {gpu_class} reports itself"
    if all(seen.status == "draining" for seen in workers):
        return f"every worker of class {gpu_class} is stopping"
    if any(seen.status == "idle" for seen in workers):
        return FREE
    return f"every worker of class {gpu_class} is busy"


def _of_any(workers: Sequence[Seen], running: int, is_busy: str) -> str:
    """Return what a queue waits for whose entries any worker takes, one at a time beside its run."""
    able = [seen for seen in workers if seen.status != "draining"]
    if not able:
        return "every worker is stopping" if workers else "no worker reports itself"
    return f"every worker {is_busy}" if running >= len(able) else FREE


def _validations(session: Session, alive: Sequence[Seen]) -> Queue:
    now = select(db_now()).scalar_subquery()
    length, oldest = validation_queue(session)
    validating = Job.status == "validating_files"
    running = session.scalars(select(func.count()).where(validating, Job.lease_expires_at >= now)).one()
    off = session.scalars(select(func.count()).where(validating, Job.next_run_at > now)).one()
    reason = None
    if length:
        reason = _of_any(alive, running, "validates another job")
    return Queue(
        kind="validations",
        gpu_class=None,
        length=length,
        oldest_seconds=oldest,
        held_back=0,
        backing_off=off,
        running=running,
        workers=len(alive),
        reason=reason,
    )


def _eval_runs(session: Session, defaults: Limits, alive: Sequence[Seen]) -> Queue:
    startable = eval_runs.startable(defaults).subquery()
    [since] = startable.c
    length, oldest = session.execute(
        select(func.count(), db_now() - func.min(since)).select_from(startable)
    ).one()
    now = select(db_now()).scalar_subquery()
    live = EvalRun.deleted_at.is_(None)
    waiting = live & (EvalRun.status == eval_runs.WAITING)
    off = session.scalars(select(func.count()).where(waiting, EvalRun.next_run_at > now)).one()
    ready = session.scalars(select(func.count()).where(waiting, EvalRun.next_run_at <= now)).one()
    running = session.scalars(select(func.count()).where(live, EvalRun.status == eval_runs.RUNNING)).one()
    held_back = max(0, ready - length)
    reason = None
    if length:
        reason = _of_any(alive, running, "runs another eval run")
    elif held_back:
        reason = "their projects run as many eval runs as they may"
    return Queue(
        kind="eval_runs",
        gpu_class=None,
        length=length,
        oldest_seconds=max(0.0, oldest or 0.0),
        held_back=held_back,
        backing_off=off,
        running=running,
        workers=len(alive),
        reason=reason,
    )
