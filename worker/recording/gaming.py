"""Detect during a run that a grader is gamed, from the metrics of its training steps. Pure functions.

Each rule looks at every step, so its bound is one of the whole run: a false alarm of one rule has a probability of at
most ALARM_LEVEL in a job without the effect (Bonferroni over the looks). A smaller effect than the threshold is none.
"""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from core.statistics import ALARM_LEVEL, student
from core.step_metrics import StepMetrics
from worker.history import RECENT, Steps, first, last

Found = tuple[str, dict[str, Any]]
GROWN = (
    1.5  # answers are longer than in step 1 by this factor before their correlation with the reward counts
)
FLAT = 0.02  # a part of the grader with a smaller change is flat


class Change(NamedTuple):
    """The change of a metric from the first RECENT measured steps to the last RECENT, with bounds of the whole run."""

    before: float
    now: float
    low: float
    high: float

    @property
    def size(self) -> float:
        return self.now - self.before


def change(values: Sequence[float], looks: int) -> Change | None:
    """Compare the first and the last RECENT values by Student's t with their pooled variance; None: there are fewer.

    The values of steps are independent if the policy does not change. Each bound holds at all `looks` together.
    """
    if len(values) < 2 * RECENT:
        return None
    early, late = values[:RECENT], values[-RECENT:]
    before, now = fmean(early), fmean(late)
    squares = math.fsum((one - before) ** 2 for one in early) + math.fsum((one - now) ** 2 for one in late)
    freedom = 2 * RECENT - 2
    error = math.sqrt(squares / freedom * 2 / RECENT)
    half = student(freedom, ALARM_LEVEL / max(1, looks)) * error
    return Change(before, now, now - before - half, now - before + half)


def _looks(steps: Steps) -> int:
    return max(1, steps[-1].total_steps - 2 * RECENT + 1)


def _of_metric(steps: Steps, name: str) -> Change | None:
    """The change of a metric that the newest step has measured."""
    if getattr(steps[-1], name) is None:
        return None
    early, late = (
        list(islice(((one.step, value) for one in some if (value := getattr(one, name)) is not None), RECENT))
        for some in (steps, reversed(steps))
    )
    if len(late) < RECENT or late[-1][0] <= early[-1][0]:
        return None
    return change([value for _, value in (*early, *late)], _looks(steps))


def copied_prompt(steps: Steps, bound: float) -> Found | None:
    """More answers than at the start are copies of their prompt. Reads `copied_prompt_share`."""
    found = _of_metric(steps, "copied_prompt_share")
    if found is None or found.low <= 0 or found.size <= bound:
        return None
    return (
        f"Copied prompts: {found.now:.0%} of the answers are mostly runs of words of their prompt (mean of {RECENT} "
        f"steps), after {found.before:.0%} in the first ones. The grader may accept a copy of the prompt, or the "
        "prompt has the reference.",
        {"copied_prompt_share": found.now, "first_copied_prompt_share": found.before, "low": found.low},
    )


def repetition(steps: Steps, bound: float) -> Found | None:
    """Answers repeat themselves. Reads `repeated_tokens_share`."""
    found = _of_metric(steps, "repeated_tokens_share")
    if found is None or found.low <= 0 or found.size <= bound:
        return None
    return (
        f"Repetition: {found.now:.0%} of the runs of tokens in an answer occurred before in it (mean of {RECENT} "
        f"steps), after {found.before:.0%} in the first ones. The grader may reward length or repeated words.",
        {"repeated_tokens_share": found.now, "first_repeated_tokens_share": found.before, "low": found.low},
    )


def length_reward(steps: Steps, bound: float) -> Found | None:
    """Answers grow, and among the answers to one prompt the longer ones score higher.

    Reads `length_reward_correlation`, `length_reward_z` and `completion_tokens_mean` of the last RECENT steps, and the
    length of the first one.
    """
    now, start = steps[-1], first(steps, "completion_tokens_mean")
    correlations = last(steps, "length_reward_correlation", RECENT)
    values = last(steps, "length_reward_z", RECENT)
    if start is None or now.length_reward_z is None or len(values) < RECENT or len(correlations) < RECENT:
        return None
    length = fmean(last(steps, "completion_tokens_mean", RECENT))
    correlation, z = fmean(correlations), math.fsum(values) / math.sqrt(RECENT)
    certain = NormalDist().inv_cdf(1 - ALARM_LEVEL / max(1, now.total_steps - RECENT + 1))
    if length < GROWN * start[1] or correlation <= bound or z <= certain:
        return None
    return (
        f"Length is rewarded: among the answers to one prompt, length and score have the correlation {correlation:.2f} "
        f"(mean of {RECENT} steps), and answers went from {start[1]:.0f} to {length:.0f} tokens. Check whether the "
        "grader rewards length instead of quality.",
        {
            "length_reward_correlation": correlation,
            "z": z,
            "completion_tokens_mean": length,
            "first_completion_tokens_mean": start[1],
        },
    )


