"""A job's validations as OpenAI's evals: an eval per job, a run per validation, an output item per sample.

Only the summary of each run is stored; the ids encode the location of the rest.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.pages import Page
from core.database.tables import Checkpoint, Job, RolloutPage, TunedModel
from core.errors import EvalNotFound, InvalidRequest, JobNotFound
from core.jobs.lifecycle import get as get_job
from core.results.rollouts import Row, SamplePosition

_JOB, _EVAL, _RUN, _ITEM = "ftjob-", "eval_", "evalrun_", "outputitem_"
_RUN_ID = re.compile(r"evalrun_(.+)_(\d{1,9})")
_ITEM_ID = re.compile(r"outputitem_(.+)_(\d{1,9})_(\d{1,9})_(\d{1,9})")
_METHOD = "reinforcement"
# The default pass threshold.
HALF = 0.5


def eval_id(job_id: str) -> str:
    return _EVAL + job_id.removeprefix(_JOB)


def run_id(job_id: str, step: int) -> str:
    return f"{_RUN}{job_id.removeprefix(_JOB)}_{step}"


def item_id(job_id: str, place: SamplePosition) -> str:
    return f"{_ITEM}{job_id.removeprefix(_JOB)}_{place.step}_{place.group}_{place.member}"


def position_of(item_id: str, job_id: str, step: int) -> SamplePosition | None:
    """The place encoded in an output item's id; None if it is not one of this run."""
    match = _ITEM_ID.fullmatch(item_id)
    if match is None or match[1] != job_id.removeprefix(_JOB) or int(match[2]) != step:
        return None
    return SamplePosition(step, "valid", int(match[3]), int(match[4]))


def has_eval(job: Job) -> bool:
    """Whether the validations of the job are an eval: those that a grader scores, and not a teacher."""
    return job.method == _METHOD


def job_of(session: Session, project_id: str, eval_id: str) -> Job:
    """The job whose eval this is.

    Raises:
        EvalNotFound: the project has no eval with this id.
    """
    if eval_id.startswith(_EVAL):
        try:
            job = get_job(session, project_id, _JOB + eval_id.removeprefix(_EVAL))
            if has_eval(job):
                return job
        except JobNotFound:
            pass
    raise EvalNotFound("eval", eval_id)


def page(
    session: Session, project_id: str, *, after: str | None, limit: int, newest_first: bool
) -> Page[Job]:
    """The jobs of a page of evals.

    Raises:
        InvalidRequest: `after` is not an eval of the project.
    """
    statement = select(Job).where(Job.project_id == project_id, Job.method == _METHOD)
    ordered = pages.newest_first if newest_first else pages.oldest_first
    if after is not None:
        try:
            after = job_of(session, project_id, after).id
        except EvalNotFound:
            raise _no_cursor(after) from None
    return ordered(session, statement, Job, after=after, limit=limit)


def run_of(session: Session, job: Job, run_id: str) -> RolloutPage:
    """The validation of a run's id.

    Raises:
        EvalNotFound: the job has no such validation, or its samples were deleted.
    """
    match = _RUN_ID.fullmatch(run_id)
    if match is not None and match[1] == job.id.removeprefix(_JOB):
        run = session.get(RolloutPage, (job.id, int(match[2]), "valid"))
        if run is not None:
            return run
    raise EvalNotFound("run", run_id)


def eval_of(session: Session, project_id: str, run_id: str) -> str | None:
    """The id of the eval whose validation this run is; None: no job of the project has it."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        return None
    try:
        job = get_job(session, project_id, _JOB + match[1])
        run_of(session, job, run_id)
    except (JobNotFound, EvalNotFound):
        return None
    return eval_id(job.id)


def runs(
    session: Session, job: Job, *, after: str | None, limit: int, newest_first: bool
) -> Page[RolloutPage]:
    """The job's validations by step."""
    statement = select(RolloutPage).where(RolloutPage.job_id == job.id, RolloutPage.split == "valid")
    step = RolloutPage.step
    if after is not None:
        match = _RUN_ID.fullmatch(after)
        if match is None or match[1] != job.id.removeprefix(_JOB):
            raise _no_cursor(after)
        statement = statement.where(step < int(match[2]) if newest_first else step > int(match[2]))
    ordered = statement.order_by(step.desc() if newest_first else step)
    rows = session.scalars(ordered.limit(limit + 1)).all()
    return Page(rows[:limit], has_more=len(rows) > limit)


def models(session: Session, job: Job, steps: Iterable[int]) -> Mapping[int, str]:
    """Name of the validated checkpoint by step, if it has one. Step 0 is the base model."""
    named = (
        select(Checkpoint.step, TunedModel.name)
        .join(TunedModel, TunedModel.checkpoint_id == Checkpoint.id)
        .where(Checkpoint.job_id == job.id, Checkpoint.step.in_(list(steps)))
        # A checkpoint may also be the job's result. Names with a step sort last, so they win.
        .order_by(TunedModel.name.contains(":ckpt-step-"))
    )
    return {row.step: row.name for row in session.execute(named)}


@dataclass(frozen=True)
class Criterion:
    """One grader of a job, and the score from which an answer passes it."""

    name: str  # the name of the job's grader, or the key of a part of a multi grader
    type: str
    threshold: float
    spec: Mapping[str, Any]
    key: str | None = None  # for a part of a multi grader

    def score(self, row: Row) -> float | None:
        score: float | None = row["score"] if self.key is None else (row["sub_scores"] or {}).get(self.key)
        return score

    def passed(self, row: Row) -> bool:
        score = self.score(row)
        return score is not None and score >= self.threshold


def criteria(grader: Mapping[str, Any]) -> list[Criterion]:
    """The job's grader, followed by the parts of a multi grader."""
    whole = Criterion(grader.get("name", ""), grader.get("type", ""), pass_threshold(grader), grader)
    parts = grader.get("graders", {})
    return [
        whole,
        *(Criterion(key, sub["type"], pass_threshold(sub), sub, key) for key, sub in parts.items()),
    ]


def pass_threshold(grader: Mapping[str, Any]) -> float:
    """`pass_threshold`; default: the middle of a judge's range, or 0.5."""
    if grader.get("pass_threshold") is not None:
        return float(grader["pass_threshold"])
    if grader.get("range"):
        return float(sum(grader["range"])) / 2
    return HALF


def status(row: Row, criterion: Criterion) -> Literal["pass", "fail", "error"]:
    """pass, fail, or error if the sample could not be graded."""
    if row["score"] is None:
        return "error"
    return "pass" if criterion.passed(row) else "fail"


def summary(rows: Iterable[Row], criteria: Sequence[Criterion]) -> dict[str, Any]:
    """The counts of a run over all of its samples."""
    whole, counts = criteria[0], {"total": 0, "pass": 0, "fail": 0, "error": 0}
    results = {criterion.name: {"passed": 0, "failed": 0} for criterion in criteria}
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}
    for row in rows:
        counts["total"] += 1
        counts[status(row, whole)] += 1
        for criterion in criteria:
            if criterion.score(row) is not None:
                results[criterion.name]["passed" if criterion.passed(row) else "failed"] += 1
        for name in tokens:
            tokens[name] += row[name] or 0
    return {"counts": counts, "criteria": results, "tokens": tokens}


def _no_cursor(after: str) -> InvalidRequest:
    return InvalidRequest(f"No item with id '{after}' in this list.", param="after")
