"""Whose turn it is: the fair order of the queue, and what a waiting job can be told about its place in it.

A free worker takes, among the jobs of its class that may start now, one of the project that has the fewest running;
among projects with as many, of the one whose last turn was longest ago; of that project, the oldest. Without
the second rule a machine with one worker, where nobody runs anything when a job is chosen, would simply go by age,
and a project with a thousand jobs would keep all others waiting. A project at its `running_jobs` is passed over.
Before that, the files of new jobs are validated, in a line of their own: there turns simply go round the projects.

The place shown is the one the job would be taken at if workers now asked again and again and no job ended meanwhile.
Since every claim puts its project one further back, the k-th waiting job of a project that runs r is taken at level
r + k, and the whole order is one ORDER BY: by level, then those who were at that level before, then by turn.
Behind those that can be taken come jobs beyond their project's `running_jobs`, and then those that back off.
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

from core.db import db_now, json_text
from core.limits import NO_LIMITS, Limits
from core.models import Job, Project

WAITING = ("queued", "validating_files")
RUNNING = ("running", "pausing")
# In a line, those before and behind the jobs that are taken in turn.
HELD, BACKS_OFF = -1, 2


@dataclass(frozen=True)
class Place:
    """Where a job stands in its line, from 1, and what it waits for."""

    position: int
    reason: str


def turns(session: Session, gpu_class: str, defaults: Limits = NO_LIMITS) -> Sequence[str]:
    """The projects that have a job of this class to start now and may run another, first the one whose turn it is.

    Looks at one job of each, by the index: with ten thousand jobs in the line it costs what it does with ten.
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
    """The `seq` of the project's job of this class that has waited longest and may start; locks its row."""
    # SKIP LOCKED: a row that another worker is just taking is passed over, not waited for. SQLite has no row
    # locks and needs none, since a write transaction there is alone.
    candidate = aliased(Job)
    return _oldest(candidate, project_id, gpu_class).with_for_update(skip_locked=True).scalar_subquery()


def validation_turns(session: Session) -> Sequence[str]:
    """The projects that have a job whose files nobody is validating, first the one whose turn it is."""
    order = (
        select(Job.project_id)
        .join(Project, Project.id == Job.project_id)
        .where(unvalidated(Job))
        .group_by(Job.project_id, Project.last_validation)
        .order_by(Project.last_validation, func.min(Job.seq))
    )
    return session.scalars(order).all()


def oldest_unvalidated(project_id: str) -> ScalarSelect[int]:
    """The `seq` of the project's oldest job whose files nobody is validating; locks its row."""
    candidate = aliased(Job)
    oldest = (
        select(candidate.seq)
        .where(unvalidated(candidate), candidate.project_id == project_id)
        .order_by(candidate.seq)
        .limit(1)
    )
    return oldest.with_for_update(skip_locked=True).scalar_subquery()


def unvalidated(job: type[Job]) -> ColumnElement[bool]:
    now = select(db_now()).scalar_subquery()  # read once, and not for each row
    free = or_(job.lease_expires_at.is_(None), job.lease_expires_at < now)
    return (job.status == "validating_files") & (job.next_run_at <= now) & free


def each(column: InstrumentedAttribute[str], *where: ColumnElement[bool]) -> CTE:
    """The different values of a column of jobs, in `value`, and a NULL: a look into an index for each of them."""
    values = select(func.min(column).label("value")).where(*where).cte(recursive=True)
    after = select(func.min(column)).where(*where, column > values.c.value).scalar_subquery()
    return values.union_all(select(after).where(values.c.value.is_not(None)))


def _oldest(job: type[Job], project_id: ColumnElement[str] | str, gpu_class: str) -> Select[int]:
    its_own = (job.project_id == project_id) & (job.gpu_class == gpu_class)
    return select(job.seq).where(runnable(job), its_own).order_by(job.seq).limit(1)


def runnable(job: type[Job]) -> ColumnElement[bool]:
    # In a query of its own the clock is read once, and not for each of ten thousand rows.
    return (job.status == "queued") & (job.next_run_at <= select(db_now()).scalar_subquery())


def startable(defaults: Limits = NO_LIMITS) -> Select[int]:
    """The `seq` of every job that a free worker of its class would take now, in no order."""
    running, limit = _running(), _running_limit(defaults)
    return (
        select(Job.seq)
        .join(Project, Project.id == Job.project_id)
        .outerjoin(running, running.c.project_id == Job.project_id)
        .where(runnable(Job), or_(limit.is_(None), func.coalesce(running.c.jobs, 0) < limit))
    )


def oversubscribed(session: Session, project_id: str, defaults: Limits) -> bool:
    """Whether the project now runs more jobs than it may.

    On PostgreSQL two workers may take its last place at the same time, neither seeing what the other does. This
    waits until the other has committed or given up, and then counts both.
    """
    its_own = Project.id == project_id
    limit = session.scalar(select(_running_limit(defaults)).where(its_own))
    if limit is None:
        return False
    # Not FOR UPDATE: every new row of the project refers to this one, and would wait, too.
    session.execute(select(Project.id).where(its_own).with_for_update(key_share=True))
    count = select(func.count()).where(Job.project_id == project_id, Job.status.in_(RUNNING))
    return session.scalars(count).one() > int(limit)


def note_turn(session: Session, project_id: str, which: Literal["last_turn", "last_validation"]) -> None:
    """The project has just started a job, or had its files looked at."""
    # Passed over where another worker is just noting the project's turn: that is as good, and nobody waits.
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


def places(session: Session, jobs: Sequence[Job], defaults: Limits = NO_LIMITS) -> Mapping[str, Place]:
    """Of those jobs that wait, by id, in one query for all of them.

    Jobs wait in a line for each GPU class. Those whose files are not validated yet are in a line of their own, which
    begins with those that are being validated.
    """
    waiting = [job.id for job in jobs if job.status in WAITING]
    if not waiting:
        return {}
    lines = _lines(defaults)
    rows = session.execute(select(lines).where(lines.c.id.in_(waiting)))
    return {row.id: Place(row.position, _reason(row)) for row in rows}


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
    """All that wait: what `_reason` needs, and the position of each in its line."""
    running = _running()
    validating = Job.status == "validating_files"
    held = Job.lease_expires_at > db_now()
    # Validation knows no limits, and all projects run as much.
    one = (
        select(
            Job.id,
            Job.seq,
            Job.lease_expires_at,
            Job.next_run_at,
            validating.label("validating"),
            case((validating, ""), else_=Job.gpu_class).label("line"),
            Job.project_id.label("project"),
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


def _reason(row: Row[Any]) -> str:
    if row.rank == BACKS_OFF:
        until = datetime.fromtimestamp(row.next_run_at, UTC).isoformat(timespec="seconds")
        return f"backing off until {until} after an interruption"
    ahead = "1 job is ahead" if row.position == 2 else f"{row.position - 1} jobs are ahead"
    if row.validating:
        if row.rank == HELD:
            return "its files are being validated"
        return "waiting for its files to be validated" + (f", {ahead}" if row.position > 1 else "")
    if row.beyond:
        verb = "runs" if row.running >= row.limit else "will run"
        return f"the project {verb} its maximum of {row.limit} jobs"
    waited_for = f"a free worker of class {row.line}"
    return f"waiting for {waited_for}" + (f", {ahead}" if row.position > 1 else "")
