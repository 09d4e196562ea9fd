"""The result of a job: the validation of its delivered checkpoint, beside that of the model that it started from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Float, and_, cast, or_, select
from sqlalchemy.orm import Session

from core.database.engine import json_text
from core.database.tables import Checkpoint, Job, StepMetric, TunedModel
from core.jobs.verdict import Verdict
from core.results.curves import LOSS, REWARD


@dataclass(frozen=True)
class JobResult:
    """The numbers that every list, page and command shows as the result of a job."""

    step: int  # of the delivered checkpoint
    metric: str  # REWARD, or LOSS of a job without rewards
    start: float | None  # of the model that the job started from; None: it was not validated
    value: float


def delivered_steps(session: Session, jobs: Sequence[Job]) -> dict[str, int]:
    """The step of the delivered checkpoint of each job that has one, by the job's id."""
    steps = {job.id: Verdict.read(job.verdict).step for job in jobs if job.verdict is not None}
    others = [job for job in jobs if job.id not in steps and job.fine_tuned_model is not None]
    if others:
        stored = (
            select(TunedModel.job_id, Checkpoint.step)
            .join(Checkpoint, TunedModel.checkpoint_id == Checkpoint.id)
            .where(
                TunedModel.job_id.in_([job.id for job in others]),
                TunedModel.name.in_([job.fine_tuned_model for job in others]),
            )
        )
        steps |= dict(row.tuple() for row in session.execute(stored))
    return steps


def results(session: Session, jobs: Sequence[Job]) -> Mapping[str, JobResult]:
    """The result of each job that validated the checkpoint that it delivered, by the job's id.

    A job with a verdict has its numbers, which leave out rows that only one of the two models has a score on.
    """
    found = {}
    for job in jobs:
        if job.verdict is not None:
            verdict = Verdict.read(job.verdict)
            found[job.id] = JobResult(verdict.step, REWARD, verdict.base_reward, verdict.tuned_reward)
    steps = delivered_steps(session, [job for job in jobs if job.id not in found])
    if not steps:
        return found
    reward, loss = (cast(json_text(StepMetric.data, name), Float) for name in (REWARD, LOSS))
    both = (
        and_(StepMetric.job_id == job_id, StepMetric.step.in_((0, step))) for job_id, step in steps.items()
    )
    rows = session.execute(select(StepMetric.job_id, StepMetric.step, reward, loss).where(or_(*both)))
    values = {(row_id, step): (rewarded, lost) for row_id, step, rewarded, lost in rows}
    for job_id, step in steps.items():
        starts, ends = (values.get((job_id, at), (None, None)) for at in (0, step))
        for metric, start, end in zip((REWARD, LOSS), starts, ends, strict=True):
            if end is not None:
                found.setdefault(job_id, JobResult(step, metric, start, end))
    return found
