"""Estimates of a job's duration as a range: from its own steps once it runs, before that from earlier jobs.

A range is {"low", "expected", "high"}, in seconds. Early stops (a budget, `stop_...`) are not modeled.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from core.database.tables import Job, StepMetric
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.jobs.remaining import RemainingSteps
from core.step_metrics import StepMetrics

Range = dict[str, float]

RECENT_STEPS = 10
# Limits of the history: speed changes with versions and settings, so only recent jobs count.
HISTORY_JOBS, HISTORY_STEPS = 10, 200
NO_HISTORY = "no job of this model has run here yet"
# Seconds of a job per second of sampling: nothing else takes time, the same time, or twice that.
LEARNING = {"low": 1.0, "expected": 2.0, "high": 4.0}


@dataclass(frozen=True)
class Pace:
    """Seconds of recent steps, separately for those with a validation: these take longer, and their share of the
    remaining steps differs from that of the recent ones."""

    base: float | None = None  # step 0: only a validation
    plain: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)

    def after(self, step: StepMetrics) -> "Pace":
        if step.step == 0:
            return replace(self, base=step.seconds)
        if step.is_validated:
            return replace(self, validated=[*self.validated, step.seconds][-RECENT_STEPS:])
        return replace(self, plain=[*self.plain, step.seconds][-RECENT_STEPS:])

    def remaining(self, ahead: RemainingSteps) -> Range | None:
        """Seconds of all remaining steps; None before the first training step.

        Low and high assume that all of them take as long as the fastest or the slowest tenth of the recent steps, with
        a margin of at least half / sqrt(recorded steps): a few similar steps prove little.
        """
        plain, validated = self._kinds()
        seen = len(self.plain) + len(self.validated)
        if not seen:
            return None
        kinds = [(ahead.plain, plain), (ahead.validated, validated)]
        expected = sum(count * statistics.fmean(seconds) for count, seconds in kinds)
        low = sum(count * quantile(seconds, 0.1) for count, seconds in kinds)
        high = sum(count * quantile(seconds, 0.9) for count, seconds in kinds)
        margin = 0.5 / math.sqrt(seen)
        return {
            "low": min(low, expected * (1 - margin)),
            "expected": expected,
            "high": max(high, expected * (1 + margin)),
        }

    def next_step(self, ahead: RemainingSteps) -> float:
        """Expected seconds of the next step; 0 if unknown."""
        plain, validated = self._kinds()
        likes = validated if ahead.next_is_validated else plain
        return statistics.fmean(likes) if likes else 0.0

    def _kinds(self) -> tuple[list[float], list[float]]:
        """Mean seconds by kind; a kind that was not recorded yet is derived from the other one."""
        validation = self.base or 0.0
        plain = self.plain or [max(0.0, seconds - validation) for seconds in self.validated]
        return plain, self.validated or [seconds + validation for seconds in self.plain]


@dataclass(frozen=True)
class PastJobs:
    """Recorded steps of earlier jobs of one model on one GPU class."""

    jobs: int
    tokens_per_second: list[float]  # sampled, over the whole step except its validation
    answer_tokens: list[float]  # mean answer length of a step
    gpus: float = 1  # GPU-seconds in a second of the newest step

    def seconds(self, settings: Resolved, *, train_rows: int, valid_rows: int) -> Range:
        """Duration of the whole job, including the validation of the base model.

        Expected is the median answer at the median speed, low a short one (tenth percentile) at high speed (ninetieth).
        High is the maximum answer length at low speed (tenth): another task may use all of its tokens, regardless of
        earlier
        jobs.
        """
        answers = train_rows * settings.n_epochs * settings.group_size
        answers += (1 + settings.validations) * valid_rows * settings.eval_samples
        room = settings.max_completion_tokens
        return {
            "low": answers * min(room, self._length(0.1)) / self._speed(0.9),
            "expected": answers * min(room, self._length(0.5)) / self._speed(0.5),
            "high": answers * room / self._speed(0.1),
        }

    def _length(self, share: float) -> float:
        return quantile(self.answer_tokens, share)

    def _speed(self, share: float) -> float:
        return quantile(self.tokens_per_second, share)


def history(
    session: Session, *, model: str, gpu_class: str, where: ColumnElement[bool] | None = None
) -> PastJobs | None:
    """Steps of the newest jobs of this model on this GPU class, in any project; None without any.

    Args:
        where: only such jobs count, as those with as many GPUs.
    """
    began = (Job.model == model) & (Job.gpu_class == gpu_class) & Job.started_at.is_not(None)
    began &= Job.method == "reinforcement"  # the others sample no answers
    if where is not None:
        began &= where
    newest = select(Job.id).where(began).order_by(Job.seq.desc()).limit(HISTORY_JOBS)
    ids = session.scalars(newest).all()
    steps = session.execute(
        select(StepMetric.job_id, StepMetric.data)
        .where(StepMetric.job_id.in_(ids), StepMetric.step > 0)
        .order_by(StepMetric.created_at.desc())
        .limit(HISTORY_STEPS)
    ).all()
    speeds, lengths, jobs = [], [], set()
    for job_id, data in steps:
        step = StepMetrics.load(data)
        seconds = step.seconds - step.timing.step.eval
        if step.sampled_tokens and step.completion_tokens_mean is not None and seconds > 0:
            speeds.append(step.sampled_tokens / seconds)
            lengths.append(step.completion_tokens_mean)
            jobs.add(job_id)
    return PastJobs(len(jobs), speeds, lengths, StepMetrics.load(steps[0].data).gpus_used) if jobs else None


def sizes(requested: Hyperparameters, *, rows: int, context: int, reasons: bool = False) -> Resolved:
    """Resolve every "auto" for this number of training rows, except the learning rate, which depends on the model.

    `reasons`: as `is_reasoning` of core/model_templates.py found.
    """
    return resolve(requested, rows=rows, parameters=1, context=context, reasons=reasons)


def before_start(past: PastJobs, settings: Resolved, *, train_rows: int, valid_rows: int) -> dict[str, Any]:
    """The estimate of a job before it starts, as Job.usage stores it."""
    seconds = past.seconds(settings, train_rows=train_rows, valid_rows=valid_rows)
    jobs = "1 earlier job" if past.jobs == 1 else f"{past.jobs} earlier jobs"
    based_on = f"{len(past.tokens_per_second)} steps of {jobs}"
    return {
        "remaining_seconds": seconds,
        "based_on": based_on,
        "upper_end": upper_end(settings),
        "gpus": past.gpus,
    }


def upper_end(settings: Resolved) -> str:
    """Say what makes the upper end of an estimate before the job's own steps, and which setting lowers it."""
    return (
        f"the upper end assumes that every answer uses all {settings.max_completion_tokens} tokens that it may: "
        "lower hyperparameters.advanced.sampling.max_completion_tokens to lower it"
    )


