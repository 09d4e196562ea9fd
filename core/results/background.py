"""Work that a process of the API does in the background: a row for each run, with its progress and its report.

The process that received the request does the work and renews its lease, by the clock of the database. A run whose
lease has expired lost its process, and counts as failed.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session, object_session

from core.database import pages
from core.database.engine import db_now
from core.database.pages import Page
from core.database.tables import BackgroundRun, now

IN_PROGRESS, COMPLETED, FAILED, CANCELED = "in_progress", "completed", "failed", "canceled"
LEASE_SECONDS = 30.0
MAX_KEPT = 200  # runs of one kind in a project; a new one deletes the oldest beyond these
INTERRUPTED = {
    "message": "The server that ran this was stopped. Create it again.",
    "type": "server_error",
    "param": None,
    "code": "interrupted",
    "status": 503,
}

Run = TypeVar("Run", bound=BackgroundRun)


def add(session: Session, run: BackgroundRun) -> None:
    """Add a run that is about to begin, and delete the oldest ended ones beyond MAX_KEPT."""
    table = type(run)
    pages.keep_order(session, run.project_id)
    run.lease_expires_at = session.scalars(select(db_now())).one() + LEASE_SECONDS
    session.add(run)
    session.flush()
    beyond = session.scalars(
        select(table)
        .where(table.project_id == run.project_id, _ended(table))
        .order_by(table.seq.desc())
        .offset(MAX_KEPT - 1)
    )
    for old in beyond.all():
        pages.delete_row(session, old, owner=old.project_id)


def find(session: Session, table: type[Run], project_id: str, run_id: str) -> Run | None:
    return session.scalar(select(table).where(table.id == run_id, table.project_id == project_id))


def page(session: Session, table: type[Run], project_id: str, *, after: str | None, limit: int) -> Page[Run]:
    """Newest first."""
    statement = select(table).where(table.project_id == project_id)
    return pages.newest_first(session, statement, table, after=after, limit=limit, owner=project_id)


def status_of(run: BackgroundRun) -> str:
    return FAILED if _is_lost(run) else run.status


def error_of(run: BackgroundRun) -> dict[str, Any] | None:
    return INTERRUPTED if _is_lost(run) else run.error


def _is_lost(run: BackgroundRun) -> bool:
    if run.status != IN_PROGRESS:
        return False
    session = object_session(run)
    assert session is not None, "a run is shown in the session that has read it"
    table = type(run)
    return session.scalar(select(table.id).where(table.id == run.id, _ended(table))) is not None


def _ended(table: type[BackgroundRun]) -> ColumnElement[bool]:
    """Whether a run has ended or its lease has. A lease beyond the next is from before the clock was set back."""
    held = table.lease_expires_at.between(db_now(), db_now() + 2 * LEASE_SECONDS)
    return or_(table.status != IN_PROGRESS, ~held)


def renew(session: Session, table: type[BackgroundRun], run_id: str, progress: Mapping[str, Any]) -> bool:
    """Write the progress. Returns False if the run was canceled or deleted."""
    values = {"progress": dict(progress), "lease_expires_at": db_now() + LEASE_SECONDS}
    return change(session, table, run_id, values)


def complete(
    session: Session,
    table: type[BackgroundRun],
    run_id: str,
    progress: Mapping[str, Any],
    results: Mapping[str, Any],
) -> bool:
    """Store the columns of the results. Returns False if the run was canceled or deleted meanwhile."""
    values = {**results, "progress": dict(progress), "status": COMPLETED, "finished_at": now()}
    return change(session, table, run_id, values)


def fail(session: Session, table: type[BackgroundRun], run_id: str, error: Mapping[str, Any]) -> bool:
    values = {"error": dict(error), "status": FAILED, "finished_at": now()}
    return change(session, table, run_id, values)


def cancel(session: Session, run: BackgroundRun) -> bool:
    """Cancel a run; its process notices within a second. One that has ended stays as it is: False."""
    is_canceled = change(session, type(run), run.id, {"status": CANCELED, "finished_at": now()})
    session.refresh(run)
    return is_canceled


def delete_old(session: Session, table: type[BackgroundRun], before: float, most: int) -> int:
    """Delete at most `most` runs that ended before this Unix time, and return their number."""
    lost = (table.status == IN_PROGRESS) & (table.lease_expires_at < before)
    ended = or_(table.finished_at < before, lost)
    old = session.scalars(select(table.id).where(ended).limit(most)).all()
    session.execute(delete(table).where(table.id.in_(old)))
    return len(old)


def change(session: Session, table: type[BackgroundRun], run_id: str, values: dict[str, Any]) -> bool:
    """Change a run in progress. Returns False if it has ended."""
    statement = update(table).where(table.id == run_id, table.status == IN_PROGRESS).values(**values)
    changed = session.execute(statement.execution_options(synchronize_session=False))
    return bool(changed.rowcount)  # type: ignore[attr-defined]
