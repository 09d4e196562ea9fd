"""The right of one attempt to write to its job, and the times in the rows of what workers claim."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.engine import db_now


@dataclass(frozen=True)
class Claim:
    """Valid as long as its epoch is that of the job's row."""

    job_id: str
    epoch: int
    owner: str


class LeaseLost(Exception):
    """The job was cancelled, or claimed by another worker. Stop, and write nothing more."""


def bound_time(
    session: Session,
    column: "InstrumentedAttribute[float] | InstrumentedAttribute[float | None]",
    seconds: float | ColumnElement[float],
) -> None:
    """Let no row have a time later than `seconds` from now: the database's clock has been set back since."""
    latest = db_now() + seconds
    late = update(column.class_).where(column > latest).values({column: latest})
    session.execute(late.execution_options(synchronize_session=False))
