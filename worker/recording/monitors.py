"""Detect problems of a run from its recorded metrics, and explain why a model is worse than its base. Pure functions.

Each rule documents its inputs: a few of the first steps and up to seven of the last.
"""

import logging
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from core.jobs.alarm_sizes import ALARMS
from core.jobs.verdict import Verdict
from core.rewards import EQUAL, all_equal
from core.thresholds import Thresholds
from worker.history import Steps, first, last, reward_unit
from worker.recording import gaming
from worker.recording.gaming import Found
from worker.types import Finding

log = logging.getLogger(__name__)

Rule = Callable[[Steps, float], Found | None]
"""A rule with its threshold: the sentence for the user and its numbers, or None if it does not hold."""

WINDOW = 3  # steps over which noisy means of single batches are averaged
# `kl` is measured on one pack a step. In healthy runs of the demo it jumps by 1.5 nats for two steps at the start, and
# by 11 in a single step later, while the reward rises: a jump is a warning only where the reward has fallen with it.
KL_HIGH, KL_BEFORE = 2, 5
# An untrained model cuts off many answers (0.45, 0.16, 0.17 in the demo) until it has learned to stop.
TRUNCATED = 5
# At the end of a job, of validation answers: this larger share is cut off.
CUT_OFF = 0.5
# Also only at the end: the entropy of a model that has become noise, against step 1 and in nats a token above it.
NOISE_FACTOR, NOISE_NATS = 3.0, 0.5
# Of a bad result, and of a damaged model; the first one that holds is named.
CAUSES = ("collapse", "kl_jump", "truncation", "length_inflation", "overfitting")
DAMAGES = ("collapse", "kl_jump", "length_inflation")
MIN_PROMPTS = 8  # the rewards of fewer say more of the prompts than of the policy
LOST = 0.1  # a training reward lower than at the start by this share of its unit is lost, not noise
NORMAL_95 = 1.96


def check(
    steps: Steps,
    thresholds: Thresholds,
    warned: Collection[str] = (),
    rules: Mapping[str, tuple[Rule, str]] | None = None,
) -> list[Finding]:
    """The rules that hold after the last of `steps`, without those that have `warned` before. Default: all RULES."""
    findings = []
    for name, (rule, threshold) in (RULES if rules is None else rules).items():
        bound = getattr(thresholds, threshold)
        if bound is None or name in warned:
            continue
        try:
            found = rule(steps, bound)
        except Exception:  # what is wrong with a rule must not end a run
            log.exception("the rule %s failed at step %d", name, steps[-1].step)
            continue
        if found is not None:
            message, data = found
            findings.append(Finding(name, message, {**data, "threshold": bound}))
    return findings


def only(*names: str) -> dict[str, tuple[Rule, str]]:
    """Some of RULES, for callers that read no others."""
    return {name: RULES[name] for name in names}


ALIKE = "alike_rewards"
FLOAT64 = 1e-12  # smaller differences are rounding of graders that compute in float64


def alike_rewards(
    rewards_PG: Sequence[Sequence[float | None]], warned: Collection[str] = ()
) -> list[Finding]:
    """Report groups whose rewards differ and still count as equal (core/rewards.py); nothing if that has `warned`."""
    if ALIKE in warned:
        return []
    graded_PG = [[reward for reward in rewards_G if reward is not None] for rewards_G in rewards_PG]
    alike = [
        graded_G for graded_G in graded_PG if all_equal(graded_G) and not all_equal(graded_G, within=FLOAT64)
    ]
    if not alike:
        return []
    example = max(alike, key=lambda graded_G: max(graded_G) - min(graded_G))
    low, high = min(example), max(example)
    message = (
        f"In {len(alike)} of {len(rewards_PG)} groups the rewards differ by less than {EQUAL:g} of the larger one, or "
        f"of 1, such as {low!r} and {high!r}. They count as equal, as rounding, so these groups have no signal. "
        "If the difference is meant, scale the scores."
    )
    return [Finding(ALIKE, message, {"groups": len(alike), "low": low, "high": high})]


