"""The queues of jobs, and the position of a waiting job in its queue.

Jobs run in turns of their projects (core/turns.py), a queue for each GPU class. New jobs first queue for file
validation, where projects take turns, too.

The position shown is the order in which workers would claim the jobs if none ended meanwhile. Since every claim adds a
running job to its project, the k-th waiting job of a project with r running ones is claimed at level r + k, so the
whole order is one ORDER BY: by level, then those already at that level, then by turn. Jobs beyond their project's
`running_jobs` follow, and then those that back off.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Subquery, and_, case, func, null, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.engine import db_now
from core.database.states import JOB
from core.database.tables import Job, Project, ProjectTurns, Worker
from core.jobs import pods
from core.telemetry.silence import reports_itself
from core.tenancy.limits import NO_LIMITS, Limits
from core.turns import ClaimQueue, last_turn

# Sections of the queue before and after the jobs that are claimed in turn.
HELD, BACKS_OFF = -1, 2


@dataclass(frozen=True)
class QueuePosition:
    """Position of a job in its queue, from 1, and what blocks it."""

    position: int
    reason: str


RUNS = ClaimQueue(
    Job, waiting="queued", claimed="running", turn="last_turn", limit="running_jobs", running=JOB.running
)
# Of new jobs, for the validation of their files: without a limit, and of any class.
VALIDATIONS = ClaimQueue(Job, waiting="validating_files", claimed="validating_files", turn="last_validation")


def places(
    session: Session,
    jobs: Sequence[Job],
    defaults: Limits = NO_LIMITS,
    pod_classes: Collection[str] = frozenset(),
) -> Mapping[str, QueuePosition]:
    """The positions of the waiting jobs by id, in one query. `pod_classes`: of the hardware file.

    Each GPU class has a queue. Jobs before validation have a separate queue, which starts with those that are being
    validated.
    """
    waiting = [job.id for job in jobs if job.status in JOB.waiting]
    if not waiting:
        return {}
    lines = _lines(defaults)
    rows = session.execute(select(lines).where(lines.c.id.in_(waiting)))
    return {row.id: QueuePosition(row.position, _reason(row, pod_classes)) for row in rows}


def in_turn(
    session: Session,
    gpu_class: str,
    defaults: Limits,
    *,
    without: Collection[str],
    most: int,
    full_queues: Collection[str] = (),
    pool_queue: str = "",
) -> Sequence[tuple[Job, Project]]:
    """The first jobs of a class that workers would claim now, in that order, each with its project.

    Jobs that are queued but beyond the limit of their project are not among them.

    Args:
        without: ids of jobs that are left out. They count toward the limits of their projects.
        full_queues: queues of Kueue whose jobs are left out.
        pool_queue: that of projects without their own; empty: none.
    """
    if most < 1 or not RUNS.has_work(session, gpu_class=gpu_class):
        return []
    lines = _lines(defaults)
    one = lines.c
    ready = (one.line == gpu_class) & (one.rank == 0) & ~one.beyond
    queue = queue_of_project(pool_queue)
    first = (
        select(Job, Project)
        .join(lines, one.id == Job.id)
        .join(Project, Project.id == Job.project_id)
        .where(ready, Job.id.not_in(without), queue.not_in(full_queues))
        .order_by(one.position)
        .limit(most)
    )
    return [(job, project) for job, project in session.execute(first)]


def queue_of_project(pool_queue: str) -> ColumnElement[str]:
    """The queue of Kueue of a project; `pool_queue` if it names none."""
    return func.coalesce(func.nullif(Project.kueue["queue"].as_string(), ""), pool_queue)


def _lines(defaults: Limits) -> Subquery:
    """All waiting jobs: the columns for `_reason`, and the position in their queue."""
    running = RUNS.running_by_project()
    validating = Job.status == "validating_files"
    held = Job.lease_expires_at > db_now()
    # Validation has no limits, and treats all projects as equally busy.
    one = (
        select(
            Job.id,
            Job.seq,
            Job.lease_expires_at,
            Job.next_run_at,
            Job.epoch,
            Job.pod,
            validating.label("validating"),
            case((validating, ""), else_=Job.gpu_class).label("line"),
            Job.project_id.label("project"),
            case((validating, _worker_reports()), else_=_worker_reports(Job.gpu_class)).label("served"),
            case((validating, 0), else_=func.coalesce(running.c.rows, 0)).label("running"),
            case((validating, null()), else_=RUNS.limit_of_project(defaults)).label("limit"),
            case((validating, last_turn("last_validation")), else_=last_turn("last_turn")).label("last_turn"),
            case((Job.next_run_at > db_now(), BACKS_OFF), (validating & held, HELD), else_=0).label("rank"),
        )
        .join(Project, Project.id == Job.project_id)
        .outerjoin(ProjectTurns, ProjectTurns.project_id == Job.project_id)
        .outerjoin(running, running.c.project_id == Job.project_id)
        .where(Job.status.in_(JOB.waiting))
        .subquery()
    ).c
    own = [one.line, one.project, one.rank]
    before = func.row_number().over(partition_by=own, order_by=one.seq) - 1
    each = (
        select(
            *one,
            (one.running + before).label("level"),
            func.min(one.seq).over(partition_by=own).label("first"),
        ).subquery()
    ).c
    beyond = and_(each.limit.is_not(None), each.level >= each.limit)
    order = [
        case((each.rank != 0, each.rank), (beyond, 1), else_=0),
        case((each.rank == BACKS_OFF, each.next_run_at), else_=0.0),
        each.level,
        each.running.desc(),
        each.last_turn,
        each.first,
        each.seq,
    ]
    position = func.row_number().over(partition_by=each.line, order_by=order)
    return select(*each, beyond.label("beyond"), position.label("position")).subquery()


def _worker_reports(gpu_class: InstrumentedAttribute[str] | None = None) -> ColumnElement[bool]:
    """Whether a worker reports itself: one of this class, or of any, as validations need."""
    matches = [reports_itself()] if gpu_class is None else [reports_itself(), Worker.gpu_class == gpu_class]
    return select(Worker.name).where(*matches).exists()


def _reason(row: Row[Any], pod_classes: Collection[str]) -> str:
    if row.rank == BACKS_OFF:
        until = datetime.fromtimestamp(row.next_run_at, UTC).isoformat(timespec="seconds")
        return f"backing off until {until} after an interruption"
    ahead = "1 job is ahead" if row.position == 2 else f"{row.position - 1} jobs are ahead"
    if row.validating:
        if row.rank == HELD:
            return "its files are being validated"
        waits = "waiting for its files to be validated" if row.served else "no worker reports itself"
        return waits + (f", {ahead}" if row.position > 1 else "")
    if row.beyond:
        verb = "runs" if row.running >= row.limit else "will run"
        return f"the project {verb} its maximum of {row.limit} jobs"
    served, unserved = (
        f"waiting for a free worker of class {row.line}",
        f"no worker of class {row.line} reports itself",
    )
    waits = served if row.served else unserved
    if row.line in pod_classes:  # also if a worker reports itself, which ends with its own job
        waits = pods.waits_for(row.pod, row.epoch, row.line)
    return waits + (f", {ahead}" if row.position > 1 else "")
