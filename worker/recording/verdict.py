"""Two validations of the same rows, compared pair by pair. Pure functions; `_N` is the axis of the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

from core.jobs.verdict import Outcome, Verdict
from core.rewards import equal
from core.statistics import differences, paired, student
from worker.types import Group, RowScores

RESAMPLES = 10_000
# With fewer rows even a unanimous result is likelier than 1 in 20 by chance: a sign test needs 2 * 0.5^n <= 0.05.
MIN_ROWS = 6
# A damaged model is worse from this drop on, as a share of the range of the compared scores: graders have any scale.
CLEARLY_LOWER = 0.05


def row_scores(groups_P: Sequence[Group]) -> list[float | None]:
    """The mean score of each row's graded answers."""
    return row_means([group.rewards_G for group in groups_P])


def row_means(scores_PG: Sequence[RowScores]) -> list[float | None]:
    """The mean of each row's scores that are there."""
    graded_PG = [[score for score in scores_G if score is not None] for scores_G in scores_PG]
    return [fmean(graded_G) if graded_G else None for graded_G in graded_PG]


def standard_error(scores: RowScores) -> float | None:
    """The standard error of the mean over rows; None for fewer than two graded rows.

    Rows are the unit, so several answers to one prompt count as one cluster (Miller 2024, arXiv 2411.00640).
    """
    graded = [score for score in scores if score is not None]
    return stdev(graded) / math.sqrt(len(graded)) if len(graded) > 1 else None


@dataclass(frozen=True)
class RewardComparison:
    """The paired differences of two validations, summarized."""

    base_reward: float
    tuned_reward: float
    difference: float
    low: float | None  # the 95 % interval of the mean difference; None: fewer than MIN_ROWS rows
    high: float | None
    wins: int
    losses: int
    ties: int
    ungraded: int
    spread: float  # the highest less the lowest score of both models

    @property
    def outcome(self) -> Outcome:
        if self.low is not None and self.low > 0:
            return "improved"
        if self.high is not None and self.high < 0:
            return "worse"
        return "too_few" if self.low is None else "no_difference"

    def verdict(
        self, step: int, damage: str | None = None, *, start: str | None = None, held_out: bool = True
    ) -> Verdict:
        """As the verdict on a job that delivers the checkpoint of this step, and started from the tuned model `start`.

        `held_out` is false if the job validates on its training file.

        With `damage` (worker/recording/monitors.py), a model that is clearly lower and loses as many rows as it wins,
        or more, is `worse` without an interval below 0: a few rows cannot show one, and chance does not explain the
        damage.
        """
        bound = -CLEARLY_LOWER * self.spread
        lower = (self.difference < bound or equal(self.difference, bound)) and self.losses >= self.wins
        is_open = self.outcome in ("no_difference", "too_few")
        ground = damage if is_open and self.difference < 0 and lower else None
        return Verdict(
            outcome="worse" if ground is not None else self.outcome,
            base_reward=self.base_reward,
            tuned_reward=self.tuned_reward,
            difference=self.difference,
            ci_low=self.low,
            ci_high=self.high,
            wins=self.wins,
            losses=self.losses,
            ties=self.ties,
            rows=self.wins + self.losses + self.ties,
            ungraded=self.ungraded,
            step=step,
            ground=ground,
            start=start,
            held_out=held_out,
        )


def compare(base_N: RowScores, tuned_N: RowScores) -> RewardComparison | None:
    """Compare two validations of the same rows; None if no row was graded in both.

    The same input gives the same result: the bootstrap has a fixed seed.

    Raises:
        ValueError: they are not of the same number of rows.
    """
    pairs = paired(zip(base_N, tuned_N, strict=True))
    if not pairs:
        return None
    base, tuned = (fmean(scores) for scores in zip(*pairs, strict=True))
    values = differences(pairs)
    interval = bootstrap_interval(values) if len(pairs) >= MIN_ROWS else None
    wins, losses = sum(one > 0 for one in values), sum(one < 0 for one in values)
    return RewardComparison(
        base_reward=base,
        tuned_reward=tuned,
        difference=fmean(values),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        wins=wins,
        losses=losses,
        ties=len(pairs) - wins - losses,
        ungraded=len(base_N) - len(pairs),
        spread=max(map(max, pairs)) - min(map(min, pairs)),
    )


def bootstrap_interval(values: Sequence[float], *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of the mean: a percentile bootstrap over the values, expanded for small samples.

    The plain percentile interval is too narrow for small samples, by sqrt((n-1)/n) and by z in place of t. The expanded
    one takes percentiles further out, of the same resamples (Hesterberg 2015, arXiv 1411.5279).
    """
    size = len(values)
    tail = NormalDist().cdf(-math.sqrt(size / (size - 1)) * student(size - 1))
    generator = np.random.default_rng(0)
    array_N = np.asarray(values)
    at_once = max(1, 1_000_000 // size)  # indices in memory: 8 MB
    means = [
        array_N[generator.integers(0, size, (min(at_once, resamples - done), size))].mean(axis=1)
        for done in range(0, resamples, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
