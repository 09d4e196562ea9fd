"""Detect during a run that a grader is gamed, from the metrics of its training steps. Pure functions.

Each rule looks at every step, so its bound is one of the whole run: a false alarm of one rule has a probability of at
most ALARM_LEVEL in a job without the effect (Bonferroni over the looks). A smaller effect than the threshold is none.
An effect that a healthy run also has, such as longer answers, is a warning and no alarm (see
core/jobs/alarm_sizes.py).
"""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from core.statistics import ALARM_LEVEL, student
from core.step_metrics import StepMetrics
from worker.history import RECENT, Steps, best_validation, first, last

Found = tuple[str, dict[str, Any]]
# Answers are longer than in step 1 by this factor before their correlation with the reward counts.
GROWN = 1.5
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


def _is_confirmed(steps: Steps) -> bool:
    """Whether the shadow grader has seen a gain since step 0 that is no chance, in the last validation it measured."""
    lows = last(steps, "full_valid_shadow_difference_low", 1)
    return bool(lows) and lows[0] > 0


def _risen(steps: Steps, name: str, bound: float) -> Change | None:
    """The change of a metric that has risen by more than `bound` and chance, without a confirmed improvement."""
    found = _of_metric(steps, name)
    if found is None or found.low <= 0 or found.size <= bound or _is_confirmed(steps):
        return None
    return found


def copied_prompt(steps: Steps, bound: float) -> Found | None:
    """More answers than at the start are copies of their prompt. Reads `copied_prompt_share`."""
    found = _risen(steps, "copied_prompt_share", bound)
    if found is None:
        return None
    return (
        f"Copied prompts: {found.now:.0%} of the answers are mostly runs of words of their prompt (mean of {RECENT} "
        f"steps), after {found.before:.0%} in the first ones. If a right answer is no copy, the grader may accept "
        "one.",
        {"copied_prompt_share": found.now, "first_copied_prompt_share": found.before, "low": found.low},
    )


def repetition(steps: Steps, bound: float) -> Found | None:
    """Answers repeat themselves. Reads `repeated_tokens_share`."""
    found = _risen(steps, "repeated_tokens_share", bound)
    if found is None:
        return None
    return (
        f"Repetition: {found.now:.0%} of the runs of tokens in an answer occurred before in it (mean of {RECENT} "
        f"steps), after {found.before:.0%} in the first ones. Longer answers repeat more; if they are not longer, the "
        "grader may reward repeated words.",
        {"repeated_tokens_share": found.now, "first_repeated_tokens_share": found.before, "low": found.low},
    )


def template_collapse(steps: Steps, bound: float) -> Found | None:
    """Answers to different prompts have become the same. Reads `same_answers_share`.

    The lower bound of the rise is above `bound`: where few answers are possible, they are often the same by chance.
    """
    found = _of_metric(steps, "same_answers_share")
    if found is None or found.low <= bound or _is_confirmed(steps):
        return None
    return (
        f"Template collapse: {found.now:.0%} of the pairs of answers to different prompts are the same (mean of "
        f"{RECENT} steps), after {found.before:.0%} in the first ones. Unless nearly all rows have one right answer, "
        "the model no longer reads its prompts.",
        {"same_answers_share": found.now, "first_same_answers_share": found.before, "low": found.low},
    )


