"""The fair order of the queue, and the position of a waiting job in it.

A free worker selects, among the jobs of its class that may start now, the project with the fewest running jobs; among
equals the one whose last turn was longest ago; and of that project the oldest job. Without the second rule, a machine
with one worker, where no job is running during selection, would order by age alone, and a project with a thousand jobs
would block all others. Projects at their `running_jobs` are skipped. New jobs first queue for file validation, where
projects take turns.

The position shown is the order in which workers would claim the jobs if none ended meanwhile. Since every claim adds a
running job to its project, the k-th waiting job of a project with r running ones is claimed at level r + k, so the
whole
order is one ORDER BY: by level, then those already at that level, then by turn. Jobs beyond their project's
`running_jobs` follow, and then those that back off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import (
    CTE,
    ColumnElement,
    Integer,
    Row,
    ScalarSelect,
    Select,
    Subquery,
    and_,
    case,
    cast,
    func,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from core.database.engine import db_now, json_text
from core.database.tables import Job, Project, Worker
from core.telemetry.silence import reports_itself
from core.tenancy.limits import NO_LIMITS, Limits

WAITING = ("queued", "validating_files")
RUNNING = ("running", "pausing")
# Sections of the queue before and after the jobs that are claimed in turn.
HELD, BACKS_OFF = -1, 2


@dataclass(frozen=True)
class QueuePosition:
    """Position of a job in its queue, from 1, and what blocks it."""

    position: int
    reason: str


def turns(session: Session, gpu_class: str, defaults: Limits = NO_LIMITS) -> Sequence[str]:
    """The projects with a startable job of this class and capacity to run it, in order of their turn.

    Reads one job per project from the index, so the cost does not depend on the length of the queue.
    """
    line = each(Job.project_id, Job.status == "queued", Job.gpu_class == gpu_class)
    running, limit = _running(), _running_limit(defaults)
    count = func.coalesce(running.c.jobs, 0)
    their_oldest = _oldest(aliased(Job), line.c.value, gpu_class).scalar_subquery()
    ready = select(line.c.value.label("project_id"), their_oldest.label("seq")).subquery()
    order = (
        select(ready.c.project_id)
        .join(Project, Project.id == ready.c.project_id)
        .outerjoin(running, running.c.project_id == ready.c.project_id)
        .where(ready.c.seq.is_not(None), or_(limit.is_(None), count < limit))
        .order_by(count, Project.last_turn, ready.c.seq)
    )
    return session.scalars(order).all()


def oldest(project_id: str, gpu_class: str) -> ScalarSelect[int]:
    """The `seq` of the project's longest-waiting startable job of this class; locks its row."""
    # SKIP LOCKED: skips a row that another worker is claiming instead of waiting for it. SQLite has no row locks and
    # needs none, since its write transactions are exclusive.
    candidate = aliased(Job)
    return _oldest(candidate, project_id, gpu_class).with_for_update(skip_locked=True).scalar_subquery()


def validation_turns(session: Session) -> Sequence[str]:
    """The projects with an unclaimed validation, in order of their turn."""
    order = (
        select(Job.project_id)
        .join(Project, Project.id == Job.project_id)
        .where(unvalidated(Job))
        .group_by(Job.project_id, Project.last_validation)
        .order_by(Project.last_validation, func.min(Job.seq))
    )
    return session.scalars(order).all()


def oldest_unvalidated(project_id: str) -> ScalarSelect[int]:
    """The `seq` of the project's oldest unclaimed validation; locks its row."""
    candidate = aliased(Job)
    oldest = (
        select(candidate.seq)
        .where(unvalidated(candidate), candidate.project_id == project_id)
        .order_by(candidate.seq)
        .limit(1)
    )
    return oldest.with_for_update(skip_locked=True).scalar_subquery()


def unvalidated(job: type[Job]) -> ColumnElement[bool]:
    now = select(db_now()).scalar_subquery()  # evaluated once, not per row
    free = or_(job.lease_expires_at.is_(None), job.lease_expires_at < now)
    return (job.status == "validating_files") & (job.next_run_at <= now) & free


def each(column: InstrumentedAttribute[str], *where: ColumnElement[bool]) -> CTE:
    """The distinct values of a column of jobs, in `value`, and a NULL: one index lookup per value."""
    values = select(func.min(column).label("value")).where(*where).cte(recursive=True)
    after = select(func.min(column)).where(*where, column > values.c.value).scalar_subquery()
    return values.union_all(select(after).where(values.c.value.is_not(None)))


