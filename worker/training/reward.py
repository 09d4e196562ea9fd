"""The losses of a reward model, an adapter and a head that give each answer one number, and their arguments.

Sources: the loss of pairs is the Bradley-Terry model's (Christiano et al., arXiv 1706.03741; eq. 1 of InstructGPT,
arXiv 2203.02155), with the margin of Llama 2 (arXiv 2307.09288, eq. 2) and the centering of arXiv 2312.09244 (eq. 2).
Scored answers are learned by their squared error, and steps of answers by the cross-entropy of a process reward model
(Math-Shepherd, arXiv 2312.08935).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import logsigmoid, softplus

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model import reward_head
from worker.model.batch import tensors_of
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead
from worker.training import grpo
from worker.training.loss import SHORTEST, Batch, GradientSums, Slice, StepValues
from worker.training.row_loss import RowLoss
from worker.types import Pack


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, centering: float) -> Tensor:
    """-log sigma(r_w - r_l - m) + c (r_w + r_l)^2 of each pair, [N]."""
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


def squared_error(reward: Tensor, score: Tensor) -> Tensor:
    """(r - y)^2 of each answer, [N]."""
    return (reward - score) ** 2


def cross_entropy(reward: Tensor, label: Tensor) -> Tensor:
    """-y log p - (1 - y) log(1 - p) with p = sigma(r) of each step, [N]."""
    return softplus(reward) - label * reward


class RewardLoss(RowLoss):
    """The sum over the pairs, the scored answers or the steps of a micro-batch. It trains the adapter and the head."""

    def __init__(self, policy: Policy, head: RewardHead, settings: ResolvedOffline) -> None:
        super().__init__(policy, settings)
        self.head = head

    @property
    def trainable(self) -> list[Parameter]:
        return [*self.policy.trainable, self.head.weight]

    @property
    def filler(self) -> Pack:
        answer = replace(SHORTEST, learned_T=(False, True), scores=(0.0,))
        return Pack((0, 0), (answer,) * (2 if self.settings.reward_kind == "pairs" else 1))

    def measured_part(self, pack: Pack) -> Pack:
        return pack

    def prediction(self, part: Slice) -> Any:
        return part.output

    def kl_from(self, pack: Pack, before: Any) -> Tensor:
        """Of the predicted probabilities: that the preferred answer of a pair wins, or that a step is right."""
        before_N, after_N = before, reward_head.rewards(self.policy, self.head, self.laid_out(Batch([pack])))
        if self.settings.reward_kind == "pairs":
            before_N, after_N = (each[0::2] - each[1::2] for each in (before_N, after_N))
        return grpo.binary_kl(*(logsigmoid(each.double()) for each in (before_N, after_N)))

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        tensors = tensors_of(batch.packs, self.policy.device)
        reward_N, score_N = reward_head.rewards(self.policy, self.head, tensors), tensors.score_M
        assert score_N is not None
        self.keep_output(batch, reward_N)
        sums = GradientSums(tokens=len(reward_N), sequences=batch.sequences)
        if self.settings.reward_kind == "scores":
            loss = squared_error(reward_N, score_N).sum()
            return loss, sums + GradientSums(loss=loss.item())
        if self.settings.reward_kind == "steps":
            loss = cross_entropy(reward_N, score_N).sum()
            right = ((reward_N > 0) == (score_N > 0.5)).sum().item()
            return loss, sums + GradientSums(loss=loss.item(), correct=right)
        assert self.settings.centering is not None
        chosen_N, rejected_N = reward_N[0::2], reward_N[1::2]
        loss = bradley_terry(chosen_N, rejected_N, score_N[0::2], centering=self.settings.centering).sum()
        return loss, sums + GradientSums(
            loss=loss.item(),
            pairs=len(chosen_N),
            correct=(chosen_N > rejected_N).sum().item(),
            chosen=chosen_N.sum().item(),
            rejected=rejected_N.sum().item(),
        )

    def rewards(self, batches: Iterable[Batch]) -> Tensor:
        """The rewards of all answers, in no order, on the CPU."""
        device = self.policy.device
        rewards = [torch.zeros(0)]
        for batch in batches:
            rewards_N = reward_head.rewards(self.policy, self.head, tensors_of(batch.packs, device))
            if not batch.is_filler:
                rewards.append(rewards_N.cpu())
        return torch.cat(rewards)
