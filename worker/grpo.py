"""GRPO and its relatives as pure functions: rewards to advantages, log-probabilities to a loss.

Sources: GRPO is DeepSeekMath (arXiv 2402.03300, eqs. 3-4), Dr. GRPO is arXiv 2503.20783, DAPO is
arXiv 2503.14476 (eq. 8). docs/training.md says when to use which.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["grpo", "dr_grpo", "dapo"]
Scale = Literal["group", "batch", "none"]
Std = Literal["population", "sample"]

# Rewards this close are equal: the std of a group that agrees must not be its rounding error.
_EQUAL = 1e-8


def centred(rewards_G: Sequence[float | None]) -> list[float]:
    """Each reward less the mean of its group: better than your siblings is positive.

    An ungraded answer (None) leaves the mean alone and gets 0. A group that agrees gets exactly 0, and so
    does one with fewer than two graded answers.
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2 or max(graded) - min(graded) <= _EQUAL:
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(graded)
    return [0.0 if reward is None else reward - mean for reward in rewards_G]


def deviation(values: Sequence[float], kind: Std) -> float:
    """Standard deviation over n (population) or n - 1 (sample); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return statistics.pstdev(values) if kind == "population" else statistics.stdev(values)


def advantages(
    rewards_PG: Sequence[Sequence[float | None]], scale: Scale, std: Std = "population"
) -> list[list[float]]:
    """Group-relative advantages (DeepSeekMath eq. 4), one for each answer, the same for all its tokens.

    Centred on the group's mean, then divided by the std of the group (the paper), of all rewards of the
    batch (keeps easy and hard prompts in proportion), or by nothing (Dr. GRPO).
    """
    centred_PG = [centred(rewards_G) for rewards_G in rewards_PG]
    if scale == "none":
        return centred_PG
    if scale == "batch":
        batch = deviation([r for rewards_G in rewards_PG for r in rewards_G if r is not None], std)
        return [_divided(values_G, batch) for values_G in centred_PG]
    return [
        _divided(values_G, deviation([r for r in rewards_G if r is not None], std))
        for values_G, rewards_G in zip(centred_PG, rewards_PG, strict=True)
    ]


def _divided(values: Sequence[float], by: float) -> list[float]:
    return [value / by if value else 0.0 for value in values]


def process_advantages(step_rewards: Sequence[float], ends: Sequence[int], length: int) -> list[float]:
    """Advantages of an answer's tokens under process supervision (DeepSeekMath eq. 5), one for each of `length`.

    `step_rewards` are those of one answer, already normalised over all steps of its group; step j ends at token
    ends[j] (counted from 1). A token's advantage is the sum of the rewards of the steps that end at it or later.
    """
    return [
        sum(reward for reward, end in zip(step_rewards, ends, strict=True) if end >= token)
        for token in range(1, length + 1)
    ]


def token_weights(lengths: Sequence[int], loss: Loss, max_completion_tokens: int) -> list[float]:
    """What each token of each answer counts in the loss, so that the loss of a step is one plain sum.

    grpo: the mean over tokens of each answer, then over answers. dapo: the mean over all tokens.
    dr_grpo: the sum over tokens, over answers x the longest answer allowed (a constant: no length bias).
    `lengths` are those of all answers that count, over the whole step, whatever the micro-batches.
    """
    if loss == "grpo":
        return [1.0 / (len(lengths) * length) for length in lengths]
    if loss == "dapo":
        return [1.0 / sum(lengths)] * len(lengths)
    return [1.0 / (len(lengths) * max_completion_tokens)] * len(lengths)


def surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The clipped objective of each token, to be maximised (DeepSeekMath eq. 3; DAPO's two bounds).

    min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logp - old_logp). Any one shape.
    """
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantage, clipped * advantage)


def was_clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Which tokens the clip silenced (bool): those whose ratio left the band in the direction of gain."""
    ratio = torch.exp(logp - old_logp)
    return ((ratio > 1.0 + clip_high) & (advantage > 0)) | ((ratio < 1.0 - clip_low) & (advantage < 0))


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) of each token by the k3 estimator: x - log x - 1, x = pi_ref / pi_theta.

    Never negative, 0 where they agree (DeepSeekMath eq. 4; Schulman, "Approximating KL divergence").
    """
    log_x = ref_logp - logp
    return torch.expm1(log_x) - log_x  # expm1: x - 1 rounds to less than log x where the two agree


def loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl: float = 0.0,
    ref_logp: Tensor | None = None,
) -> Tensor:
    """The part of the step's loss that these tokens make, to be minimised: micro-batches simply add up.

    All tensors are flat, one entry a token. `kl` is the paper's beta and needs `ref_logp`.
    """
    objective = surrogate(logp, old_logp, advantage, clip_low, clip_high)
    if kl > 0.0:
        assert ref_logp is not None, "a KL penalty needs the reference's log-probabilities"
        objective = objective - kl * kl_k3(logp, ref_logp)
    return -(weight * objective).sum()


def signal(rewards_G: Sequence[float | None]) -> Literal["mixed", "all_zero", "all_one", "equal", "ungraded"]:
    """What a group has to teach: only a mixed one does; the others say why not.

    "all_one" and "all_zero" mean every graded answer scored exactly that; "equal" any other shared score;
    "ungraded" that fewer than two answers have a score.
    """
    graded = [reward for reward in rewards_G if reward is not None]
    if len(graded) < 2:
        return "ungraded"
    if max(graded) - min(graded) > _EQUAL:
        return "mixed"
    if math.isclose(graded[0], 0.0, abs_tol=_EQUAL):
        return "all_zero"
    return "all_one" if math.isclose(graded[0], 1.0, abs_tol=_EQUAL) else "equal"
