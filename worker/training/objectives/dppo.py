"""DPPO (arXiv 2602.04879): a trust region on the probability of a token in place of its ratio.

A bound of the ratio punishes rare tokens, whose ratio is large although little mass moves, and lets frequent ones move
far.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from core.jobs.hyperparameter_groups import Divergence
from core.jobs.hyperparameters import Resolved
from worker.training import grpo
from worker.training.objective import Objective, Tokens


@dataclass(frozen=True)
class DppoObjective(Objective):
    """keep rho A, where rho has no cap and a token that is not kept has no gradient.

    With p the probability now and q that of the sampler (prime-rl's default loss; verl's dppo_tv and dppo_kl):
    tv: dropped if A > 0 and p - q > high, or if A <= 0 and q - p > low.
    kl: as tv, with KL(q || p) of the events "this token" and "another one" in place of the distance.
    """

    divergence: Divergence = "tv"

    @classmethod
    def of(cls, settings: Resolved) -> Self:
        assert settings.clip_low is not None and settings.clip_high is not None
        assert settings.divergence is not None
        return cls(settings.clip_low, settings.clip_high, settings.divergence)

    def __call__(self, tokens: Tokens) -> Tensor:
        is_kept = ~self.clipped(tokens)
        # Before the exponential, whose overflow would make the gradient of a dropped token NaN.
        return torch.where(is_kept, tokens.log_ratio, 0.0).exp() * tokens.advantage * is_kept

    def clipped(self, tokens: Tokens) -> Tensor:
        logp, old_logp = tokens.logp.detach(), tokens.old_logp
        rise = logp.exp() - old_logp.exp()
        distance = rise.abs() if self.divergence == "tv" else grpo.binary_kl(old_logp, logp)
        rises = (tokens.advantage > 0) & (rise > 0) & (distance > self.high)
        falls = (tokens.advantage <= 0) & (rise < 0) & (distance > self.low)
        return rises | falls