def likely_cause(steps: Steps, verdict: Verdict, thresholds: Thresholds) -> tuple[str, str]:
    """Return why the delivered model is below its base: the rule's name and a sentence with the evidence.

    Damage of the delivered model comes first. Then the rules are applied again to every step of the job, and the last
    step is compared with the first. Thresholds that were switched off have their defaults, so that the explanation of a
    bad result does not depend on which warnings are wanted.
    """
    if (damaged := damage(steps, verdict.step, thresholds)) is not None:
        return damaged
    whole = _without_disabled(thresholds)
    found = {finding.rule: finding for finding in _replayed(steps, whole)}
    for rule in CAUSES:
        if rule in found:
            return rule, found[rule].message
    if (shifted := _shifted(steps, whole, highest_kl=True)) is not None:
        return shifted
    start = first(steps, "train_mean_reward")
    later = [] if start is None else [step for step in steps if step.step > start[0]]
    recent = last(later, "train_mean_reward", WINDOW)
    if start is not None and recent:
        training = f"training reward {start[1]:.2f} (step {start[0]}) -> {statistics.fmean(recent):.2f}"
        validation = f"validation {verdict.base_reward:.2f} -> {verdict.tuned_reward:.2f}"
        if statistics.fmean(recent) > start[1] + LOST * reward_unit(steps):
            return "overfitting", f"Validation falls while training rises: {training}, {validation}."
        if statistics.fmean(recent) < start[1] - LOST * reward_unit(steps):
            return "unstable", f"Training falls as well: {training}, {validation}. Lower the learning rate."
    return "unknown", "No cause was found in the metrics."


def damage(steps: Steps, delivered: int, thresholds: Thresholds) -> tuple[str, str] | None:
    """Return evidence that the model of step `delivered` is damaged: the rule's name and a sentence, or None.

    Reads the first steps and those up to the one after `delivered`, whose answers that model gave. Problems that ended
    earlier or started later do not count, nor does truncation from the start, nor overfitting.
    """
    whole = _without_disabled(thresholds)
    until = [step for step in steps if step.step <= delivered + 1]
    for end in (step for step in until if step.step >= max(delivered, 1)):
        for found in check(until[: until.index(end) + 1], whole, rules=only(*DAMAGES)):
            return found.rule, found.message
    return _shifted(until, whole, highest_kl=False)


def _shifted(steps: Steps, thresholds: Thresholds, *, highest_kl: bool) -> tuple[str, str] | None:
    """Return evidence that the end of `steps` differs from steps 0 and 1 by more than in any healthy job, or None.

    One step is enough. Reads the last measurement of each metric, and with `highest_kl` the highest of `kl`.
    """
    found = dict(_shifts(steps, thresholds, highest_kl=highest_kl))
    if not found:
        return None
    evidence = "; ".join(found.values())
    return next(iter(found)), f"{evidence[0].upper()}{evidence[1:]}. Lower the learning rate, or set kl."


def _shifts(steps: Steps, thresholds: Thresholds, *, highest_kl: bool) -> Iterator[tuple[str, str]]:
    measured = [(step.kl, step.step) for step in steps if step.kl is not None]
    if measured and thresholds.kl_jump is not None:
        kl, step = max(measured, key=lambda one: one[0]) if highest_kl else measured[-1]
        if kl > thresholds.kl_jump:
            yield "kl_jump", f"the policy is {kl:.3g} nats a token from its reference in step {step}"
    change = _change(steps, "valid_truncated_share")
    if change is not None and change[1] - change[0] >= CUT_OFF:
        yield "truncation", f"{change[0]:.0%} -> {change[1]:.0%} of the validation answers are cut off"
    change = _change(steps, "valid_completion_tokens_mean")
    factor = thresholds.length_factor
    if change is not None and factor is not None and change[1] > factor * change[0]:
        yield "length_inflation", f"validation answers went from {change[0]:.1f} to {change[1]:.1f} tokens"
    change, reward = _change(steps, "sampling_entropy"), _change(steps, "train_mean_reward")
    if change is not None and thresholds.entropy_share is not None:
        # A policy that has learned its training rows has little entropy left and is not damaged.
        lost = (
            change[1] < thresholds.entropy_share * change[0] and reward is not None and reward[1] <= reward[0]
        )
        if lost or change[1] > max(NOISE_FACTOR * change[0], change[0] + NOISE_NATS):
            yield "entropy", f"entropy went from {change[0]:.3g} to {change[1]:.3g} nats a token"


