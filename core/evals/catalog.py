"""Evals and their runs by id and as lists. The evals of jobs (core/results/evals.py) are in the same list."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.engine import Work, earliest_now
from core.database.ids import new_id
from core.database.pages import KEEP_PAST_CURSORS_SECONDS, Page, fitting
from core.database.tables import Eval, EvalRun, Job, now
from core.errors import EvalNotFound, InvalidRequest
from core.evals import imported, lifecycle
from core.results import evals as of_jobs

OrderBy = Literal["created_at", "updated_at"]


def find(session: Session, project_id: str, eval_id: str) -> Eval | Job:
    """Return the created eval, or the job whose eval this is.

    Raises:
        EvalNotFound: the project has no eval with this id.
    """
    named = Eval.id.in_(imported.row_ids_of(eval_id, project_id))
    found = session.scalar(select(Eval).where(named, _mine(project_id)))
    return found if found is not None else of_jobs.job_of(session, project_id, eval_id)


def create(work: Work, eval_row: Eval) -> None:
    work.session.add(eval_row)
    work.session.flush()
    work.record("eval.created", imported.public_id(eval_row.id), {"name": eval_row.name})


def remove(work: Work, eval_row: Eval) -> list[str]:
    """Delete an eval with its runs. Returns the keys of the blobs to delete after the commit."""
    runs = work.session.scalars(
        select(EvalRun)
        .where(EvalRun.eval_id == eval_row.id, EvalRun.deleted_at.is_(None))
        .order_by(EvalRun.seq)
    ).all()
    keys = [key for run in runs for key in lifecycle.remove(work, run)]
    eval_row.deleted_at = now()
    work.record("eval.deleted", imported.public_id(eval_row.id))
    return keys


def forget_deleted(session: Session) -> None:
    """Remove the rows of evals and runs that were deleted a month ago, which were cursors of their lists."""
    before = earliest_now(session) - KEEP_PAST_CURSORS_SECONDS
    for table in (EvalRun, Eval):
        session.execute(delete(table).where(table.deleted_at < before))


def free_eval_id(session: Session, project_id: str, wanted: str) -> str:
    """The id of a row whose public id is `wanted`, if that is well-formed and free in the project; else a new one."""
    row_id = imported.row_id_of("eval", wanted, project_id)
    of_job = Job.id == "ftjob-" + wanted.removeprefix("eval_"), Job.project_id == project_id
    if (
        row_id is None
        or _is_taken(session, Eval, wanted, project_id)
        or session.scalar(select(Job.id).where(*of_job))
    ):
        return new_id("eval_")
    return row_id


def free_run_id(session: Session, project_id: str, wanted: str) -> str:
    """The same for a run."""
    row_id = imported.row_id_of("evalrun", wanted, project_id)
    return new_id("evalrun_") if row_id is None or _is_taken(session, EvalRun, wanted, project_id) else row_id


def _is_taken(session: Session, table: type[Eval | EvalRun], public: str, project_id: str) -> bool:
    """Whether the project has, or has deleted within a month, a row with this public id."""
    taken = table.id.in_(imported.row_ids_of(public, project_id)), table.project_id == project_id
    return session.scalar(select(table.id).where(*taken)) is not None


# The list of evals.


@dataclass(frozen=True)
class _Position:
    """The place of an eval in the list: its time, then jobs before created evals, then the order of insertion."""

    at: int
    kind: int
    seq: int


def page(
    session: Session,
    project_id: str,
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
    order_by: OrderBy = "created_at",
) -> Page[Eval | Job]:
    """A page of the evals of jobs and of the created ones, ordered by time.

    Raises:
        InvalidRequest: `after` is not and was not an eval of the project.
    """
    start = None if after is None else _position(session, project_id, after, order_by)
    at = Eval.updated_at if order_by == "updated_at" else Eval.created_at
    mine = select(Eval).where(Eval.project_id == project_id, Eval.deleted_at.is_(None))
    theirs = select(Job).where(Job.project_id == project_id, Job.method == "reinforcement")
    if start is not None:
        theirs = theirs.where(_behind(Job.created_at, Job.seq, 0, start, newest_first))
        mine = mine.where(_behind(at, Eval.seq, 1, start, newest_first))
    if newest_first:
        theirs = theirs.order_by(Job.created_at.desc(), Job.seq.desc())
        mine = mine.order_by(at.desc(), Eval.seq.desc())
    else:
        theirs, mine = theirs.order_by(Job.created_at, Job.seq), mine.order_by(at, Eval.seq)
    rows: list[Eval | Job] = [
        *session.scalars(theirs.limit(limit + 1)),
        *session.scalars(mine.limit(limit + 1)),
    ]

    def position(row: Eval | Job) -> tuple[int, int, int]:
        made = _place(row, order_by)
        return made.at, made.kind, made.seq

    rows.sort(key=position, reverse=newest_first)
    return Page(rows[:limit], has_more=len(rows) > limit)


def _place(row: Eval | Job, order_by: OrderBy) -> _Position:
    if isinstance(row, Job):  # never updated
        return _Position(row.created_at, 0, row.seq)
    return _Position(row.updated_at if order_by == "updated_at" else row.created_at, 1, row.seq)


def _position(session: Session, project_id: str, after: str, order_by: OrderBy) -> _Position:
    row: Eval | Job | None = session.scalar(
        select(Eval).where(Eval.id.in_(imported.row_ids_of(after, project_id)), Eval.project_id == project_id)
    )
    if row is None:
        try:
            row = of_jobs.job_of(session, project_id, after)
        except EvalNotFound:
            raise no_cursor(after) from None
    return _place(row, order_by)


def _behind(
    at: InstrumentedAttribute[int],
    seq: InstrumentedAttribute[int],
    kind: int,
    start: _Position,
    newest_first: bool,
) -> ColumnElement[bool]:
    if kind == start.kind:
        mine, theirs = tuple_(at, seq), tuple_(start.at, start.seq)
        return mine < theirs if newest_first else mine > theirs
    # Rows of the other kind with the same time are all on one side of the cursor.
    if newest_first:
        return at <= start.at if kind < start.kind else at < start.at
    return at >= start.at if kind > start.kind else at > start.at


# Runs of a created eval.


def run_of(session: Session, eval_row: Eval, run_id: str) -> EvalRun:
    """Raises EvalNotFound."""
    named = EvalRun.id.in_(imported.row_ids_of(run_id, eval_row.project_id))
    run = session.scalar(
        select(EvalRun).where(named, EvalRun.eval_id == eval_row.id, EvalRun.deleted_at.is_(None))
    )
    if run is None:
        raise EvalNotFound("run", run_id)
    return run


def eval_of(session: Session, project_id: str, run_id: str) -> str | None:
    """The id of the eval, created or of a job, that has this run; None: the project has no such run."""
    named = EvalRun.id.in_(imported.row_ids_of(run_id, project_id))
    mine = EvalRun.project_id == project_id, EvalRun.deleted_at.is_(None)
    found = session.scalar(select(EvalRun.eval_id).where(named, *mine))
    return of_jobs.eval_of(session, project_id, run_id) if found is None else imported.public_id(found)


def runs(
    session: Session,
    eval_row: Eval,
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
    status: str | None = None,
    max_bytes: int,
) -> Page[EvalRun]:
    """List the runs of an eval by creation. The page ends early where the rows that it echoes exceed `max_bytes`.

    Raises:
        InvalidRequest: `after` is not and was not a run of the eval.
    """
    statement = select(EvalRun).where(EvalRun.eval_id == eval_row.id, EvalRun.deleted_at.is_(None))
    if status is not None:
        statement = statement.where(EvalRun.status == status)
    if after is not None:
        named = EvalRun.id.in_(imported.row_ids_of(after, eval_row.project_id))
        seq = session.scalar(select(EvalRun.seq).where(named, EvalRun.eval_id == eval_row.id))
        if seq is None:
            raise no_cursor(after)
        statement = statement.where(EvalRun.seq < seq if newest_first else EvalRun.seq > seq)
    order = EvalRun.seq.desc() if newest_first else EvalRun.seq
    rows: Sequence[EvalRun] = session.scalars(statement.order_by(order).limit(limit + 1)).all()
    shown = fitting((run.content_bytes for run in rows[:limit]), max_bytes)
    return Page(rows[:shown], has_more=len(rows) > shown)


def no_cursor(after: str) -> InvalidRequest:
    return InvalidRequest(f"No item with id '{after}' in this list.", param="after")


def _mine(project_id: str) -> ColumnElement[bool]:
    return (Eval.project_id == project_id) & Eval.deleted_at.is_(None)
