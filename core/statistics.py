"""Statistics of rewards. scipy is imported on use: it takes 0.1 s, and the API imports this module at startup."""

import math
from collections.abc import Sequence
from typing import Any

from core.rewards import equal


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: half of a 95 % interval, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def paired_difference(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """The second values minus the first, with the 95 % interval of Student's t. Pairs with a None are counted only."""
    graded = [(a, b) for a, b in pairs if a is not None and b is not None]
    number = len(graded)
    differences = [0.0 if equal(a, b) else b - a for a, b in graded]
    mean = sum(differences) / number if number else None
    low = high = error = None
    if mean is not None and number > 1:
        variance = sum((value - mean) ** 2 for value in differences) / (number - 1)
        error = math.sqrt(variance / number)
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
        "wins": sum(value > 0 for value in differences),
        "losses": sum(value < 0 for value in differences),
        "ties": sum(value == 0 for value in differences),
    }
