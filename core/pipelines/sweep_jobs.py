"""The jobs of a sweep: reads their validations, stops the losers, ends the stage. core/pipelines/sweeps.py decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.claims import lock
from core.database.engine import Work
from core.database.states import JOB
from core.database.tables import Job, Pipeline, StepMetric
from core.jobs import events
from core.jobs import lifecycle as jobs
from core.pipelines import lifecycle, sweeps
from core.pipelines.lifecycle import Stage
from core.pipelines.sweeps import Candidate, Scores
from core.results.job_results import delivered_steps

Entry = dict[str, Any]
"""A job of a sweep as stored in its stage: see `lifecycle.Stage`."""


@dataclass(frozen=True)
class SweptJob:
    entry: Entry
    job: Job

    @property
    def is_running(self) -> bool:
        return self.job.status not in JOB.final


def follow(work: Work, pipeline: Pipeline, stage: Stage, *, stop_losers: bool, budget: float | None) -> None:
    """Look at a sweep: stop what has lost; end the stage once all of its jobs have ended.

    Args:
        budget: GPU-seconds of all jobs together, after which only the best one continues.
    """
    swept = _read(work.session, stage)
    if stop_losers:
        swept = _without_losers(work, swept, len(stage["jobs"]))
    if budget is not None:
        swept = _within(work, swept, budget)
    lifecycle.update_stage(pipeline, stage["name"], jobs=[one.entry for one in swept])
    if not any(one.is_running for one in swept):
        _end(work.session, pipeline, stage["name"], swept)


def _read(session: Session, stage: Stage) -> list[SweptJob]:
    ids = [entry["job_id"] for entry in stage["jobs"]]
    found = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)))}
    return [SweptJob(entry, found[entry["job_id"]]) for entry in stage["jobs"]]


def _candidates(session: Session, swept: Sequence[SweptJob]) -> dict[str, Candidate]:
    """The jobs that may still win, by id: they run or have succeeded."""
    mine = [one for one in swept if one.is_running or one.job.status == "succeeded"]
    validated: dict[str, list[int]] = {one.job.id: [] for one in mine}
    steps = select(StepMetric.job_id, StepMetric.step).where(
        StepMetric.job_id.in_(validated), StepMetric.step > 0, StepMetric.valid_scores.is_not(None)
    )
    for job_id, step in session.execute(steps):
        validated[job_id].append(step)
    return {
        one.job.id: Candidate(
            one.entry["settings"], validated[one.job.id], partial(_scores, session, one.job.id)
        )
        for one in mine
    }


def _scores(session: Session, job_id: str, step: int) -> Scores:
    return events.valid_scores(session, job_id, step) or []


def _without_losers(work: Work, swept: Sequence[SweptJob], count: int) -> list[SweptJob]:
    candidates = _candidates(work.session, swept)
    kept = []
    for one in swept:
        reason = None
        if one.is_running:
            others = [candidate for job_id, candidate in candidates.items() if job_id != one.job.id]
            reason = sweeps.beaten(candidates[one.job.id], others, count)
        kept.append(one if reason is None else _stopped(work, one, reason))
    return kept


def _within(work: Work, swept: Sequence[SweptJob], budget: float) -> list[SweptJob]:
    """Stop all but the best job if their budget is used up. Without a validation the first one is the best."""
    used = sum(one.job.gpu_seconds for one in swept)
    if used < budget:
        return list(swept)
    best = _leader(work.session, swept)
    reason = (
        f"the jobs of the sweep have used {used:.0f} of {budget:.0f} GPU-seconds, and another one is ahead"
    )
    return [_stopped(work, one, reason) if one.is_running and one.job.id != best else one for one in swept]


def _leader(session: Session, swept: Sequence[SweptJob]) -> str:
    """The job with the highest mean reward at its last validation, of those that may still win; else the first one."""
    means = {}
    for job_id, candidate in _candidates(session, swept).items():
        if candidate.validated:
            graded = [score for score in candidate.scores(max(candidate.validated)) if score is not None]
            means[job_id] = sum(graded) / len(graded) if graded else float("-inf")
    return max(means, key=means.__getitem__) if means else swept[0].job.id


def _stopped(work: Work, loser: SweptJob, reason: str) -> SweptJob:
    lock(work.session, loser.job)
    if not loser.is_running:  # it has ended meanwhile
        return loser
    events.append(work.session, loser.job.id, f"Stopped by its sweep: {reason}.")
    jobs.cancel(work, loser.job)
    return replace(loser, entry=loser.entry | {"stopped": reason})


def _end(session: Session, pipeline: Pipeline, name: str, swept: Sequence[SweptJob]) -> None:
    """End the stage with the model of the best job. A sweep fails if none of its jobs has a model."""
    done = [one for one in swept if one.job.status == "succeeded" and one.job.fine_tuned_model]
    if not done:
        errors = [one.job.error for one in swept if one.job.error]
        error = errors[0] if errors else {"code": "cancelled", "message": "The jobs were cancelled."}
        lifecycle.failed(
            pipeline, name, error["code"], f"No job of the sweep has succeeded: {error['message']}"
        )
        return
    steps = delivered_steps(session, [one.job for one in done])
    scores_JN = [_scores(session, one.job.id, steps[one.job.id]) for one in done]
    ranks_J = sweeps.ranked(scores_JN, len(swept))
    best = sweeps.best_of(ranks_J)
    found = {
        one.job.id: {"reward": rank.reward, "difference": rank.difference, "low": rank.low}
        for one, rank in zip(done, ranks_J, strict=True)
    }
    lifecycle.succeeded(
        pipeline,
        name,
        model=done[best].job.fine_tuned_model,
        job_id=done[best].job.id,
        jobs=[one.entry | found.get(one.job.id, {}) for one in swept],
        conclusion=sweeps.conclusion([one.entry["settings"] for one in done], ranks_J),
    )


def stage_jobs(settings_J: Sequence[Mapping[str, Any]], jobs_J: Sequence[Job]) -> list[Entry]:
    """The entries of a sweep that starts."""
    return [{"settings": dict(one), "job_id": job.id} for one, job in zip(settings_J, jobs_J, strict=True)]
