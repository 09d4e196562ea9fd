"""Advantages from rewards of single tokens, with the KL in them, as pure functions.

Sources: the reward is DeepSeekMath's (arXiv 2402.03300, eq. 2); the advantages and their normalization are those of
REINFORCE++ (arXiv 2501.03262v9).

Everything here is in float64 and has no gradient. Tensors are flat, one entry for each trained token; `answer_M`
numbers the answers from 0 without gaps, and the tokens of an answer follow one another in the order of sampling, those
of an episode in all its branches.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from core.jobs.hyperparameter_groups import Std
from core.rewards import equal


def token_rewards(score_M: Tensor, kl_M: Tensor, answer_M: Tensor, beta: float) -> Tensor:
    """The reward of each token (DeepSeekMath eq. 2): -beta KL, and the answer's score at its last token.

    Args:
        score_M: the score of the answer, at each of its tokens.
        kl_M: the k1 estimate, log pi_old - log pi_ref, with the policy that sampled.
    """
    last_M = torch.ones_like(answer_M, dtype=torch.bool)
    last_M[:-1] = answer_M[1:] != answer_M[:-1]
    return torch.where(last_M, score_M.double(), 0.0) - beta * kl_M.double()


def discounted_sums(values_M: Tensor, answer_M: Tensor, discount: float) -> Tensor:
    """S_t = x_t + discount S_{t+1} within each answer, and 0 after its end."""
    lengths = torch.bincount(answer_M.cpu())
    padded = pad_sequence([*torch.split(values_M.double().cpu(), lengths.tolist())], batch_first=True)
    later = padded.new_zeros(len(lengths))
    for at in reversed(range(padded.shape[1])):
        later = padded[:, at] + discount * later
        padded[:, at] = later
    return padded[torch.arange(padded.shape[1]) < lengths[:, None]].to(values_M.device)


def reinforce_plus_plus(reward_M: Tensor, answer_M: Tensor) -> Tensor:
    """A_t = score - beta sum over i >= t of KL_i (REINFORCE++): the reward to go, before `normalized`."""
    return discounted_sums(reward_M, answer_M, 1.0)


def normalized(advantage_M: Tensor, mean: float, std: float) -> Tensor:
    """(A - mean) / std, over all tokens of the step (global in REINFORCE++); 0 where they differ by rounding only."""
    return torch.zeros_like(advantage_M) if equal(mean + std, mean) else (advantage_M - mean) / std


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of some values. They add up (Chan, Golub and LeVeque, 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values_M: Tensor) -> "Moments":
        values_M = values_M.double()
        mean = values_M.mean()
        return cls(len(values_M), mean.item(), ((values_M - mean) ** 2).sum().item())

    def __add__(self, other: "Moments") -> "Moments":
        if not self.count or not other.count:
            return self if self.count else other
        count, apart = self.count + other.count, other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return Moments(count, mean, squares)

    def std(self, kind: Std) -> float:
        """Over n (population) or n - 1 (sample); 0 for fewer than two values."""
        degrees = self.count if kind == "population" else self.count - 1
        return math.sqrt(self.squares / degrees) if self.count > 1 else 0.0


@dataclass(frozen=True)
class StepMoments:
    """Of all tokens of a step, before its first update."""

    advantages: Moments = Moments()
    returns: Moments = Moments()  # with a value head

    def __add__(self, other: "StepMoments") -> "StepMoments":
        return StepMoments(self.advantages + other.advantages, self.returns + other.returns)

    @property
    def explained_variance(self) -> float | None:
        """1 - Var(R - V) / Var(R), where R - V is the advantage: 1 at best, 0 for a constant.

        None: there are no values, or all returns are equal.
        """
        return None if self.returns.squares == 0 else 1 - self.advantages.squares / self.returns.squares
