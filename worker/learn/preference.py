"""Losses of pairs of answers as pure functions: log-probabilities to a loss.

Sources: DPO is arXiv 2305.18290 (eq. 7), its conservative form with label smoothing is E. Mitchell's note on cDPO, IPO
is arXiv 2310.12036 (eq. 17), SimPO is arXiv 2405.14734, ORPO is arXiv 2403.07691 (eqs. 4, 6 and 7), KTO is arXiv
2402.01306 (eq. 8).

Axis `_N`: pairs. `h` is log pi(y|x) - log pi_ref(y|x), summed over the tokens of an answer; `logp` the sum without the
reference; `length` its tokens. Each function returns the loss of each pair, [N].
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# log(1 - p) of a probability that rounds to 1 would be -inf (ORPO).
_LARGEST_LOGP = -1e-6


def dpo(h_chosen: Tensor, h_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigma(beta (h_w - h_l)), DPO eq. 7. With smoothing e: (1 - e) L(z) + e L(-z)."""
    z_N = beta * (h_chosen - h_rejected)
    return -(1 - label_smoothing) * logsigmoid(z_N) - label_smoothing * logsigmoid(-z_N)


def ipo(h_chosen: Tensor, h_rejected: Tensor, *, beta: float) -> Tensor:
    """(h_w - h_l - 1 / (2 tau))^2, IPO eq. 17; `beta` is its tau."""
    return (h_chosen - h_rejected - 1 / (2 * beta)) ** 2


def simpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigma(beta (mean log p_w - mean log p_l) - gamma), the objective of SimPO."""
    return -logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def orpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float) -> Tensor:
    """-mean log p_w - lambda log sigma(log odds_w - log odds_l), ORPO eqs. 6 and 7; `beta` is its lambda."""
    return -mean_chosen - beta * logsigmoid(_log_odds(mean_chosen) - _log_odds(mean_rejected))


def kto(
    h: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    z0: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO eq. 8: w_D (1 - sigma(beta (h - z0))) of desirable answers, and w_U (1 - sigma(beta (z0 - h))) of others.

    Args:
        h: of single answers, [A]; the result is [A] as well.
        desirable: bool [A].
        z0: an estimate of KL(pi || pi_ref) without a gradient: the mean of h of answers to other prompts, at least 0.
    """
    return torch.where(
        desirable,
        desirable_weight * torch.sigmoid(beta * (z0 - h)),
        undesirable_weight * torch.sigmoid(beta * (h - z0)),
    )


def _log_odds(mean_logp: Tensor) -> Tensor:
    """log(P / (1 - P)) of P = exp(mean log p), ORPO eq. 4."""
    capped = mean_logp.clamp(max=_LARGEST_LOGP)
    return capped - torch.log1p(-capped.exp())
