"""How long a job will take, as a range: from its own steps once it runs, before that from earlier jobs of its model.

A range is {"low", "expected", "high"}, in seconds. What stops a run early (a budget, `stop_...`) is left out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.methods import Hyperparameters, Resolved, resolve
from core.models import Job, StepMetric

Range = dict[str, float]

RECENT_STEPS = 10
# Of earlier jobs: speed changes with versions and settings, so what is long ago says little.
HISTORY_JOBS, HISTORY_STEPS = 10, 200
NO_HISTORY = "no job of this model has run here yet"
# Seconds of a job for each second of its sampling: all else takes none, as long, or three times as long.
LEARNING = {"low": 1.0, "expected": 2.0, "high": 4.0}


@dataclass(frozen=True)
class Ahead:
    """The steps that a run has not done yet, by kind."""

    plain: int
    validated: int
    next_is_validated: bool

    @property
    def steps(self) -> int:
        return self.plain + self.validated


@dataclass(frozen=True)
class Pace:
    """Seconds of the last steps, apart for those with a validation: these take longer, and are not the same share of
    what is ahead as of what was just done."""

    base: float | None = None  # step 0: a validation and nothing else
    plain: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)

    def after(self, step: dict[str, Any]) -> "Pace":
        seconds = step["timing"]["step"]["full_iteration"]
        if step["step"] == 0:
            return replace(self, base=seconds)
        if "full_valid_mean_reward" in step:
            return replace(self, validated=[*self.validated, seconds][-RECENT_STEPS:])
        return replace(self, plain=[*self.plain, seconds][-RECENT_STEPS:])

    def remaining(self, ahead: Ahead) -> Range | None:
        """Seconds of all steps ahead; None before the first step that learned.

        Low and high are what it would take if all of them were as the fastest or the slowest tenth of the last ones,
        and at least half / sqrt(steps seen) to either side: few steps say little, however alike they are.
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

    def next_step(self, ahead: Ahead) -> float:
        """Seconds that the next step should take; 0 where nothing tells."""
        plain, validated = self._kinds()
        likes = validated if ahead.next_is_validated else plain
        return statistics.fmean(likes) if likes else 0.0

    def _kinds(self) -> tuple[list[float], list[float]]:
        """A kind that was not seen yet is what the other one tells of it."""
        validation = self.base or 0.0
        plain = self.plain or [max(0.0, seconds - validation) for seconds in self.validated]
        return plain, self.validated or [seconds + validation for seconds in self.plain]


@dataclass(frozen=True)
class History:
    """Steps of earlier jobs of one model on one kind of machine."""

    jobs: int
    tokens_per_second: list[float]  # sampled, over all that a step does but its validation
    answer_tokens: list[float]  # the mean length of a step's answers
    gpus: int = 1  # of the newest step: it is the same machine now

    def seconds(self, settings: Resolved, *, train_rows: int, valid_rows: int) -> Range:
        """Of the whole job, the validation of the base model included.

        Expected is the median answer at the median speed, low a short one (the tenth percentile) at high speed (the
        ninetieth). High is every answer as long as it may be, at low speed (the tenth): another task may need all of
        the room that it was given, whatever those before it needed.
        """
        answers = train_rows * settings.n_epochs * settings.group_size
        validations = 1 + math.ceil(settings.total_steps / settings.eval_interval)
        answers += validations * valid_rows * settings.eval_samples
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


def history(session: Session, *, model: str, gpu_class: str) -> History | None:
    """The newest steps of the newest jobs of this model on this kind of machine, whosever; None if there is none."""
    began = (Job.model == model) & (Job.gpu_class == gpu_class) & Job.started_at.is_not(None)
    newest = select(Job.id).where(began).order_by(Job.seq.desc()).limit(HISTORY_JOBS)
    ids = session.scalars(newest).all()
    steps = session.execute(
        select(StepMetric.job_id, StepMetric.data)
        .where(StepMetric.job_id.in_(ids), StepMetric.step > 0)
        .order_by(StepMetric.created_at.desc())
        .limit(HISTORY_STEPS)
    ).all()
    speeds, lengths, told = [], [], set()
    for job_id, data in steps:
        timing = data["timing"]["step"]
        seconds = timing["full_iteration"] - timing["eval"]
        tokens = data.get("sampled_tokens", 0)
        if tokens > 0 and seconds > 0:
            speeds.append(tokens / seconds)
            lengths.append(data["completion_tokens_mean"])
            told.add(job_id)
    return History(len(told), speeds, lengths, gpus(steps[0].data)) if told else None


def gpus(data: dict[str, Any]) -> int:
    """How many GPUs a step had, or an estimate is for; only several are said. On a CPU the machine counts as one."""
    number: int = data.get("gpus", 1)
    return number


def sizes(asked: Hyperparameters, *, rows: int, context: int) -> Resolved:
    """What "auto" becomes in a job of so many training rows, but for the learning rate: that depends on the model."""
    return resolve(asked, rows=rows, parameters=1, context=context)


def before_start(past: History, settings: Resolved, *, train_rows: int, valid_rows: int) -> dict[str, Any]:
    """The estimate of a job that has not begun, as Job.usage keeps it."""
    seconds = past.seconds(settings, train_rows=train_rows, valid_rows=valid_rows)
    jobs = "1 earlier job" if past.jobs == 1 else f"{past.jobs} earlier jobs"
    told = f"{len(past.tokens_per_second)} steps of {jobs}"
    return {"remaining_seconds": seconds, "based_on": told, "gpus": past.gpus}


def after_preview(
    past: History | None,
    settings: Resolved,
    *,
    lengths: Sequence[float],
    tokens_per_second: float,
    train_rows: int,
    valid_rows: int,
) -> dict[str, Any]:
    """The estimate of a job of which a preview has sampled answers, of these many tokens at that speed.

    The lengths are the preview's own. So is the speed where no job of this model has run; what learning takes beside
    sampling is then a guess, as LEARNING has it.
    """
    if past is not None:
        known = before_start(
            replace(past, answer_tokens=list(lengths)), settings, train_rows=train_rows, valid_rows=valid_rows
        )
        return known | {"based_on": f"the preview's answers and {known['based_on']}"}
    measured = History(0, [tokens_per_second], list(lengths))
    sampling = measured.seconds(settings, train_rows=train_rows, valid_rows=valid_rows)
    seconds = {name: LEARNING[name] * value for name, value in sampling.items()}
    return {
        "remaining_seconds": seconds,
        "based_on": f"the preview's answers and their speed, as {NO_HISTORY}",
    }


def less(estimate: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is left of an estimate after so many seconds."""
    remaining = {name: max(0.0, value - seconds) for name, value in estimate["remaining_seconds"].items()}
    return estimate | {"remaining_seconds": remaining}


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours: the median of 1, 2 is 1.5, and of one value everything is that value."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (ordered[math.ceil(place)] - below) * (place - math.floor(place))