def language_mix(steps: Steps, bound: float) -> Found | None:
    """More answers than at the start mix in scripts of other languages. Reads `foreign_script_share`."""
    found = _risen(steps, "foreign_script_share", bound)
    if found is None:
        return None
    return (
        f"Language mix: {found.now:.0%} of the answers have words in scripts that neither their prompt nor their row "
        f"has (mean of {RECENT} steps), after {found.before:.0%} in the first ones. If no other language is wanted, "
        "let the grader ask for that of the prompt.",
        {"foreign_script_share": found.now, "first_foreign_script_share": found.before, "low": found.low},
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
    if length < GROWN * start[1] or correlation <= bound or z <= certain or _is_confirmed(steps):
        return None
    return (
        f"Length is rewarded: among the answers to one prompt, length and score have the correlation {correlation:.2f} "
        f"(mean of {RECENT} steps), and answers went from {start[1]:.0f} to {length:.0f} tokens. Longer "
        "reasoning that is right more often looks the same: read some answers.",
        {
            "length_reward_correlation": correlation,
            "z": z,
            "completion_tokens_mean": length,
            "first_completion_tokens_mean": start[1],
        },
    )


def one_sided_gain(steps: Steps, bound: float) -> Found | None:
    """One part of a multi has gained, another has lost by more than chance, and no third has gained.

    Reads the scores by part of the first and last RECENT steps. A loss in a part of negative weight is a gain. Parts
    that stay are no evidence: one is full from the start, or learned later.
    """
    changes = _parts(steps)
    rising = [part for part in changes if part.change.low > 0 and part.change.size > bound]
    others = [part for part in changes if part not in rising]
    if len(rising) != 1 or any(part.change.size > FLAT for part in others):
        return None
    if not any(part.change.high < 0 and part.change.size < -FLAT for part in others):
        return None
    [gained] = rising
    rest = ", ".join(f"'{part.name}' {part.before:.2f} -> {part.now:.2f}" for part in others)
    return (
        f"One-sided gain: the part '{gained.name}' of the grader went from {gained.before:.2f} to {gained.now:.2f} "
        f"(means of {RECENT} steps), and no other gained: {rest}. The model may be gaming this part: lower its "
        "weight, or make it depend on the others.",
        {"part": gained.name, "changes": [{"part": part.name, "gain": part.change.size} for part in changes]},
    )


class _Part(NamedTuple):
    """A part of a weighted sum: its mean scores, and the change in units of 1 or of its range if that is wider.

    The change has the sign of the part's weight, so that a gain is always positive.
    """

    name: str
    before: float
    now: float
    change: Change


def _parts(steps: Steps) -> list[_Part]:
    """The parts of a weighted sum whose scores are not always the same, in order."""
    trained = steps[1:] if steps[0].step == 0 else steps
    if len(trained) < 2 * RECENT:
        return []
    windows = [*trained[:RECENT], *trained[-RECENT:]]
    rows = windows[0].scores.graders
    if len(rows) < 2:
        return []
    found = []
    for place, row in enumerate(rows):
        weight = row.get("weight")
        known = [score for step in windows if (score := _score(step, place)) is not None]
        if not weight or len(known) < len(windows):
            continue
        unit = math.copysign(max(1.0, max(high for _, high in known)), weight)
        compared = change([mean / unit for mean, _ in known], len(rows) * _looks(steps))
        if compared is not None and any(high > abs(mean) for mean, high in known):
            found.append(_Part(row["name"], compared.before * unit, compared.now * unit, compared))
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

    Reads the paired fall of the last validation, whose bound pays for all pairs of validations of the job
    (worker/recording/metrics.py), and the training rewards.
    """
    now = steps[-1]
    fall, low, reward = now.full_valid_fall, now.full_valid_fall_low, now.full_valid_mean_reward
    if fall is None or low is None or reward is None or low <= bound:
        return None
    best_step = best_validation(steps[:-1])
    if best_step is None:
        return None
    # The base has no training reward: that of step 1 is of the same model.
    then = [one for one in steps if one.step <= max(1, best_step)]
    before, after = last(then, "train_mean_reward", RECENT), last(steps, "train_mean_reward", RECENT)
    if not before or not after or fmean(after) <= fmean(before):
        return None
    return (
        f"Validation falls: {reward + fall:.2f} (step {best_step}) -> {reward:.2f}, while training reward went from "
        f"{fmean(before):.2f} to {fmean(after):.2f}. Use fewer epochs or more training rows; the best checkpoint is "
        "kept.",
        {"best_step": best_step, "fall": fall, "low": low},
    )


def shadow_divergence(steps: Steps, bound: float) -> Found | None:
    """Validation has risen by the training grader, and fallen by the shadow grader by more than chance.

    Reads the last step. Its bound pays for all validations of the job (worker/recording/shadow.py).
    """
    now = steps[-1]
    training, shadow = now.full_valid_difference, now.full_valid_shadow_difference
    low = now.full_valid_shadow_fall_low
    if training is None or shadow is None or low is None or training <= 0 or low <= bound:
        return None
    return (
        f"Shadow divergence: validation has gained {training:+.2f} by the training grader and {shadow:+.2f} by the "
        "shadow grader. The model may be gaming the grader: read the answers on which the two disagree most.",
        {"difference": training, "shadow_difference": shadow, "fall_low": low},
    )


def shadow_unshared(steps: Steps, bound: float) -> Found | None:
    """The shadow grader confirms no gain, and less than half of that of the training grader by more than chance.

    A healthy run that learns a format first looks the same for a while. Reads the last step.
    """
    now = steps[-1]
    training, shadow = now.full_valid_difference, now.full_valid_shadow_difference
    shortfall, low = now.full_valid_shadow_shortfall, now.full_valid_shadow_shortfall_low
    if (
        training is None
        or shadow is None
        or low is None
        or training <= 0
        or low <= bound
        or _is_confirmed(steps)
    ):
        return None
    return (
        f"The shadow grader does not share the gain: validation has gained {training:+.2f} by the training grader and "
        f"{shadow:+.2f} by the shadow grader. A format may be learned first; if it stays so, the model may be gaming "
        "the grader.",
        {"difference": training, "shadow_difference": shadow, "shortfall": shortfall, "shortfall_low": low},
    )


def shadow_ungraded(steps: Steps, bound: float) -> Found | None:
    """The shadow grader fails, so that its alarm cannot fire. Reads the last validation."""
    share = steps[-1].full_valid_shadow_unresponsive
    if share is None or share <= bound:
        return None
    until = " No later validation can be compared with step 0 on these rows." if steps[-1].step == 0 else ""
    return (
        f"The shadow grader could not grade {share:.0%} of the validation answers, so its divergence from the training "
        f"grader is not known.{until}",
        {"full_valid_shadow_unresponsive": share},
    )
