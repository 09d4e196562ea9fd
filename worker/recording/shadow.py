"""Whether the shadow grader shares the gain that the training grader sees. Pure functions; `_N` is the axis of rows."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from core.jobs.verdict import Verdict
from core.statistics import sequential_low
from worker.history import Steps
from worker.recording.verdict import compare, row_means
from worker.types import Group, RowScores

# The shadow grader is to see at least this share of the gain of the training grader: a stricter one may see less.
SHARED = 0.5


def row_scores(groups_P: Sequence[Group]) -> list[float | None] | None:
    """The mean shadow score of each row's answers; None: the job has no shadow grader."""
    if not any(group.shadow_G for group in groups_P):
        return None
    return row_means([[grade.score for grade in group.shadow_G] for group in groups_P])


def of_validation(
    valid_P: Sequence[Group],
    training_N: RowScores,
    base_N: RowScores | None,
    base_shadow_N: RowScores | None,
    looks: int,
) -> dict[str, float | None]:
    """The metrics of a validation by the shadow grader; empty without one.

    Args:
        training_N: The row scores by the training grader.
        base_N: Those of step 0.
        base_shadow_N: The scores by the shadow grader in step 0.
        looks: The number of validations after step 0, at each of which an alarm may fire.
    """
    shadow_N = row_scores(valid_P)
    if shadow_N is None:
        return {}
    scores = [grade.score for group in valid_P for grade in group.shadow_G]
    graded = [score for score in scores if score is not None]
    data: dict[str, float | None] = {
        "full_valid_shadow_mean_reward": fmean(graded) if graded else None,
        "full_valid_shadow_unresponsive": 1 - len(graded) / len(scores),
    }
    compared = None if base_shadow_N is None else compare(base_shadow_N, shadow_N)
    if compared is None or base_N is None or base_shadow_N is None:
        return data
    data |= {
        "full_valid_shadow_difference": compared.difference,
        "full_valid_shadow_difference_low": compared.low,
        "full_valid_shadow_difference_high": compared.high,
    }
    shadow_gains_N = _gains(base_shadow_N, shadow_N)
    falls = [-gain for gain in shadow_gains_N if gain is not None]
    if falls:
        data["full_valid_shadow_fall_low"] = sequential_low(falls, looks)
    shortfalls = _shortfalls(_gains(base_N, training_N), shadow_gains_N)
    if shortfalls:
        data["full_valid_shadow_shortfall"] = fmean(shortfalls)
        data["full_valid_shadow_shortfall_low"] = sequential_low(shortfalls, looks)
    return data


def with_shadow(verdict: Verdict, steps: Steps) -> Verdict:
    """The verdict with the difference by the shadow grader, if the validation of its step has one."""
    validated = next((one for one in steps if one.step == verdict.step), None)
    if validated is None:
        return verdict
    return replace(
        verdict,
        shadow_difference=validated.full_valid_shadow_difference,
        shadow_ci_low=validated.full_valid_shadow_difference_low,
        shadow_ci_high=validated.full_valid_shadow_difference_high,
    )


def _gains(base_N: RowScores, now_N: RowScores) -> list[float | None]:
    """The gain of each row. Scores from 0 to 1 count as they are, those of a wider range in units of their range."""
    scores = [score for score in (*base_N, *now_N) if score is not None]
    unit = max(1.0, max(scores) - min(scores)) if scores else 1.0
    return [
        None if base is None or now is None else (now - base) / unit
        for base, now in zip(base_N, now_N, strict=True)
    ]


def _shortfalls(training_N: RowScores, shadow_N: RowScores) -> list[float]:
    """Of each row that both have graded, how much the shadow's gain is below SHARED of the training grader's."""
    return [
        SHARED * training - shadow
        for training, shadow in zip(training_N, shadow_N, strict=True)
        if training is not None and shadow is not None
    ]
