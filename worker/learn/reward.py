"""The losses of a reward model, an adapter and a head that give each answer one number, and their gradient.

Sources: the loss of pairs is the Bradley-Terry model's (Christiano et al., arXiv 1706.03741; eq. 1 of InstructGPT,
arXiv 2203.02155), with the margin of Llama 2 (arXiv 2307.09288, eq. 2) and the centering of arXiv 2312.09244 (eq. 2).
Scored answers are learned by their squared error, and steps of answers by the cross-entropy of a process reward model
(Math-Shepherd, arXiv 2312.08935).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import logsigmoid, softplus

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.learn.batch import tensors_of
from worker.learn.offline_gradient import OfflineGradient, sequences
from worker.learn.totals import Totals
from worker.model import reward_head
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead
from worker.types import Pack, TrainingSequence


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, centering: float) -> Tensor:
    """-log sigma(r_w - r_l - m) + c (r_w + r_l)^2 of each pair, [N]."""
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


def squared_error(reward: Tensor, score: Tensor) -> Tensor:
    """(r - y)^2 of each answer, [N]."""
    return (reward - score) ** 2


def cross_entropy(reward: Tensor, label: Tensor) -> Tensor:
    """-y log p - (1 - y) log(1 - p) with p = sigma(r) of each step, [N]."""
    return softplus(reward) - label * reward


class RewardGradient(OfflineGradient):
    """The gradient on the adapter and the head."""

    def __init__(
        self, policy: Policy, head: RewardHead, settings: ResolvedOffline, *, token_budget: int
    ) -> None:
        super().__init__(policy, settings, token_budget=token_budget)
        self.head = head

    @property
    def trainable(self) -> list[Parameter]:
        return [*self.policy.trainable, self.head.weight]

    @property
    def nothing(self) -> Pack:
        answer = TrainingSequence((0, 0), (0.0, 0.0), (0.0, 0.0), 1.0, learned_T=(False, True), scores=(0.0,))
        return Pack((0, 0), (answer,) * (2 if self.settings.reward_kind == "pairs" else 1))

    def loss(self, packs: Sequence[Pack]) -> tuple[Tensor, Totals]:
        tensors = tensors_of(packs, self.policy.device)
        reward_N, score_N = reward_head.rewards(self.policy, self.head, tensors), tensors.score_M
        assert score_N is not None
        totals = Totals(tokens=len(reward_N), sequences=sequences(packs))
        if self.settings.reward_kind == "scores":
            loss = squared_error(reward_N, score_N).sum()
            return loss, totals + Totals(loss=loss.item())
        if self.settings.reward_kind == "steps":
            loss = cross_entropy(reward_N, score_N).sum()
            right = ((reward_N > 0) == (score_N > 0.5)).sum().item()
            return loss, totals + Totals(loss=loss.item(), correct=right)
        assert self.settings.centering is not None
        chosen_N, rejected_N = reward_N[0::2], reward_N[1::2]
        loss = bradley_terry(chosen_N, rejected_N, score_N[0::2], centering=self.settings.centering).sum()
        return loss, totals + Totals(
            loss=loss.item(),
            pairs=len(chosen_N),
            correct=(chosen_N > rejected_N).sum().item(),
            chosen=chosen_N.sum().item(),
            rejected=rejected_N.sum().item(),
        )

    def rewards(self, packs: Sequence[Pack]) -> Tensor:
        """The rewards of all answers, in no order."""
        return self.rewards_of_micro_batches(self.micro_batches(packs))

    @torch.no_grad()
    def rewards_of_micro_batches(self, parts: Iterable[Sequence[Pack]]) -> Tensor:
        device = self.policy.device
        found = [reward_head.rewards(self.policy, self.head, tensors_of(part, device)) for part in parts]
        return torch.cat([torch.zeros(0, device=device), *found])