def _change(steps: Steps, name: str) -> tuple[float, float] | None:
    """The first and the last measurement of a metric; None: there are no two."""
    start, now = first(steps, name), last(steps, name, 2)
    return (start[1], now[0]) if start is not None and len(now) > 1 else None


def _without_disabled(thresholds: Thresholds) -> Thresholds:
    """Replace disabled thresholds by their defaults."""
    return Thresholds(**{name: bound for name, bound in thresholds.model_dump().items() if bound is not None})


def _replayed(steps: Steps, thresholds: Thresholds) -> Iterator[Finding]:
    warned: set[str] = set()
    for end in range(1, len(steps) + 1):
        for finding in check(steps[:end], thresholds, warned, only(*CAUSES)):
            warned.add(finding.rule)
            yield finding


def _collapse(steps: Steps, share: float) -> Found | None:
    """The answers have become one answer, or noise, and the reward is lost.

    Low entropy alone is no collapse: a policy that has solved its task has little left. Reads `sampling_entropy` and
    `has_signal` of the last step, `train_mean_reward` of the last WINDOW, and step 1.
    """
    now, start, entropy = steps[-1], first(steps, "train_mean_reward"), first(steps, "sampling_entropy")
    if start is None or now.train_mean_reward is None or now.step == start[0]:
        return None
    reward = statistics.fmean(last(steps, "train_mean_reward", min(WINDOW, now.step - start[0])))
    now_entropy = now.sampling_entropy
    left = now_entropy / entropy[1] if entropy and entropy[1] and now_entropy is not None else 1.0
    silent = now.has_signal is False
    fell, unit = start[1] - reward, reward_unit(steps)
    lost, halved = fell > LOST * unit, fell > unit / 2
    if not (lost and left < share) and not (halved and (silent or left < 0.5)):
        return _one_answer(steps, share)
    data = {"train_mean_reward": reward, "first_train_mean_reward": start[1]}
    message = f"Collapse: training reward fell from {start[1]:.2f} (step {start[0]}) to {reward:.2f}"
    if silent:
        message += ", no group has answers that differ in score"
    if entropy is not None and now_entropy is not None:
        message += f", entropy went from {entropy[1]:.3g} to {now_entropy:.3g} nats a token"
        data |= {"sampling_entropy": now_entropy, "first_sampling_entropy": entropy[1]}
    return f"{message}. Lower the learning rate.", data


def is_lost(steps: Steps, batch_size: int) -> bool:
    """Return whether a collapse has certainly cost the model what it could do at the start.

    A validation of the last WINDOW steps that is below that of step 0 by more than chance is enough. Otherwise these
    steps must have MIN_PROMPTS prompts. A policy that has solved what it can also gives few different answers, so their
    newest validation decides: it is not above that of step 0. Without one, their training reward is not above that of
    step 1.
    """
    recent, base = steps[-WINDOW:], first(steps, "full_valid_mean_reward")
    if (highs := last(recent, "full_valid_difference_high", 1)) and highs[0] < 0:
        return True
    if batch_size * min(WINDOW, steps[-1].step - 1) < MIN_PROMPTS:
        return False
    if base is not None and (validated := last(recent, "full_valid_mean_reward", 1)):
        return recent[-1].step > base[0] and validated[0] <= base[1]
    start, rewards = first(steps, "train_mean_reward"), last(recent, "train_mean_reward", WINDOW)
    return start is not None and bool(rewards) and statistics.fmean(rewards) <= start[1]


def has_lost_signal(steps: Steps, step: int) -> bool:
    """Return whether the next WINDOW steps after this one have lost half the reward and all signal.

    The rule `collapse` takes the mean of steps before and after the collapse, and so fires later.
    """
    start = first(steps, "train_mean_reward")
    after = [one for one in steps if step < one.step <= step + WINDOW]
    rewards = [one.train_mean_reward for one in after if one.train_mean_reward is not None]
    if start is None or not rewards or any(one.has_signal is not False for one in after):
        return False
    return start[1] - statistics.fmean(rewards) > reward_unit(steps) / 2


def is_improved(steps: Steps, step: int) -> bool:
    """Return whether validation of this step is above that of step 0 by more than chance."""
    lows = (one.full_valid_difference_low for one in steps if one.step == step)
    return any(low is not None and low > 0 for low in lows)


