"""The loss of sampled answers: the objective of a token, and how tokens and answers are averaged.

Each loss has a class in worker/training/objectives/ and a line in registry.py there. The loss of a step is a plain sum
over tokens, so micro-batches and groups add up: a token's part is its weight in its answer (known with the answer), its
advantage (known with the group, but for the std of the batch), and one number for the whole batch, `normaliser`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

from torch import Tensor

from core.jobs.hyperparameter_groups import KlEstimator
from core.jobs.hyperparameters import Resolved
from worker.training import grpo

# answers: the mean over answers of their mean over tokens. sums: the mean over answers of their sum. longest: the sum
# over tokens by answers x the longest answer allowed, a constant without a bias of length. tokens: the mean over all
# tokens of an optimizer step, whatever the micro-batches.
Mean = Literal["answers", "sums", "longest", "tokens"]


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch. All tensors are flat [M], with one entry for each token."""

    logp: Tensor  # under the current policy, with its gradient
    old_logp: Tensor  # under the policy that the ratio is relative to
    advantage: Tensor
    answer: Tensor  # the number of its answer, from 0

    @cached_property
    def log_ratio(self) -> Tensor:
        """Of the policies: one node of the graph, so that the gradients of all its uses are added up in one order."""
        return self.logp - self.old_logp


@dataclass(frozen=True)
class Objective(ABC):
    """The objective of each token. `low` and `high` bound the ratio itself: 1 - epsilon and 1 + epsilon."""

    low: float
    high: float

    mean: ClassVar[Mean] = "tokens"
    # Whether it has a ratio over the tokens of a whole answer, so that no answer may be in two micro-batches. Without
    # one it is a sum over tokens, and the branches of an episode may be.
    couples_calls: ClassVar[bool] = False

    @classmethod
    def of(cls, settings: Resolved) -> Self:
        """Return the objective of a job, with its bounds."""
        return cls(*settings.ratio_bounds)

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the objective of each token [M], to be maximized."""

    @abstractmethod
    def clipped(self, tokens: Tokens) -> Tensor:
        """Return which tokens the clip touches (bool [M]), for the metric `clip_fraction`."""

    @classmethod
    def token_weight(cls, length: int) -> float:
        """Return the weight of each token of an answer of this length, before the division by `normaliser`."""
        return 1.0 / length if cls.mean == "answers" else 1.0

    @classmethod
    def normaliser(cls, lengths: Sequence[int], longest: int) -> float:
        """Return the divisor of the sum over a batch.

        Args:
            lengths: those of all answers that count in one optimizer step (worker/training/contributions.py).
            longest: the most tokens that an answer may have.
        """
        match cls.mean:
            case "answers" | "sums":
                return float(len(lengths))
            case "longest":
                return float(len(lengths) * longest)
            case "tokens":
                return float(sum(lengths))


def token_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    weight: Tensor,
    answer: Tensor,
    *,
    objective: Objective,
    kl: float = 0.0,
    kl_estimator: KlEstimator | None = None,
    ref_logp: Tensor | None = None,
    log_ratio_penalty: float = 0.0,
) -> Tensor:
    """The part of the step's loss that these tokens make, to be minimized: micro-batches add up.

    Args:
        kl: the paper's beta, which needs the estimator and `ref_logp`.
        log_ratio_penalty: of the squared log-ratio, (log pi - log pi_old)^2 (Kimi K2.5, arXiv 2602.02276): a pull
            towards the policy that the ratio is relative to, also of tokens that the objective leaves out.
    """
    tokens = Tokens(logp, old_logp, advantage, answer)
    value = objective(tokens)
    if kl > 0.0:
        assert ref_logp is not None and kl_estimator is not None, "a KL penalty needs a reference"
        value = value - kl * grpo.kl_penalty(logp, tokens.log_ratio, ref_logp, kl_estimator)
    if log_ratio_penalty > 0.0:
        value = value - log_ratio_penalty * tokens.log_ratio**2
    return -(weight * value).sum()
