"""The clipped surrogate: one ratio for each token, which has no gradient beyond its bounds."""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from worker.training import grpo
from worker.training.objective import Mean, Objective, Tokens


@dataclass(frozen=True)
class ClippedObjective(Objective):
    """min(rho A, clip(rho) A), as a mean over the tokens of a step: PPO, eq. 7; DAPO, eq. 8; TRL's bnpo.

    With `ratio_max` min(min(rho, ratio_max) A, clip(rho) A), which bounds the ratio of a token with a negative
    advantage (INTELLECT-2, arXiv 2505.07291; TRL's delta). Without one it has no upper bound.
    """

    ratio_max: float | None = None

    @classmethod
    def of(cls, settings: Resolved) -> Self:
        return cls(*settings.ratio_bounds, settings.ratio_max)

    def __call__(self, tokens: Tokens) -> Tensor:
        log_ratio = tokens.log_ratio
        if self.ratio_max is not None:
            # Before the exponential, whose overflow would make the gradient of these tokens NaN.
            log_ratio = torch.where(self._is_beyond(tokens), math.log(self.ratio_max), log_ratio)
        return grpo.surrogate(log_ratio, tokens.advantage, self.low, self.high)

    def clipped(self, tokens: Tokens) -> Tensor:
        left = grpo.left_band(tokens.log_ratio, tokens.advantage, self.low, self.high)
        return left | self._is_beyond(tokens)

    def _is_beyond(self, tokens: Tokens) -> Tensor:
        if self.ratio_max is None:
            return torch.zeros_like(tokens.advantage, dtype=torch.bool)
        return (tokens.advantage < 0) & (tokens.log_ratio > math.log(self.ratio_max))


@dataclass(frozen=True)
class GrpoObjective(ClippedObjective):
    """As a mean over answers of their mean over tokens (DeepSeekMath eq. 3)."""

    mean: ClassVar[Mean] = "answers"


@dataclass(frozen=True)
class DrGrpoObjective(ClippedObjective):
    """With a constant divisor in place of the length of an answer (arXiv 2503.20783)."""

    mean: ClassVar[Mean] = "longest"
