"""GRPO and its relatives as pure functions: rewards to advantages, and what objectives are made of.

Sources: GRPO is DeepSeekMath (arXiv 2402.03300, eqs. 3 and 4, sections 4.1.2 and 4.1.3), DAPO is arXiv 2503.14476 (eqs.
8 and 13), RLOO is arXiv 2402.14740. The objective of each loss is in worker/training/objectives/, the advantages of
reinforce_plus_plus are in worker/training/token_rewards.py, those of ppo in worker/training/ppo.py.
docs/howto/objective.md says when to use which.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Literal

import torch
from torch import Tensor

from core.jobs.hyperparameter_groups import KlEstimator, Normalize, Scale, Std
from core.rewards import all_equal, equal

Signal = Literal["mixed", "all_zero", "all_one", "equal", "ungraded"]

# The bound of an advantage under a teacher.
MOST_NATS = 5.0
# Beyond every upper bound of a ratio, and with an exponential that float32 has.
LARGEST_LOG_RATIO = 60.0
ROUNDING = 1e-7  # of a log-probability in float32: a token of probability 1 leaves this to the others


def centred(rewards_G: Sequence[float | None]) -> list[float]:
    """Each reward less the mean of its group: better than your siblings is positive.

    An ungraded answer (None) leaves the mean alone and gets 0. A group that agrees gets exactly 0, and so
    does one with fewer than two graded answers: otherwise a division by the std would make rounding errors as large as
    any other difference. Rewards agree up to core.rewards.EQUAL of the largest.
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2 or all_equal(graded):
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(graded)
    return [0.0 if reward is None else reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: Sequence[float | None]) -> list[float]:
    """Each reward less the mean of its graded siblings (RLOO): G / (G - 1) times its distance from the mean of all."""
    graded = sum(reward is not None for reward in rewards_G)
    return [value * graded / (graded - 1) if value else 0.0 for value in centred(rewards_G)]