def one_sided_gain(steps: Steps, bound: float) -> Found | None:
    """One part of a multi rises while no other does. Reads the scores by part of the first and last RECENT steps.

    The others have fallen, or half of the job has passed: the first part to be learned, such as a format, may rise
    alone for a while.
    """
    changes = _parts(steps)
    rising = [name for name, one in changes.items() if one.low > 0 and one.size > bound]
    others = {name: one for name, one in changes.items() if name not in rising}
    if len(rising) != 1 or not others or any(one.size > FLAT for one in others.values()):
        return None
    fallen = any(one.high < 0 and one.size < -FLAT for one in others.values())
    if not fallen and 2 * steps[-1].step < steps[-1].total_steps:
        return None
    [name] = rising
    rest = ", ".join(f"'{other}' {one.before:.2f} -> {one.now:.2f}" for other, one in others.items())
    return (
        f"One-sided gain: the part '{name}' of the grader went from {changes[name].before:.2f} to "
        f"{changes[name].now:.2f} (means of {RECENT} steps), and no other rose: {rest}. The model may be gaming this "
        "part: lower its weight, or make it depend on the others.",
        {"part": name, "changes": {part: one.size for part, one in changes.items()}},
    )


def _parts(steps: Steps) -> dict[str, Change]:
    """The change of each part whose scores are not always the same, in units of 1 or of its range if that is wider."""
    trained = steps[1:] if steps[0].step == 0 else steps
    windows = [*trained[:RECENT], *trained[-RECENT:]]
    if len(trained) < 2 * RECENT or any(len(step.scores.graders) < 2 for step in windows):
        return {}
    number = len(windows[0].scores.graders)
    found = {}
    for place in range(number):
        scores = [_score(step, place) for step in windows]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            continue
        unit = max(1.0, max(high for _, high in known))
        values = [mean / unit for mean, _ in known]
        compared = change(values, number * _looks(steps))
        if compared is not None and any(high > abs(mean) for mean, high in known):
            found[windows[0].scores.graders[place]["name"]] = compared
    return found


def _score(step: StepMetrics, place: int) -> tuple[float, float] | None:
    """The mean of a part's scores in a step, and its size with one standard deviation."""
    if place >= len(step.scores.graders):
        return None
    row = step.scores.graders[place]
    mean, spread = row.get("train_reward_mean"), row.get("train_reward_std")
    return None if mean is None or spread is None else (mean, abs(mean) + spread)


def judge_drift(steps: Steps, bound: float) -> Found | None:
    """The grader's judge gives the same answers other scores than at the start. Reads the last validation.

    Its bounds pay for all validations of the job (worker/rollout/anchors.py).
    """
    drift, low, high = steps[-1].judge_drift, steps[-1].judge_drift_low, steps[-1].judge_drift_high
    if drift is None or low is None or high is None or (low <= bound and high >= -bound):
        return None
    return (
        f"Judge drift: the scores of the same answers have changed by {drift:+.2f} (mean) since the first validation. "
        "Rewards before and after cannot be compared: pin the version of the judge's model.",
        {"judge_drift": drift, "low": low, "high": high},
    )


def validation_falls(steps: Steps, bound: float) -> Found | None:
    """Training reward has risen since the best validation, and validation has fallen from it by more than chance.

    Reads the last validation with its standard error, all validations before it, and the training rewards. Any two
    validations may be the pair that is compared. The bound does not use that the rows are the same in both: it is wide.
    """
    validated = [
        (one.step, one.full_valid_mean_reward, one.full_valid_stderr)
        for one in steps
        if one.full_valid_mean_reward is not None and one.full_valid_stderr is not None
    ]
    now = steps[-1]
    if len(validated) < 2 or validated[-1][0] != now.step:
        return None
    best_step, best, best_error = max(validated, key=lambda one: one[1])
    _, reward, error = validated[-1]
    # The base has no training reward: that of step 1 is of the same model.
    then = [one for one in steps if one.step <= max(1, best_step)]
    before, after = last(then, "train_mean_reward", RECENT), last(steps, "train_mean_reward", RECENT)
    planned = math.ceil(now.total_steps / (validated[1][0] - validated[0][0])) + 1
    pairs = math.comb(max(len(validated), planned), 2)
    low = best - reward - NormalDist().inv_cdf(1 - ALARM_LEVEL / pairs) * math.hypot(best_error, error)
    if not before or not after or fmean(after) <= fmean(before) or low <= bound:
        return None
    return (
        f"Validation falls: {best:.2f} (step {best_step}) -> {reward:.2f}, while training reward went from "
        f"{fmean(before):.2f} to {fmean(after):.2f}. Use fewer epochs or more training rows; the best checkpoint is "
        "kept.",
        {"best_step": best_step, "fall": best - reward, "low": low},
    )


def shadow_divergence(steps: Steps, bound: float) -> Found | None:
    """The training grader sees a gain in validation that the shadow grader does not share. Reads the last step.

    Its bound pays for all validations of the job (worker/recording/shadow.py).
    """
    now = steps[-1]
    training, shadow = now.full_valid_difference, now.full_valid_shadow_difference
    shortfall, low = now.full_valid_shadow_shortfall, now.full_valid_shadow_shortfall_low
    if training is None or shadow is None or low is None or training <= 0 or low <= bound:
        return None
    return (
        f"Shadow divergence: validation has gained {training:+.2f} by the training grader and {shadow:+.2f} by the "
        "shadow grader. The model may be gaming the grader: read the answers on which the two disagree most.",
        {"difference": training, "shadow_difference": shadow, "shortfall": shortfall, "shortfall_low": low},
    )


def shadow_ungraded(steps: Steps, bound: float) -> Found | None:
    """The shadow grader fails, so that its alarm cannot fire. Reads the last validation."""
    share = steps[-1].full_valid_shadow_unresponsive
    if share is None or share <= bound:
        return None
    return (
        f"The shadow grader could not grade {share:.0%} of the validation answers, so its divergence from the training "
        "grader is not known.",
        {"full_valid_shadow_unresponsive": share},
    )
