"""Statistics of rewards. scipy is imported on use: it takes 0.1 s, and the API imports this module at startup."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import TypedDict

from core.rewards import all_equal, equal


class ShareEstimate(TypedDict):
    """A share from 0 to 1 with its 95 % confidence interval."""

    low: float
    expected: float
    high: float


def student(freedom: int, tail: float = 0.025) -> float:
    """The quantile of Student's t with the probability `tail` above it. Default: half of a 95 % interval, in standard
    errors.
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - tail))


ALARM_LEVEL = 0.05  # the probability of a false alarm in a whole run, of one rule


def fewest_values(looks: int) -> int:
    """The fewest values of which `sequential_low` has a bound: log2(looks / ALARM_LEVEL).

    A sign test of fewer could not reject either.
    """
    return max(2, math.ceil(math.log2(max(1, looks) / ALARM_LEVEL)))


def sequential_low(values_N: Sequence[float], looks: int) -> float | None:
    """The lower bound of the mean that is too high with a probability of at most ALARM_LEVEL at any of `looks` looks.

    Student's t at the level ALARM_LEVEL / looks (Bonferroni), so it holds however the looks depend on each other. It
    supposes that means are about normally distributed.

    Returns:
        None: fewer than `fewest_values`.
    """
    number = len(values_N)
    if number < fewest_values(looks):
        return None
    mean, error = _mean_and_error(values_N)
    return mean - student(number - 1, ALARM_LEVEL / max(1, looks)) * error


def _mean_and_error(values_N: Sequence[float]) -> tuple[float, float]:
    """The mean of at least two values and its standard error."""
    number = len(values_N)
    mean = math.fsum(values_N) / number
    variance = math.fsum((value - mean) ** 2 for value in values_N) / (number - 1)
    return mean, math.sqrt(variance / number)


def paired(pairs: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """The pairs of which both values are there."""
    return [(first, second) for first, second in pairs if first is not None and second is not None]


def differences(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """The second value of each pair minus the first; exactly 0 if they differ by rounding only."""
    return [0.0 if equal(first, second) else second - first for first, second in pairs]


def paired_difference(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """The second values minus the first, with the 95 % interval of Student's t. Pairs with a None are counted only."""
    graded = paired(pairs)
    number, values = len(graded), differences(graded)
    mean = values[0] if number == 1 else None
    low = high = error = None
    if number > 1:
        mean, error = _mean_and_error(values)
        half = student(number - 1) * error
        low, high = mean - half, mean + half
    return {
        "compared": number,
        "ungraded": len(pairs) - number,
        "first": sum(a for a, _ in graded) / number if number else None,
        "second": sum(b for _, b in graded) / number if number else None,
        "difference": mean,
        "standard_error": error,
        "ci_low": low,
        "ci_high": high,
        "wins": sum(value > 0 for value in values),
        "losses": sum(value < 0 for value in values),
        "ties": sum(value == 0 for value in values),
    }


def interval(hits_P: Sequence[float], trials_P: Sequence[int]) -> ShareEstimate:
    """Wilson's interval (1927) for the share of hits among trials in clusters, one per prompt.

    The variance is that of a ratio estimator between clusters (Cochran 1977, eq. 6.13), converted to an effective
    number
    of independent trials (Kish 1965), at most that of the trials and at least that of the prompts. If all trials agree,
    the correlation within a prompt is unknown, so only prompts count. The quantile is Student's, for few prompts.
    """
    clusters = [(hits, trials) for hits, trials in zip(hits_P, trials_P, strict=True) if trials]
    trials, prompts = sum(trials for _, trials in clusters), len(clusters)
    share = sum(hits for hits, _ in clusters) / trials
    effective = float(prompts)
    if prompts > 1 and 0 < share < 1:
        squares = sum((hits - share * trials) ** 2 for hits, trials in clusters)
        variance = prompts / (prompts - 1) * squares / trials**2
        independent = share * (1 - share) / variance if variance else math.inf
        effective = min(float(trials), max(effective, independent))
    z = student(max(1, prompts - 1))
    middle = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = (
        z / (1 + z * z / effective) * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2)
    )
    return {"low": max(0.0, middle - half), "expected": share, "high": min(1.0, middle + half)}


def average_ranks(values_N: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks. Rewards that differ by rounding only are equal."""
    order = sorted(range(len(values_N)), key=lambda index: values_N[index])
    ranks_N = [0.0] * len(values_N)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and equal(values_N[order[last + 1]], values_N[order[first]]):
            last += 1
        for place in range(first, last + 1):
            ranks_N[order[place]] = (first + last) / 2 + 1
        first = last + 1
    return ranks_N


def pearson(first_N: Sequence[float], second_N: Sequence[float]) -> float | None:
    """Pearson's correlation; None if one of the two varies by rounding at most."""
    if all_equal(first_N) or all_equal(second_N):
        return None
    return statistics.correlation(first_N, second_N)


def spearman(first_N: Sequence[float], second_N: Sequence[float]) -> float | None:
    """Spearman's rank correlation with average ranks for ties; None if one of the two does not vary."""
    return pearson(average_ranks(first_N), average_ranks(second_N))