def deviation(values: Sequence[float], kind: Std) -> float:
    """Standard deviation over n (population) or n - 1 (sample); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return statistics.pstdev(values) if kind == "population" else statistics.stdev(values)


def advantages(
    rewards_PG: Sequence[Sequence[float | None]],
    scale: Scale,
    std: Std | None = "population",
    normalize: Normalize = "papers",
    scores_PG: Sequence[Sequence[float | None]] | None = None,
) -> list[list[float]]:
    """Group-relative advantages (DeepSeekMath section 4.1.2), one for each answer, the same for all its tokens.

    Subtracts the group's mean, then divides by the std of the group (the paper) or of the batch (keeps easy and hard
    prompts in proportion; see `batch_deviation`), by the mean (MaxRL, arXiv 2602.02710: 1 right answer of n gets n - 1,
    and a group without success 0), or does not divide (Dr. GRPO).

    Args:
        scores_PG: the rewards whose std divides, and nothing where they are equal. None: `rewards_PG`.
    """
    scores_PG = rewards_PG if scores_PG is None else scores_PG
    centred_PG = [centred(rewards_G) for rewards_G in rewards_PG]
    if scale == "none":
        return centred_PG
    if scale == "mean":
        return [
            _divided(values_G, statistics.fmean([r for r in rewards_G if r is not None] or [0.0]))
            for values_G, rewards_G in zip(centred_PG, rewards_PG, strict=True)
        ]
    assert std is not None, "a scale needs to know which std"
    if scale == "batch":
        by = batch_deviation(rewards_PG, std, normalize, scores_PG) or 1.0
        return [_divided(values_G, by) for values_G in centred_PG]
    return [
        _divided(values_G, _spread([r for r in scores_G if r is not None], std) or 1.0)
        for values_G, scores_G in zip(centred_PG, scores_PG, strict=True)
    ]


def batch_deviation(
    rewards_PG: Sequence[Sequence[float | None]],
    std: Std,
    normalize: Normalize = "papers",
    scores_PG: Sequence[Sequence[float | None]] | None = None,
) -> float:
    """The std of the rewards of a batch, around their common mean; 0 if no group has signal.

    papers: of all graded answers (Lite PPO, arXiv 2508.08221; TRL's scale_rewards="batch"). signal: of those in groups
    with signal, so that a group without changes nothing, just as if it had not been sampled.

    Args:
        scores_PG: the rewards whose std it is, as in `advantages`.
    """
    scores_PG = rewards_PG if scores_PG is None else scores_PG
    pairs = zip(rewards_PG, scores_PG, strict=True)
    with_signal = [scores_G for rewards_G, scores_G in pairs if any(centred(rewards_G))]
    if not with_signal:
        return 0.0
    counted = scores_PG if normalize == "papers" else with_signal
    return _spread([r for scores_G in counted for r in scores_G if r is not None], std)


def _spread(values: Sequence[float], kind: Std) -> float:
    """The standard deviation; 0 for values that differ by rounding alone."""
    return 0.0 if all_equal(values) else deviation(values, kind)


def _divided(values: Sequence[float], by: float) -> list[float]:
    return [value / by if value else 0.0 for value in values]


def step_advantages(
    rewards_PGJ: Sequence[Sequence[Sequence[float]]],
    scale: Scale,
    std: Std | None = "population",
    normalize: Normalize = "papers",
) -> list[list[list[float]]]:
    """Normalized step rewards (DeepSeekMath section 4.1.3), J of them for each answer; none for one without steps.

    Applies `advantages` to all steps of all answers of a group together.
    """
    flat_PN = [[reward for rewards_J in rewards_GJ for reward in rewards_J] for rewards_GJ in rewards_PGJ]
    normalised_PN = [iter(values_N) for values_N in advantages(flat_PN, scale, std, normalize)]
    return [
        [list(islice(values, len(rewards_J))) for rewards_J in rewards_GJ]
        for values, rewards_GJ in zip(normalised_PN, rewards_PGJ, strict=True)
    ]


def process_advantages(step_rewards: Sequence[float], ends: Sequence[int], length: int) -> list[float]:
    """Advantages of an answer's tokens under process supervision (DeepSeekMath section 4.1.3), one for each of
    `length`.

    `step_rewards` are those of one answer, already normalized over all steps of its group; step j ends at token
    ends[j] (counted from 1, never falling). A token's advantage is the sum of the rewards of the steps that end at
    it or later.
    """
    to_come = [0.0, *accumulate(reversed(step_rewards))][::-1]
    return [to_come[bisect_left(ends, token)] for token in range(1, length + 1)]


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft punishment (eq. 13): 0 up to longest - buffer tokens, from there in a line down to -1 at longest."""
    return max(-1.0, min(0.0, (longest - buffer - length) / buffer))


def answer_mean(values: Tensor, answer: Tensor) -> Tensor:
    """The mean over the tokens of each answer, at each of its tokens. `answer` numbers the answers from 0."""
    sums = values.new_zeros(int(answer.max()) + 1).index_add(0, answer, values)
    return (sums / torch.bincount(answer))[answer]


def answer_sum(values: Tensor, answer: Tensor) -> Tensor:
    """The sum over the tokens of each answer, at each of its tokens."""
    return values.new_zeros(int(answer.max()) + 1).index_add(0, answer, values)[answer]


def surrogate(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """The clipped objective, to be maximised (DeepSeekMath eq. 3; DAPO's two bounds): min(rho A, clip(rho) A).

    `low` and `high` bound the ratio itself: 1 - epsilon and 1 + epsilon. Any one shape.
    """
    # The bound is applied before the exponential: where the clip hides a ratio, infinity times the gradient 0 is not a
    # number.
    capped = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    ratio = torch.where(advantage < 0, log_ratio, capped).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def left_band(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return which ratios left the band in the direction of gain (bool), where `surrogate` has no gradient."""
    ratio = log_ratio.exp()
    return ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))


def distillation_advantages(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Each token's advantage under a teacher: log pi_teacher - log pi_student, within 5 nats of 0. No gradient.

    The policy gradient with it is that of the reverse KL of the next token, KL(student || teacher), where the student
    samples (GKD, arXiv 2306.13649, with lambda = 1; MiniLLM, arXiv 2306.08543). Without the bound, one token that the
    teacher excludes would outweigh the others of its step.
    """
    return (teacher_logp - logp).detach().clamp(-MOST_NATS, MOST_NATS)


def mean_distillation_advantage(logprobs_T: Sequence[float], teacher_T: Sequence[float]) -> float:
    """The mean of an answer's `distillation_advantages`, for reports."""
    return distillation_advantages(torch.tensor(logprobs_T), torch.tensor(teacher_T)).mean().item()


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) of each token by the k1 estimator: log pi_theta - log pi_ref. Of either sign."""
    return logp - ref_logp


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) of each token by the k3 estimator: x - log x - 1, x = pi_ref / pi_theta.

    Never negative, 0 where they agree (DeepSeekMath eq. 4; Schulman, "Approximating KL divergence").
    """
    log_x = ref_logp - logp
    return torch.expm1(log_x) - log_x  # expm1: x - 1 rounds to less than log x where the two agree


def binary_kl(logp: Tensor, new_logp: Tensor) -> Tensor:
    """KL(p || q) of the events "this token" and "another one": p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    That of the whole distributions is at least as much (the data-processing inequality, Cover and Thomas, Elements of
    Information Theory, section 2.8).
    """
    logp, new_logp = logp.clamp(max=-ROUNDING), new_logp.clamp(max=-ROUNDING)
    others, new_others = (torch.log(-torch.expm1(one)) for one in (logp, new_logp))
    return logp.exp() * (logp - new_logp) - torch.expm1(logp) * (others - new_others)


def kl_penalty(logp: Tensor, log_ratio: Tensor, ref_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """k1, k3: rho x the estimate, with the gradient through both factors (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
    k3_plain: the estimate alone, as DeepSeekMath prints it (eqs. 3 and 4). k1_plain: the log-ratio alone (k1 of
    Schulman, "Approximating KL divergence"), which PPO with a KL penalty and introductions to GRPO print. k2: half its
    square, whose gradient is that of k1 with rho where rho is 1.

    The samples come from where rho is 1, so only k1, k2 and k3 have the KL's own gradient in the mean. That of a bare
    k1 is 0 in the mean, and that of a bare k3 is the gradient of the KL the other way round, KL(reference || policy).
    """
    if estimator == "k2":
        return 0.5 * kl_k1(logp, ref_logp) ** 2
    estimate = (kl_k1 if estimator in ("k1", "k1_plain") else kl_k3)(logp, ref_logp)
    return estimate if estimator in ("k1_plain", "k3_plain") else log_ratio.exp() * estimate


def kl_weight(weight: float, warmup_steps: int, steps_taken: int) -> float:
    """Return beta of the next step: it rises in a line and is `weight` from step `warmup_steps` on, as a warm-up of the
    learning rate does.
    """
    return weight * min(1.0, (steps_taken + 1) / warmup_steps) if warmup_steps else weight


def signal(rewards_G: Sequence[float | None]) -> Signal:
    """Classify the rewards of a group. Only "mixed" has signal; the other values say why a group has none.

    "all_one" and "all_zero" mean every graded answer scored exactly that; "equal" any other shared score;
    "ungraded" that fewer than two answers have a score.
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2:
        return "ungraded"
    if not all_equal(graded):
        return "mixed"
    if equal(graded[0], 0.0):
        return "all_zero"
    return "all_one" if equal(graded[0], 1.0) else "equal"