def _oldest(job: type[Job], project_id: ColumnElement[str] | str, gpu_class: str) -> Select[int]:
    its_own = (job.project_id == project_id) & (job.gpu_class == gpu_class)
    return select(job.seq).where(runnable(job), its_own).order_by(job.seq).limit(1)


def runnable(job: type[Job]) -> ColumnElement[bool]:
    # A subquery, so that the clock is evaluated once, not per row.
    return (job.status == "queued") & (job.next_run_at <= select(db_now()).scalar_subquery())


def startable(defaults: Limits = NO_LIMITS) -> Select[int]:
    """The `seq` of every job that a free worker of its class could claim now, unordered."""
    running, limit = _running(), _running_limit(defaults)
    return (
        select(Job.seq)
        .join(Project, Project.id == Job.project_id)
        .outerjoin(running, running.c.project_id == Job.project_id)
        .where(runnable(Job), or_(limit.is_(None), func.coalesce(running.c.jobs, 0) < limit))
    )


def oversubscribed(session: Session, project_id: str, defaults: Limits) -> bool:
    """Whether the project exceeds its limit of running jobs.

    In PostgreSQL two workers may claim its last place concurrently, without seeing each other's changes. This waits
    until the other one has committed or rolled back, and then counts both.
    """
    its_own = Project.id == project_id
    limit = session.scalar(select(_running_limit(defaults)).where(its_own))
    if limit is None:
        return False
    # Not FOR UPDATE, which would block inserts of rows with a foreign key to the project.
    session.execute(select(Project.id).where(its_own).with_for_update(key_share=True))
    count = select(func.count()).where(Job.project_id == project_id, Job.status.in_(RUNNING))
    return session.scalars(count).one() > int(limit)


def note_turn(session: Session, project_id: str, which: Literal["last_turn", "last_validation"]) -> None:
    """Record that the project started a job or a validation."""
    # Skipped if another worker is recording the project's turn, which has the same effect without waiting.
    free = (
        select(Project.id).where(Project.id == project_id).with_for_update(key_share=True, skip_locked=True)
    )
    latest = select(func.max(getattr(aliased(Project), which))).scalar_subquery()
    session.execute(
        update(Project)
        .where(Project.id.in_(free))
        .values({which: latest + 1})
        .execution_options(synchronize_session=False)
    )


def places(
    session: Session, jobs: Sequence[Job], defaults: Limits = NO_LIMITS
) -> Mapping[str, QueuePosition]:
    """The positions of the waiting jobs by id, in one query.

    Each GPU class has a queue. Jobs before validation have a separate queue, which starts with those that are being
    validated.
    """
    waiting = [job.id for job in jobs if job.status in WAITING]
    if not waiting:
        return {}
    lines = _lines(defaults)
    rows = session.execute(select(lines).where(lines.c.id.in_(waiting)))
    return {row.id: QueuePosition(row.position, _reason(row)) for row in rows}


def _running() -> Subquery:
    busy = aliased(Job)
    return (
        select(busy.project_id, func.count().label("jobs"))
        .where(busy.status.in_(RUNNING))
        .group_by(busy.project_id)
        .subquery()
    )


def _running_limit(defaults: Limits) -> ColumnElement[Any]:
    own = cast(json_text(Project.limits, "running_jobs"), Integer)
    return own if defaults.running_jobs is None else func.coalesce(own, defaults.running_jobs)


def _lines(defaults: Limits) -> Subquery:
    """All waiting jobs: the columns for `_reason`, and the position in their queue."""
    running = _running()
    validating = Job.status == "validating_files"
    held = Job.lease_expires_at > db_now()
    # Validation has no limits, and treats all projects as equally busy.
    one = (
        select(
            Job.id,
            Job.seq,
            Job.lease_expires_at,
            Job.next_run_at,
            validating.label("validating"),
            case((validating, ""), else_=Job.gpu_class).label("line"),
            Job.project_id.label("project"),
            case((validating, _worker_reports()), else_=_worker_reports(Job.gpu_class)).label("served"),
            case((validating, 0), else_=func.coalesce(running.c.jobs, 0)).label("running"),
            case((validating, null()), else_=_running_limit(defaults)).label("limit"),
            case((validating, Project.last_validation), else_=Project.last_turn).label("last_turn"),
            case((Job.next_run_at > db_now(), BACKS_OFF), (validating & held, HELD), else_=0).label("rank"),
        )
        .join(Project, Project.id == Job.project_id)
        .outerjoin(running, running.c.project_id == Job.project_id)
        .where(Job.status.in_(WAITING))
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


def _reason(row: Row[Any]) -> str:
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
    return waits + (f", {ahead}" if row.position > 1 else "")
