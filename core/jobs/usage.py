"""Usage of a job, summed on its row as its steps are recorded, and daily usage of its project.

A job counts its current steps, so repeated steps count once. Its project counts every step that was run, and every
token of a judge when it was used, although its grade may never become part of a step. Both count the answers that no
step learned from, such as a batch that was sampled ahead when the job was paused: as sampled, and as unused.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import reduce
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database
from core.database.tables import Checkpoint, Job, ModelUsage, ProjectUsage, StepMetric
from core.jobs import estimates, events
from core.jobs.budgets import Price
from core.jobs.estimates import Pace, Range
from core.jobs.remaining import RemainingSteps
from core.retry import RetryPolicy
from core.step_metrics import StepMetrics

SECONDS_A_DAY = 86400

# Keys in Job.usage that are not usage.
_BESIDE = frozenset({"pace", "estimate", "next_step_gpu_seconds", "pending", "counted_pending"})
UNUSED = "unused_tokens"


def render(job: Job, price: Price) -> dict[str, Any] | None:
    """The sums in the shape of `usage_metrics`, with their cost if there is a price; None: none yet.

    The first are those of the first recorded step, or of an attempt that ended before it with sampled tokens.
    """
    sums = _sums(job)
    cost = price.amount(job.gpu_seconds) if sums else None
    return sums | {"cost": cost} if sums and cost else sums


def render_estimate(job: Job, price: Price) -> dict[str, Any] | None:
    """The remaining duration and the total usage as ranges; None if unknown."""
    estimate = (job.usage or {}).get("estimate")
    return None if estimate is None else with_cost(estimate, job.gpu_seconds, price)


def with_cost(estimate: dict[str, Any], used: float, price: Price) -> dict[str, Any]:
    """Add the cost to an estimate of the remaining GPU-seconds; `used` are those so far."""
    remaining: Range = estimate["remaining_seconds"]
    in_all = {name: used + estimate["gpus"] * seconds for name, seconds in remaining.items()}
    shown = {name: value for name, value in estimate.items() if name != "gpus"}
    return shown | {"total_gpu_seconds": in_all, "cost": price.range(in_all)}


def record(
    session: Session,
    job: Job,
    step: StepMetrics,
    ahead: RemainingSteps,
    *,
    grader_tokens: int,
    pending_tokens: int = 0,
) -> None:
    """Count a recorded step and update the estimate for the steps `ahead`. Call it inside `fenced`.

    Args:
        grader_tokens: used since the step before, also for later steps and for grades that were lost.
        pending_tokens: sampled by this attempt for later steps. If it ends without `book_unused`, they are unused.
    """
    used = with_step(job.usage or {}, step)
    used["pending"] = {"epoch": job.epoch, "tokens": pending_tokens}
    pace = Pace(**used["pace"])
    remaining = pace.remaining(ahead)
    if remaining is not None:
        about = {"based_on": "this job's steps", "gpus": step.gpus_used}
        used["estimate"] = {"remaining_seconds": remaining} | about
    elif "estimate" in used:
        used["estimate"] = estimates.less(used["estimate"], step.seconds)
    used["next_step_gpu_seconds"] = step.gpus_used * pace.next_step(ahead)
    job.usage, job.gpu_seconds = used, used["gpu_seconds"]
    job.estimated_finish = None
    if "estimate" in used:
        job.estimated_finish = round(time.time() + used["estimate"]["remaining_seconds"]["expected"])
    add_usage(
        session,
        job.project_id,
        model=job.model,
        gpu_seconds=step.gpu_seconds,
        sampled_tokens=step.sampled_tokens or 0,
        trained_tokens=step.trained_tokens or 0,
        grader_tokens=grader_tokens,
    )


def recount(session: Session, job: Job) -> None:
    """Recompute the sums after steps were discarded."""
    kept = {
        name: job.usage[name] for name in {*_BESIDE, UNUSED} - {"pace"} if job.usage and name in job.usage
    }
    used = total(events.metrics(session, job.id))
    if UNUSED in kept:
        used = _zero_sums() | used
        used["sampled_tokens"] += kept[UNUSED]
    job.usage = (kept | used) or None
    job.gpu_seconds = used.get("gpu_seconds", 0.0)


def settle(session: Session, job: Job) -> None:
    """Store the final sums of a job that ended, without its estimate.

    Tokens that the last attempt had sampled for later steps are unused. If it was not killed, `book_unused` counts
    the rest.
    """
    pending = (job.usage or {}).get("pending") or {"tokens": 0}
    if pending["tokens"]:
        _add_unused(session, job, pending["tokens"])
    recount(session, job)
    job.usage = _sums(job)
    if pending["tokens"]:
        job.usage = (job.usage or {}) | {"counted_pending": pending}
    job.trained_tokens = (job.usage or {}).get("trained_tokens", 0)


def settle_pending(session: Session, job: Job) -> None:
    """Count as unused what an attempt that was killed had sampled for later steps. Call it before the next attempt."""
    pending = (job.usage or {}).get("pending")
    if pending is not None and pending["epoch"] != job.epoch:
        _add_unused(session, job, pending["tokens"])


def book_unused(database: Database, claim: Claim, tokens: int, *, retry: RetryPolicy | None) -> None:
    """Count what an attempt has sampled and no step will learn from, in a separate transaction; none for 0 tokens.

    Nothing either if the job is another worker's by now, which has counted it (`settle_pending`).

    Args:
        retry: during an outage; None: an outage is an error at once.
    """

    def book() -> None:
        with database.write() as session:
            job = session.scalars(select(Job).where(Job.id == claim.job_id).with_for_update()).one()
            if job.epoch == claim.epoch or (job.status, job.epoch) == ("cancelled", claim.epoch + 1):
                _add_unused(session, job, max(0, tokens - _counted(job, claim.epoch)))

    if tokens:
        book() if retry is None else retry(book)


def _add_unused(session: Session, job: Job, tokens: int) -> None:
    used = {name: value for name, value in (job.usage or {}).items() if name != "pending"}
    if tokens:
        used = _zero_sums() | used
        used |= {name: used.get(name, 0) + tokens for name in ("sampled_tokens", UNUSED)}
    job.usage = used or None
    add_usage(session, job.project_id, model=job.model, sampled_tokens=tokens, unused_tokens=tokens)


def _counted(job: Job, epoch: int) -> int:
    """The tokens of an attempt that `settle` has counted before the attempt was over."""
    counted = (job.usage or {}).get("counted_pending")
    return counted["tokens"] if counted is not None and counted["epoch"] == epoch else 0


def _zero_sums() -> dict[str, Any]:
    """The keys that `usage_metrics` always has."""
    return {
        "training_seconds": 0.0,
        "gpu_seconds": 0.0,
        "sampled_tokens": 0,
        "trained_tokens": 0,
        "model_grader_tokens": {},
    }


def total(steps: Iterable[StepMetrics]) -> dict[str, Any]:
    """The sums over some steps' metrics, in order; empty for none."""
    return reduce(with_step, steps, {})


