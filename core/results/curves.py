"""The validations of many jobs as short curves, for lists of jobs."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Float, Integer, cast, func, or_, select
from sqlalchemy.orm import Session, aliased

from core.database.engine import json_text
from core.database.tables import Job, StepMetric

MAX_POINTS = 60
REWARD, LOSS = "full_valid_mean_reward", "full_valid_loss"

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """The validations of a job in order, thinned to MAX_POINTS; the first is that of its start."""

    job_id: str
    metric: str | None  # None: there is no validation yet
    points: Points  # by step
    step: int | None  # the last one that was recorded; None: there is none
    total_steps: int | None


def curves(session: Session, jobs: Sequence[Job]) -> list[Curve]:
    """The curve of each job: its validation rewards, or its validation losses if it has no rewards."""
    ids = [job.id for job in jobs]
    reward, loss = (cast(json_text(StepMetric.data, name), Float) for name in (REWARD, LOSS))
    stored = (
        select(StepMetric.job_id, StepMetric.step, reward, loss)
        .where(StepMetric.job_id.in_(ids), or_(reward.is_not(None), loss.is_not(None)))
        .order_by(StepMetric.step)
    )
    rewards: dict[str, list[tuple[int, float]]] = {job_id: [] for job_id in ids}
    losses: dict[str, list[tuple[int, float]]] = {job_id: [] for job_id in ids}
    for job_id, step, *values in session.execute(stored):
        for points, value in zip((rewards, losses), values, strict=True):
            if value is not None:
                points[job_id].append((step, value))
    last = _last(session, ids)
    found = []
    for job_id in ids:
        metric = REWARD if rewards[job_id] else LOSS if losses[job_id] else None
        kept = _thinned(rewards[job_id] or losses[job_id])
        found.append(Curve(job_id, metric, kept, *last.get(job_id, (None, None))))
    return found


def _last(session: Session, ids: Sequence[str]) -> dict[str, tuple[int | None, int | None]]:
    newest = (
        select(StepMetric.job_id, func.max(StepMetric.step).label("step"))
        .where(StepMetric.job_id.in_(ids))
        .group_by(StepMetric.job_id)
        .subquery()
    )
    row = aliased(StepMetric)
    total = cast(json_text(row.data, "total_steps"), Integer)
    last = select(row.job_id, row.step, total).join(
        newest, (newest.c.job_id == row.job_id) & (newest.c.step == row.step)
    )
    return {job_id: (step, of) for job_id, step, of in session.execute(last)}


def _thinned(points: Points) -> Points:
    """The first and the last point, and others at even distances."""
    if len(points) <= MAX_POINTS:
        return points
    stride = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * stride)] for index in range(MAX_POINTS)]
