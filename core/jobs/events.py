"""Events of a job, and the metrics of its steps."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, delete, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.claims import Claim
from core.database import pages
from core.database.pages import Page
from core.database.tables import Event, StepMetric, now
from core.step_metrics import StepMetrics
from core.telemetry import logs


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
    """Append an event to the job's log, after all earlier ones.

    An event with `step` is superseded when the step is repeated.
    """
    # Messages quote the stderr of crashed processes; escape codes and progress bars stay in the log of the run.
    event = Event(
        job_id=job_id, message=logs.cleaned(message), level=level, type=type, data=data or {}, step=step
    )
    session.add(event)
    session.flush()  # assigns the sequence number now, independent of the transaction's other writes
    return event


def page(
    session: Session, job_id: str, *, type: str | None = None, after: str | None = None, limit: int
) -> Page[Event]:
    """List events newest first, without superseded ones."""
    said, listed = _of_job(job_id)
    if type is not None:
        listed = listed.where(Event.type == type)
    return pages.newest_first(session, listed, Event, after=after, limit=limit, cursors=said)


def onwards(session: Session, job_id: str, *, after: str | None = None, limit: int) -> Page[Event]:
    """List events oldest first, starting after the event `after`."""
    said, listed = _of_job(job_id)
    return pages.oldest_first(session, listed, Event, after=after, limit=limit, cursors=said)


def record_step(
    session: Session,
    claim: Claim,
    step: StepMetrics,
    valid_scores: Sequence[float | None] | None = None,
    shadow_scores: Sequence[float | None] | None = None,
) -> None:
    """Store the metrics of a finished step. A step repeated after a crash replaces the row of the lost attempt.

    Call it inside `jobs.fenced`, whose lock serializes concurrent attempts.
    """
    session.merge(
        StepMetric(
            job_id=claim.job_id,
            step=step.step,
            epoch=claim.epoch,
            created_at=now(),
            data=step.to_data(),
            valid_scores=None if valid_scores is None else list(valid_scores),
            shadow_scores=None if shadow_scores is None else list(shadow_scores),
        )
    )


def steps(session: Session, job_id: str) -> Sequence[StepMetric]:
    """All recorded steps, in order."""
    return session.scalars(
        select(StepMetric).where(StepMetric.job_id == job_id).order_by(StepMetric.step)
    ).all()


def step_data(session: Session, job_id: str) -> list[tuple[int, dict[str, Any]]]:
    """The number and the recorded data of all steps, in order. Thousands are read in a third of the time of `steps`."""
    stored = select(StepMetric.step, StepMetric.data).where(StepMetric.job_id == job_id)
    return [(step, data) for step, data in session.execute(stored.order_by(StepMetric.step))]


def metrics(session: Session, job_id: str) -> list[StepMetrics]:
    """The metrics of all recorded steps, in order."""
    return [StepMetrics.load(row.data, step=row.step) for row in steps(session, job_id)]


def valid_scores(session: Session, job_id: str, step: int) -> list[float | None] | None:
    """The row scores of this step's validation; None without one."""
    return _scores(session, StepMetric.valid_scores, job_id, step)


def shadow_scores(session: Session, job_id: str, step: int) -> list[float | None] | None:
    """The row scores of this step's validation by the shadow grader; None without one."""
    return _scores(session, StepMetric.shadow_scores, job_id, step)


def _scores(
    session: Session, column: InstrumentedAttribute[list[Any] | None], job_id: str, step: int
) -> list[float | None] | None:
    return session.scalar(select(column).where(StepMetric.job_id == job_id, StepMetric.step == step))


def has_message(session: Session, job_id: str, message: str) -> bool:
    """Whether the job has an event with exactly this message."""
    same = select(Event.id).where(Event.job_id == job_id, Event.message == logs.cleaned(message))
    return session.scalar(same.limit(1)) is not None


def warnings(session: Session, job_id: str) -> list[Event]:
    """The warnings and alarms of the monitors (worker/recording/monitors.py), oldest first."""
    _, listed = _of_job(job_id)
    found = session.scalars(listed.where(Event.level == "warn").order_by(Event.seq))
    return [event for event in found if "rule" in event.data]


def warned(session: Session, job_id: str) -> set[str]:
    """The monitors (worker/recording/monitors.py) whose warning the job already has."""
    return {event.data["rule"] for event in warnings(session, job_id)}


def discard_steps_after(session: Session, job_id: str, step: int) -> None:
    """Delete the steps after a checkpoint: a run that resumes from it repeats them."""
    session.execute(delete(StepMetric).where(StepMetric.job_id == job_id, StepMetric.step > step))
    told = update(Event).where(Event.job_id == job_id, Event.step > step).values(superseded=True)
    session.execute(told.execution_options(synchronize_session=False))


def _of_job(job_id: str) -> tuple[Select[Event], Select[Event]]:
    """All events of a job, which are valid cursors, and the ones that are listed."""
    events = select(Event).where(Event.job_id == job_id)
    return events, events.where(Event.superseded.is_(False))
