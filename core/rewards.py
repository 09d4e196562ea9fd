"""When rewards are equal.

One rule for training, its metrics, previews, regrades, verdicts and pairs: what the trainer takes for a group without
signal is shown as one.
"""

import math
from collections.abc import Sequence

# Eight units in the last place of float32 (2^-23), in which reward models compute. Relative to the larger reward, or to
# 1: where scores of that size cancel, as in `a - b` of a multi or in the scale of a reward model, the error stays.
EQUAL = 1e-6


def equal(reward: float, other: float, *, within: float = EQUAL) -> bool:
    """Return whether two rewards differ by rounding at most."""
    return math.isclose(reward, other, rel_tol=within, abs_tol=within)


def all_equal(rewards: Sequence[float], *, within: float = EQUAL) -> bool:
    """Return whether any two of the rewards are equal; true for fewer than two."""
    return len(rewards) < 2 or equal(min(rewards), max(rewards), within=within)
