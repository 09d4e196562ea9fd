"""GSPO (arXiv 2507.18071, eqs. 5-7): one ratio for each answer, the geometric mean of those of its tokens."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from worker.training import grpo
from worker.training.objective import Mean, Objective, Tokens


@dataclass(frozen=True)
class GspoObjective(Objective):
    """min(s A, clip(s) A), s = exp(mean of log rho over the answer), clipped and differentiated as one ratio."""

    mean: ClassVar[Mean] = "answers"
    couples_calls: ClassVar[bool] = True

    def __call__(self, tokens: Tokens) -> Tensor:
        return grpo.surrogate(self._log_ratio(tokens), tokens.advantage, self.low, self.high)

    def clipped(self, tokens: Tokens) -> Tensor:
        return grpo.left_band(self._log_ratio(tokens), tokens.advantage, self.low, self.high)

    def _log_ratio(self, tokens: Tokens) -> Tensor:
        return grpo.answer_mean(tokens.log_ratio, tokens.answer)
