"""The jobs of a sweep: reads their validations, stops the losers, ends the stage. core/pipelines/sweeps.py decides."""

import math
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


def follow(work: Work, pipeline: Pipeline, stage: Stage, *, stop_losers: bool) -> None:
    """Look at a sweep: stop what has lost; end the stage once all of its jobs have ended.

    `budget_gpu_seconds` of the stage are those of all jobs together, after which only the best one continues.
    """
    swept, budget = _read(work.session, stage), stage.get("budget_gpu_seconds")
    validations = Validations(work.session, swept)
    changes: Stage = {}
    if stop_losers and validations.last != stage.get("validated"):
        swept = _without_losers(work, swept, validations)
        changes["validated"] = validations.last
    if budget is not None:
        swept = _within(work, swept, validations, budget)
    changes |= {"jobs": [one.entry for one in swept], "note": _note(swept)}
    lifecycle.update_stage(pipeline, stage["name"], **changes)
    if not any(one.is_running for one in swept):
        _end(work.session, pipeline, stage["name"], swept, validations)


def _note(swept: Sequence[SweptJob]) -> str | None:
    paused = [one.job.id for one in swept if one.job.status == "paused"]
    return f"The job {paused[0]} is paused: resume it or cancel it." if paused else None


def _read(session: Session, stage: Stage) -> list[SweptJob]:
    ids = [entry["job_id"] for entry in stage["jobs"]]
    found = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)))}
    return [SweptJob(entry, found[entry["job_id"]]) for entry in stage["jobs"]]


class Validations:
    """The validations of the jobs of a sweep after step 0. Scores are read when they are needed, each once."""

    def __init__(self, session: Session, swept: Sequence[SweptJob]) -> None:
        self._session = session
        self._scores: dict[tuple[str, int], Scores] = {}
        self.steps: dict[str, list[int]] = {one.job.id: [] for one in swept}
        listed = select(StepMetric.job_id, StepMetric.step).where(
            StepMetric.job_id.in_(self.steps), StepMetric.step > 0, StepMetric.valid_scores.is_not(None)
        )
        for job_id, step in session.execute(listed):
            self.steps[job_id].append(step)

    @property
    def last(self) -> dict[str, int]:
        """The step of the last validation of each job that has one."""
        return {job_id: max(steps) for job_id, steps in self.steps.items() if steps}

    def scores(self, job_id: str, step: int) -> Scores:
        key = job_id, step
        if key not in self._scores:
            self._scores[key] = events.valid_scores(self._session, job_id, step) or []
        return self._scores[key]

    def mean(self, job_id: str) -> float | None:
        """The mean reward at the last validation; None: there is none, or no row is graded."""
        if job_id not in self.last:
            return None
        graded = [score for score in self.scores(job_id, self.last[job_id]) if score is not None]
        return sum(graded) / len(graded) if graded else None


def _may_win(swept: SweptJob) -> bool:
    return swept.is_running or swept.job.status == "succeeded"


def _without_losers(work: Work, swept: Sequence[SweptJob], validations: Validations) -> list[SweptJob]:
    candidates = {
        one.job.id: Candidate(
            one.entry["settings"], validations.steps[one.job.id], partial(validations.scores, one.job.id)
        )
        for one in swept
        if _may_win(one)
    }
    kept = []
    for one in swept:
        reason = None
        if one.is_running:
            mine = candidates.pop(one.job.id)
            reason = sweeps.beaten(mine, [*candidates.values()], len(swept))
            if reason is None:  # a job that was stopped is no reason to stop another
                candidates[one.job.id] = mine
        kept.append(one if reason is None else _stopped(work, one, reason))
    return kept


def _within(work: Work, swept: Sequence[SweptJob], validations: Validations, budget: float) -> list[SweptJob]:
    """Stop all but the best job if their budget is used up."""
    used = sum(one.job.gpu_seconds for one in swept)
    if used < budget or not any(one.is_running for one in swept):
        return list(swept)
    best = _leader(swept, validations)
    known = "has the highest mean reward" if validations.mean(best.job.id) is not None else "is the first one"
    reason = (
        f"the jobs of the sweep have used {used:.0f} of {budget:.0f} GPU-seconds, and "
        f"{sweeps.in_words(best.entry['settings'])} {known}"
    )
    return [_stopped(work, one, reason) if one.is_running and one is not best else one for one in swept]


def _leader(swept: Sequence[SweptJob], validations: Validations) -> SweptJob:
    """The job with the highest mean reward at its last validation, of those that may still win; without one the first.

    A paused job leads only if no other is left.
    """
    left = [one for one in swept if _may_win(one)]
    left = [one for one in left if one.job.status != "paused"] or left

    def mean(candidate: SweptJob) -> float:
        found = validations.mean(candidate.job.id)
        return -math.inf if found is None else found

    return max(left, key=mean)


def _stopped(work: Work, loser: SweptJob, reason: str) -> SweptJob:
    lock(work.session, loser.job)
    if not loser.is_running:  # it has ended meanwhile
        return loser
    events.append(work.session, loser.job.id, f"Stopped by its sweep: {reason}.")
    jobs.cancel(work, loser.job)
    return replace(loser, entry=loser.entry | {"stopped": reason})


def _end(
    session: Session, pipeline: Pipeline, name: str, swept: Sequence[SweptJob], validations: Validations
) -> None:
    """End the stage with the model of the best job. Without any model it has failed, or was cancelled with its jobs."""
    done = [one for one in swept if one.job.status == "succeeded" and one.job.fine_tuned_model]
    steps = delivered_steps(session, [one.job for one in done])
    done = [one for one in done if one.job.id in steps]  # the model of another one was deleted
    if not done:
        _fail(pipeline, name, swept)
        return
    scores = {one.job.id: validations.scores(one.job.id, steps[one.job.id]) for one in done}
    compared = [one for one in done if scores[one.job.id]] or done
    ranks_J = sweeps.ranked(
        [scores[one.job.id] for one in compared],
        [len(validations.steps[one.job.id]) for one in compared],
        len(swept),
    )
    best = compared[sweeps.best_of(ranks_J)].job
    found = {
        one.job.id: {"reward": rank.reward, "difference": rank.difference, "low": rank.low}
        for one, rank in zip(compared, ranks_J, strict=True)
    }
    lifecycle.succeeded(
        pipeline,
        name,
        model=best.fine_tuned_model,
        job_id=best.id,
        jobs=[one.entry | found.get(one.job.id, {}) for one in swept],
        conclusion=sweeps.conclusion([one.entry["settings"] for one in compared], ranks_J),
    )


def _fail(pipeline: Pipeline, name: str, swept: Sequence[SweptJob]) -> None:
    errors = [one.job.error for one in swept if one.job.error]
    if errors:
        code, message = errors[0]["code"], f"No job of the sweep has succeeded: {errors[0]['message']}"
        lifecycle.failed(pipeline, name, code, message)
    elif any(one.job.status == "succeeded" for one in swept):
        lifecycle.failed(pipeline, name, "model_not_found", "The models of the sweep's jobs were deleted.")
    else:
        lifecycle.failed(pipeline, name, "cancelled", "The jobs were cancelled.", status="cancelled")


def stage_jobs(settings_J: Sequence[Mapping[str, Any]], jobs_J: Sequence[Job]) -> list[Entry]:
    """The entries of a sweep that starts."""
    return [{"settings": dict(one), "job_id": job.id} for one, job in zip(settings_J, jobs_J, strict=True)]
