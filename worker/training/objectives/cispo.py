"""CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4-5): the ratio is capped, and no token loses its gradient."""

from dataclasses import dataclass

from torch import Tensor

from worker.training.objective import Objective, Tokens


@dataclass(frozen=True)
class CispoObjective(Objective):
    """sg[clip(rho)] A log pi: the cap shrinks the gradient of a token and never removes it."""

    def __call__(self, tokens: Tokens) -> Tensor:
        return tokens.log_ratio.exp().clamp(self.low, self.high).detach() * tokens.advantage * tokens.logp

    def clipped(self, tokens: Tokens) -> Tensor:
        return tokens.log_ratio.exp() > self.high
