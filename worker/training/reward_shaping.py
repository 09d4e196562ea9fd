"""Pure functions that change the rewards of a group before they become advantages.

Axes: `_G` members of a group, `_K` parts of a grader.
A reward of None is of an answer that was not graded, and stays None.
"""

from collections.abc import Sequence

from core.jobs.hyperparameter_groups import Std
from worker.training import grpo


def shortened(
    rewards_G: Sequence[float | None], lengths_G: Sequence[int], weight: float
) -> list[float | None]:
    """Return r - weight x mean(r) x length / longest of the group (prime-rl's length penalty, its term of the output).

    The penalty grows with how often the prompt is answered right: a group that never succeeds is not shortened. A mean
    below 0 counts as 0. Only graded answers have a part in the mean and in the longest length.
    """
    graded = [(r, n) for r, n in zip(rewards_G, lengths_G, strict=True) if r is not None]
    mean = max(0.0, sum(r for r, _ in graded) / len(graded)) if graded else 0.0
    longest = max((n for _, n in graded), default=0) or 1
    return [
        None if r is None else r - weight * mean * n / longest
        for r, n in zip(rewards_G, lengths_G, strict=True)
    ]


def each_normalized(
    scores_GK: Sequence[Sequence[float] | None], weights_K: Sequence[float], std: Std
) -> list[float | None]:
    """Return S = sum over k of w_k z_k, z_k = (R_k - mean of the group) / std of the group (GDPO).

    Each grader is normalized within the group before they are added, so that one of a large range does not hide the
    others. TRL's `normalize_then_sum` and verl's `gdpo`; A = S / std of S over the batch follows. A group's S has the
    mean 0, so nothing more is subtracted. A grader that gives all answers of the group the same score adds 0.
    """
    parts_KG = [
        grpo.advantages(
            [[None if scores_K is None else scores_K[k] for scores_K in scores_GK]], "group", std
        )[0]
        for k in range(len(weights_K))
    ]
    return [
        None
        if scores_K is None
        else sum(weight * part_G[member] for weight, part_G in zip(weights_K, parts_KG, strict=True))
        for member, scores_K in enumerate(scores_GK)
    ]
