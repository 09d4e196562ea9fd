"""Correct for answers that another policy, or another engine, has sampled, as pure functions.

The sampler's probabilities differ from the trainer's for the same weights. Everything here is without a gradient.
Tensors are flat [M], with one entry for each trained token; `answer` numbers the answers from 0, and each of them is
whole. A token with weight 0 stays in the divisor of the loss, and its answer in the mean of its group.
"""

import torch
from torch import Tensor

from core.jobs.hyperparameter_groups import Importance, Rejection
from core.jobs.hyperparameters import Resolved
from worker.training import grpo

MAX_LOG_RATIO = 20.0  # a log-ratio in a k3 estimate is at most this, so that its exponential is finite (verl)


def weights_of(old_logp: Tensor, sampled_logp: Tensor, answer: Tensor, settings: Resolved) -> Tensor:
    """Return the weights of a job's tokens; 0 leaves a token out.

    Args:
        old_logp: under the policy at the start of the step.
    """
    log_ratio = (old_logp - sampled_logp).detach()
    by_level = grpo.answer_sum(log_ratio, answer) if settings.importance_level == "answer" else log_ratio
    weights = weight(by_level, settings.importance, settings.importance_cap, settings.importance_floor)
    if settings.importance_reject is None:
        return weights
    assert settings.reject_high is not None
    bounds = (settings.reject_low or 0.0, settings.reject_high)
    return weights * is_kept(log_ratio, answer, settings.importance_reject, bounds)


def weight(log_ratio: Tensor, kind: Importance, cap: float | None, floor: float | None = None) -> Tensor:
    """Return the weights of tokens, or of answers, from log pi_old - log pi_sampler: its sum over an answer.

    truncate: min(ratio, cap), "TIS" (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training"; of answers verl's `rollout_is: sequence`). mask: the ratio, and 0 outside of floor to cap ("MIS", IcePop;
    of answers TRL's `sequence_mask`). none: 1.
    """
    if kind == "none":
        return torch.ones_like(log_ratio)
    assert cap is not None
    ratio = log_ratio.detach().exp()
    if kind == "truncate":
        return ratio.clamp(max=cap)
    assert floor is not None
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)


def is_kept(log_ratio: Tensor, answer: Tensor, by: Rejection, bounds: tuple[float, float]) -> Tensor:
    """Return which tokens are of answers whose mean is within the bounds (bool).

    With x = log pi_old - log pi_sampler: geometric is exp(mean of x) (verl's `seq_mean_k1`, SkyRL), k3 is the mean of
    e^x - 1 - x (verl's `seq_mean_k3`). Neither grows with the length of an answer, as a product does.
    """
    low, high = bounds
    if by == "geometric":
        mean = grpo.answer_mean(log_ratio, answer).exp()
    else:
        x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        mean = grpo.answer_mean(torch.expm1(x) - x, answer)
    return (mean >= low) & (mean <= high)


def is_recent(
    logp: Tensor, sampled_logp: Tensor, advantage: Tensor, answer: Tensor, threshold: float
) -> Tensor:
    """Return which tokens DeepSeek-V3.2's off-policy mask keeps (bool; arXiv 2512.02556, eq. 9).

    Those with an advantage of at least 0, and those of answers with mean(log pi_sampler - log pi) <= threshold, under
    the current policy: so it differs between the updates of a step.
    """
    staleness = grpo.answer_mean((sampled_logp - logp).detach(), answer)
    return (advantage >= 0) | (staleness <= threshold)
