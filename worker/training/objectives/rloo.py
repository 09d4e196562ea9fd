"""RLOO (arXiv 2402.14740): REINFORCE, where an answer is one action. The clip of its ratio is TRL's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from worker.training import grpo
from worker.training.objective import Mean, Objective, Tokens


@dataclass(frozen=True)
class RlooObjective(Objective):
    """min(s A, clip(s) A), s = product of rho over the answer. Its tokens share the objective in equal parts."""

    mean: ClassVar[Mean] = "sums"
    couples_calls: ClassVar[bool] = True

    def __call__(self, tokens: Tokens) -> Tensor:
        whole = grpo.surrogate(self._log_ratio(tokens), tokens.advantage, self.low, self.high)
        return whole / torch.bincount(tokens.answer)[tokens.answer]

    def clipped(self, tokens: Tokens) -> Tensor:
        return grpo.left_band(self._log_ratio(tokens), tokens.advantage, self.low, self.high)

    def _log_ratio(self, tokens: Tokens) -> Tensor:
        return grpo.answer_sum(tokens.log_ratio, tokens.answer)