def with_step(used: dict[str, Any], step: StepMetrics) -> dict[str, Any]:
    """`used` and one more step, as a new value."""
    return used | {
        "training_seconds": used.get("training_seconds", 0.0) + step.seconds,
        "gpu_seconds": used.get("gpu_seconds", 0.0) + step.gpu_seconds,
        "sampled_tokens": used.get("sampled_tokens", 0) + (step.sampled_tokens or 0),
        "trained_tokens": used.get("trained_tokens", 0) + (step.trained_tokens or 0),
        "model_grader_tokens": _with_judges(used.get("model_grader_tokens", {}), step),
        "pace": asdict(Pace(**used.get("pace", {})).after(step)),
    }


def captured_gpu_seconds(session: Session, job: Job) -> float:
    """GPU-seconds of the steps up to the newest checkpoint; later ones are lost on resume."""
    newest = select(func.max(Checkpoint.step)).where(Checkpoint.job_id == job.id).scalar_subquery()
    kept = (StepMetric.job_id == job.id) & (StepMetric.step <= func.coalesce(newest, 0))
    steps = session.scalars(select(StepMetric.data).where(kept))
    return sum(StepMetrics.load(data).gpu_seconds for data in steps)


def add_usage(
    session: Session,
    project_id: str,
    *,
    model: str | None,
    gpu_seconds: float = 0.0,
    sampled_tokens: int = 0,
    unused_tokens: int = 0,
    trained_tokens: int = 0,
    grader_tokens: int = 0,
) -> None:
    """Add to the project's usage of today, and to that of the model, if it is known."""
    day = int(time.time() // SECONDS_A_DAY)
    limited = {"gpu_seconds": gpu_seconds, "grader_tokens": grader_tokens}
    _add(session, ProjectUsage, {"project_id": project_id, "day": day}, limited)
    if model is not None:
        tokens = {"sampled_tokens": sampled_tokens, UNUSED: unused_tokens, "trained_tokens": trained_tokens}
        key = {"project_id": project_id, "day": day, "model": model}
        _add(session, ModelUsage, key, limited | tokens)


def book_grader_tokens(
    database: Database, project_id: str, model: str | None, *, tokens: int, retry: RetryPolicy | None
) -> None:
    """Add tokens that judges have used to the project's usage, in a separate transaction; none for 0 tokens.

    Args:
        model: of the graded answers; None: unknown.
        retry: during an outage; None: an outage is an error at once.
    """

    def add() -> None:
        with database.write() as session:
            add_usage(session, project_id, model=model, grader_tokens=tokens)

    if tokens:
        add() if retry is None else retry(add)


def _add(
    session: Session,
    table: type[ProjectUsage | ModelUsage],
    key: Mapping[str, Any],
    amounts: Mapping[str, float],
) -> None:
    # One atomic statement: two jobs of a project may both record the first step of the day.
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    today = insert(table).values({**key, **amounts})
    added = {name: getattr(table, name) + today.excluded[name] for name in amounts}
    session.execute(today.on_conflict_do_update(index_elements=list(key), set_=added))


def _sums(job: Job) -> dict[str, Any] | None:
    return {name: value for name, value in (job.usage or {}).items() if name not in _BESIDE} or None


def _with_judges(sums: dict[str, dict[str, int]], step: StepMetrics) -> dict[str, dict[str, int]]:
    """Add the tokens of judges by model; train_prompt_tokens and eval_prompt_tokens are one sum here."""
    models = {model: dict(counts) for model, counts in sums.items()}
    for model, counts in step.model_graders_token_usage.items():
        mine = models.setdefault(model, {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0})
        for name, count in counts.items():
            mine[name.split("_", 1)[1]] += count
    return models
