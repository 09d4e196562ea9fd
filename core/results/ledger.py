"""The ledger of a job: its tokens and GPU-seconds by what they taught.

Every number is an integer (tokens, microseconds of a GPU), so that buckets, steps and the whole job have exactly equal
sums. It is made from the recorded metrics of the steps, of which a repeated step replaces the earlier one, and so
agrees with `usage_metrics`: its GPU-seconds, and its sampled tokens, the unused ones included.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from core.database.tables import Job
from core.jobs import events, usage
from core.jobs.budgets import Price
from core.step_metrics import StepMetrics

MICROSECONDS = 1_000_000
PERMILLE = 1000

# In the order of reports. The first ones have a metric of the step, such as `learned_tokens`.
BY_ANSWER = {
    "learned": "Learned",
    "masked": "Masked by importance",
    "not_updated": "Update changed nothing",
    "no_advantage": "No advantage in a mixed group",
    "zero_variance": "Zero-variance groups",
    "resampled": "Zero-variance groups, resampled",
    "truncated": "Truncated and masked",
    "ungraded": "Ungraded",
    "discarded_episodes": "Discarded episodes",
    "forced": "Forced end of a thought",
}
COMPUTED = ("learned", "masked", "not_updated")  # those that an update computes
TITLES = BY_ANSWER | {
    "unused": "Sampled for no step",
    "grader_wait": "Waiting for the grader",
    "weight_sync": "Weight sync",
    "validation": "Validation",
    "idle": "Idle GPUs",
}

Amounts = Mapping[str, int]
"""By bucket; a missing one is 0."""


@dataclass(frozen=True)
class StepLedger:
    """The ledger of one step."""

    step: int
    tokens: Amounts
    gpu_time: Amounts  # microseconds of a GPU


@dataclass(frozen=True)
class Ledger:
    """The ledger of a job."""

    steps: Sequence[StepLedger]
    unused: int = 0  # tokens that no step has learned from
    waiting: float = 0.0  # seconds of waiting for other jobs on the same device, in no bucket

    @property
    def tokens(self) -> Amounts:
        return summed([*(step.tokens for step in self.steps), {"unused": self.unused}])

    @property
    def gpu_time(self) -> Amounts:
        return summed(step.gpu_time for step in self.steps)


def of_job(session: Session, job: Job) -> Ledger:
    """The ledger of the recorded steps."""
    steps = [StepMetrics.load(data, step=step) for step, data in events.step_data(session, job.id)]
    return Ledger(
        [of_step(step) for step in steps],
        (job.usage or {}).get(usage.UNUSED, 0),
        sum(step.timing.step.waiting for step in steps),
    )


def of_step(step: StepMetrics) -> StepLedger:
    tokens = {bucket: count for bucket in BY_ANSWER if (count := getattr(step, f"{bucket}_tokens"))}
    return StepLedger(step.step, tokens, _gpu_time(step, tokens))


def _gpu_time(step: StepMetrics, tokens: Amounts) -> dict[str, int]:
    """The GPU-time of a step. Waiting for other jobs on the same device does not count, as in `gpu_seconds`."""
    seconds, gpus = step.timing.step, step.gpu_count
    sync = min(_microseconds(step.weight_sync_seconds or 0.0), _microseconds(seconds.sampling))
    sampling, training = _microseconds(seconds.sampling) - sync, _microseconds(seconds.training)
    parts = [
        {
            "grader_wait": gpus * _microseconds(seconds.grading),
            "weight_sync": gpus * sync,
            "validation": gpus * _microseconds(seconds.eval),
        }
    ]
    if step.learning_gpus is None:
        parts += [_by_answer(gpus * sampling, tokens), _by_update(gpus * training, tokens)]
    else:
        parts += _split(step, sampling, training, tokens)
    return {bucket: time for bucket, time in summed(parts).items() if time}


def _split(step: StepMetrics, sampling: int, training: int, tokens: Amounts) -> list[dict[str, int]]:
    """The time of GPUs of which some sample and others learn. Those that have nothing to do are idle."""
    samplers, learners = step.sampling_gpus or 0, step.learning_gpus or 0
    busy = sampling
    if (
        step.ahead_seconds is not None
    ):  # they sample later steps during this one; about as long as they did for it
        busy = min(_microseconds(step.ahead_seconds), sampling + training)
    used = samplers * busy + learners * training
    return [
        _by_answer(samplers * busy, tokens),
        _by_update(learners * training, tokens),
        {"idle": step.gpu_count * (sampling + training) - used},
    ]


def _by_answer(time: int, tokens: Amounts) -> dict[str, int]:
    """Divide the time of sampling by tokens: answers are sampled together, so a single one has no separate time."""
    return divided(time, tokens) if tokens else {"idle": time}


def _by_update(time: int, tokens: Amounts) -> dict[str, int]:
    """The update computes the answers with a gradient. Without one, its time is divided like that of sampling."""
    learned = {bucket: tokens[bucket] for bucket in COMPUTED if bucket in tokens}
    return _by_answer(time, learned or tokens)


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def divided(total: int, weights: Amounts) -> dict[str, int]:
    """Divide an integer in proportion to the weights, by the method of largest remainders. The sum is exactly `total`.

    Args:
        weights: at least 0, and not all 0. Of equal remainders the first gets the unit.
    """
    whole = sum(weights.values())
    parts = {name: total * weight // whole for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: total * weights[name] % whole, reverse=True)
    for name in by_remainder[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def percents(amounts: Amounts) -> dict[str, float]:
    """The percentage of each bucket with one digit after the point. They add up to 100, or all are 0 of nothing."""
    if not sum(amounts.values()):
        return dict.fromkeys(amounts, 0.0)
    return {bucket: share / 10 for bucket, share in divided(PERMILLE, amounts).items()}


def summed(parts: Iterable[Amounts]) -> dict[str, int]:
    """Add amounts up, by bucket, in the order of TITLES."""
    kept = list(parts)
    return {bucket: sum(part.get(bucket, 0) for part in kept) for bucket in TITLES}


def seconds_of(time: int) -> float:
    return time / MICROSECONDS


def to_csv(ledger: Ledger, price: Price) -> str:
    """A row for each step and bucket with an amount, then one for the unused tokens, which belong to no step."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", "bucket", "tokens", "gpu_seconds", "cost", "currency"])
    rows = [(str(step.step), step) for step in ledger.steps]
    if ledger.unused:
        rows.append(("", StepLedger(0, {"unused": ledger.unused}, {})))
    for label, step in rows:
        for bucket in TITLES:
            tokens, time = step.tokens.get(bucket, 0), step.gpu_time.get(bucket, 0)
            if tokens or time:
                cost = price.amount(seconds_of(time)) or {"amount": "", "currency": ""}
                writer.writerow([label, bucket, tokens, seconds_of(time), cost["amount"], cost["currency"]])
    return file.getvalue()
