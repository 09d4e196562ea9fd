"""What a job tells its user: events, and one row of metrics a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, delete, select, update
from sqlalchemy.orm import Session

from core import logs, pages
from core.models import Event, StepMetric, now
from core.pages import Page

if TYPE_CHECKING:  # core.jobs writes events, so it imports this module
    from core.jobs import Claim


def append(
    session: Session,
    job_id: str,
    message: str,
    *,
    level: str = "info",
    type: str = "message",
    data: dict[str, Any] | None = None,
    step: int | None = None,
) -> Event:
    """Add an event to the job's log; it stands behind all that were appended before it.

    With `step` it tells of that step, and is superseded when the step has to be done again.
    """
    event = Event(
        job_id=job_id, message=_storable(message), level=level, type=type, data=data or {}, step=step
    )
    session.add(event)
    session.flush()  # numbers it now: its place must not depend on what else the transaction writes
    return event


def page(session: Session, job_id: str, *, after: str | None = None, limit: int) -> Page[Event]:
    """Newest first, without what was said of steps that had to be done again."""
    said, listed = _of_job(job_id)
    return pages.newest_first(session, listed, Event, after=after, limit=limit, cursors=said)


def onwards(session: Session, job_id: str, *, after: str | None = None, limit: int) -> Page[Event]:
    """The same log from its beginning, for who follows it: oldest first, behind the event `after`."""
    said, listed = _of_job(job_id)
    return pages.oldest_first(session, listed, Event, after=after, limit=limit, cursors=said)


def record_step(
    session: Session,
    claim: Claim,
    step: int,
    data: dict[str, Any],
    valid_scores: Sequence[float | None] | None = None,
) -> None:
    """Keep the metrics of a finished step. A step replayed after a crash replaces the row of the lost attempt.

    Call it inside `jobs.fenced`: that lock is what keeps two attempts from writing the same row.
    """
    session.merge(
        StepMetric(
            job_id=claim.job_id,
            step=step,
            epoch=claim.epoch,
            created_at=now(),
            data=data,
            valid_scores=None if valid_scores is None else list(valid_scores),
        )
    )


def steps(session: Session, job_id: str) -> Sequence[StepMetric]:
    """All recorded steps, in order."""
    return session.scalars(
        select(StepMetric).where(StepMetric.job_id == job_id).order_by(StepMetric.step)
    ).all()


def valid_scores(session: Session, job_id: str, step: int) -> list[float | None] | None:
    """The row scores of the validation of this step; None if there was none, or an older version recorded it."""
    scores: list[float | None] | None = session.scalar(
        select(StepMetric.valid_scores).where(StepMetric.job_id == job_id, StepMetric.step == step)
    )
    return scores


def has_message(session: Session, job_id: str, message: str) -> bool:
    """Whether the job has an event with exactly this message."""
    same = select(Event.id).where(Event.job_id == job_id, Event.message == _storable(message))
    return session.scalar(same.limit(1)) is not None


def warned(session: Session, job_id: str) -> set[str]:
    """The rules whose warning the job has among its events (worker/monitors.py)."""
    _, listed = _of_job(job_id)
    warnings = session.scalars(listed.where(Event.level == "warn"))
    return {event.data["rule"] for event in warnings if "rule" in event.data}


def discard_steps_after(session: Session, job_id: str, step: int) -> None:
    """Forget the steps beyond a checkpoint: a run that resumes from it will do them again."""
    session.execute(delete(StepMetric).where(StepMetric.job_id == job_id, StepMetric.step > step))
    told = update(Event).where(Event.job_id == job_id, Event.step > step).values(superseded=True)
    session.execute(told.execution_options(synchronize_session=False))


def _of_job(job_id: str) -> tuple[Select[Event], Select[Event]]:
    """All events of a job, which is what a cursor may name, and those of them that are shown."""
    said = select(Event).where(Event.job_id == job_id)
    return said, said.where(Event.superseded.is_(False))


def _storable(text: str) -> str:
    # Messages quote model output and the last words of crashed processes. PostgreSQL stores no NUL and neither
    # database half a surrogate pair; refusing them here would lose the event, and the state change with it.
    # Terminal codes and progress bars are for the log of the run, which has room for them.
    text = logs.cleaned(text)
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