def after_preview(
    past: PastJobs | None,
    settings: Resolved,
    *,
    lengths: Sequence[float],
    tokens_per_second: float,
    train_rows: int,
    valid_rows: int,
    gpus: float = 1,
) -> dict[str, Any]:
    """The estimate of a job from a preview, with its answer lengths in tokens and its speed.

    The lengths are those of the preview. So is the speed if no job of this model has run; the share of learning is then
    the guess in LEARNING, and `gpus` those of the job.
    """
    if past is not None:
        known = before_start(
            replace(past, answer_tokens=list(lengths)), settings, train_rows=train_rows, valid_rows=valid_rows
        )
        return known | {"based_on": f"the preview's answers and {known['based_on']}"}
    measured = PastJobs(0, [tokens_per_second], list(lengths), gpus)
    sampling = measured.seconds(settings, train_rows=train_rows, valid_rows=valid_rows)
    seconds = {name: LEARNING[name] * value for name, value in sampling.items()}
    return {
        "remaining_seconds": seconds,
        "upper_end": upper_end(settings),
        "based_on": f"the preview's answers and their speed, as {NO_HISTORY}",
        "gpus": measured.gpus,
    }


def less(estimate: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The estimate reduced by elapsed seconds."""
    remaining = {name: max(0.0, value - seconds) for name, value in estimate["remaining_seconds"].items()}
    return estimate | {"remaining_seconds": remaining}


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation: the median of 1, 2 is 1.5; a single value is every quantile."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (ordered[math.ceil(place)] - below) * (place - math.floor(place))