def _one_answer(steps: Steps, share: float) -> Found | None:
    """The policy gives the same answers to every prompt, so that nothing is left to learn from, and has not learned.

    A constant answer may be right more often than those of the untrained model. Reads `sampling_entropy`,
    `groups_mixed_share`, `groups_all_one_share` and `train_mean_reward` of the last WINDOW steps, and step 1.
    """
    start, entropy = first(steps, "train_mean_reward"), first(steps, "sampling_entropy")
    recent = [step for step in steps[-WINDOW:] if step.has_signal is False]
    entropies, rewards = last(recent, "sampling_entropy", WINDOW), last(recent, "train_mean_reward", WINDOW)
    if start is None or entropy is None or len(entropies) < WINDOW or len(rewards) < WINDOW:
        return None
    reward, unit = statistics.fmean(rewards), reward_unit(steps)
    solved = statistics.fmean(last(recent, "groups_all_one_share", WINDOW) or [0.0]) > 0.5
    if max(entropies) >= share * entropy[1] or reward > start[1] + unit / 2 or solved:
        return None
    return (
        f"Collapse: in {WINDOW} steps in a row no group has answers that differ in score, entropy went from "
        f"{entropy[1]:.3g} to {entropies[0]:.3g} nats a token, and the training reward is {reward:.2f}, after "
        f"{start[1]:.2f} in step {start[0]}. Lower the learning rate.",
        {
            "train_mean_reward": reward,
            "first_train_mean_reward": start[1],
            "sampling_entropy": entropies[0],
            "first_sampling_entropy": entropy[1],
        },
    )


def _below_base(steps: Steps, margin: float) -> Found | None:
    """Validation is below that of step 0 by more than chance. Reads the last step's paired difference."""
    now, base = steps[-1], first(steps, "full_valid_mean_reward")
    high, low, difference = (
        now.full_valid_difference_high,
        now.full_valid_difference_low,
        now.full_valid_difference,
    )
    if high is None or low is None or difference is None or base is None or high >= -margin:
        return None
    return (
        f"Validation is below that of step 0: {base[1]:.2f} -> {now.full_valid_mean_reward:.2f}, paired difference "
        f"{difference:+.2f} (95 % interval {low:.2f} to {high:.2f}).",
        {"difference": difference, "low": low, "high": high},
    )


def _overfitting(steps: Steps, bound: float) -> Found | None:
    """Training reward is above validation reward by more than `bound`, and more than noise and the start explain.

    Reads the last validation with its standard error, the last WINDOW training rewards, and steps 0 and 1, for the
    training prompts may have been easier from the start.
    """
    now, recent = steps[-1], last(steps, "train_mean_reward", WINDOW)
    valid, stderr = now.full_valid_mean_reward, now.full_valid_stderr
    base, start = first(steps, "full_valid_mean_reward"), first(steps, "train_mean_reward")
    if valid is None or stderr is None or len(recent) < WINDOW or base is None or start is None:
        return None
    train = statistics.fmean(recent)
    at_the_start = max(0.0, start[1] - base[1])
    if train - valid - at_the_start - NORMAL_95 * stderr <= bound:
        return None
    return (
        f"Overfitting: training reward {train:.2f} (mean of {WINDOW} steps) is {train - valid:.2f} above validation "
        f"reward {valid:.2f} (standard error {stderr:.2f}). Use fewer epochs or more training rows.",
        {"train_mean_reward": train, "full_valid_mean_reward": valid, "gap": train - valid},
    )


def _kl_jump(steps: Steps, bound: float) -> Found | None:
    """The policy leaves its reference, stays away, and has lost reward by it.

    Reads `kl` and `train_mean_reward` of the last KL_HIGH + KL_BEFORE steps.
    """
    measured = last(steps, "kl", KL_HIGH + KL_BEFORE)
    now, before = measured[:KL_HIGH], measured[KL_HIGH:]
    if steps[-1].kl is None or not before or min(now) - statistics.median(before) <= bound:
        return None
    rewards = last(steps, "train_mean_reward", KL_HIGH + KL_BEFORE)
    if len(rewards) > KL_HIGH:
        reward, earlier = statistics.fmean(rewards[:KL_HIGH]), statistics.fmean(rewards[KL_HIGH:])
        if reward >= earlier - LOST * max(abs(earlier), reward_unit(steps)):
            return None
    usual = statistics.median(before)
    return (
        f"KL jump: the policy is {min(now):.3g} nats a token or more from its reference in {KL_HIGH} steps in a row, "
        f"after {usual:.3g} before them. Lower the learning rate, or set kl.",
        {"kl": min(now), "kl_before": usual},
    )


def _truncation(steps: Steps, bound: float) -> Found | None:
    """Many answers are cut off in every step. Reads `truncated_share` of the last TRUNCATED training steps."""
    recent = last(steps, "truncated_share", TRUNCATED)
    if steps[-1].truncated_share is None or len(recent) < TRUNCATED or min(recent) <= bound:
        return None
    share = statistics.fmean(recent)
    return (
        f"Truncation: {share:.0%} of the answers of the last {TRUNCATED} steps were cut off. "
        "Raise max_completion_tokens, or see overlong.",
        {"truncated_share": share},
    )


def _length_inflation(steps: Steps, factor: float) -> Found | None:
    """Answers grow. Reads `completion_tokens_mean` of the last WINDOW training steps and of the first."""
    start, recent = first(steps, "completion_tokens_mean"), last(steps, "completion_tokens_mean", WINDOW)
    if start is None or len(recent) < WINDOW or steps[-1].completion_tokens_mean is None:
        return None
    length = statistics.fmean(recent)
    if length <= factor * start[1]:
        return None
    return (
        f"Length inflation: answers have {length:.0f} tokens (mean of {WINDOW} steps), {length / start[1]:.1f} times "
        f"as many as in step {start[0]} ({start[1]:.0f}). The grader may reward length.",
        {"completion_tokens_mean": length, "first_completion_tokens_mean": start[1]},
    )


def _inert_part(steps: Steps, bound: float) -> Found | None:
    """A part of a multi or of a select that scores all answers alike has no signal. Reads the first `bound` steps.

    A whole grader that never differs is a step without signal (worker/recording/metrics.py).
    """
    trained = [step for step in steps if 1 <= step.step <= bound]
    if len(trained) < bound or any(len(step.scores.graders) < 2 for step in trained):
        return None
    constant = {}
    for rows in zip(*(step.scores.graders for step in trained), strict=True):
        means = [row.get("train_reward_mean") for row in rows]
        spreads = [row.get("train_reward_std") for row in rows]
        # With the scores at one standard deviation from the mean: a spread that is rounding at their size is none.
        scores = [
            score
            for mean, spread in zip(means, spreads, strict=True)
            if mean is not None and spread is not None
            for score in (mean, mean + spread)
        ]
        if len(scores) == 2 * len(rows) and all_equal(scores):
            constant[rows[0]["name"]] = scores[0]
    if not constant:
        return None
    parts = ", ".join(f"'{name}' ({score:g})" for name, score in constant.items())
    return (
        f"Inert part of the grader: all answers of the first {len(trained)} steps have the same score by {parts}. Such "
        "a part has no signal: check what it compares.",
        {"parts": constant},
    )


RULES: Mapping[str, tuple[Rule, str]] = {
    "collapse": (_collapse, "entropy_share"),
    "below_base": (_below_base, "below_base"),
    "overfitting": (_overfitting, "overfitting"),
    "kl_jump": (_kl_jump, "kl_jump"),
    "truncation": (_truncation, "truncated_share"),
    "length_inflation": (_length_inflation, "length_factor"),
    "inert_part": (_inert_part, "inert_steps"),
    "one_sided_gain": (gaming.one_sided_gain, ALARMS["one_sided_gain"].threshold),
    "length_reward": (gaming.length_reward, "length_reward"),
    "copied_prompt": (gaming.copied_prompt, "copied_prompt"),
    "repetition": (gaming.repetition, "repetition"),
    "template_collapse": (gaming.template_collapse, "template_collapse"),
    "language_mix": (gaming.language_mix, "language_mix"),
    "judge_drift": (gaming.judge_drift, ALARMS["judge_drift"].threshold),
    "validation_falls": (gaming.validation_falls, ALARMS["validation_falls"].threshold),
    "shadow_divergence": (gaming.shadow_divergence, ALARMS["shadow_divergence"].threshold),
    "shadow_unshared": (gaming.shadow_unshared, "shadow_unshared"),
    "shadow_ungraded": (gaming.shadow_ungraded, "shadow_ungraded"),
}
