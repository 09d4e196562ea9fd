"""Train a reward model: an adapter and a head that give each answer one number.

Sources: the loss of pairs is the Bradley-Terry model's (Christiano et al., arXiv 1706.03741; eq. 1 of InstructGPT,
arXiv 2203.02155), with the margin of Llama 2 (arXiv 2307.09288, eq. 2) and the centering of arXiv 2312.09244 (eq. 2).
Scored answers are learned by their squared error, and steps of answers by the cross-entropy of a process reward model
(Math-Shepherd, arXiv 2312.08935, eq. 2).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.learn.batch import tensors_of
from worker.learn.offline import OfflineGradient, OfflineMetrics, OfflineTrainer, optimizer_of, sequences
from worker.learn.totals import Totals
from worker.model import reward_head
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead, Scale
from worker.sharing.turns import TURNS
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


class RewardGradient(OfflineGradient):
    """The gradient on the adapter and the head."""

    def __init__(
        self, policy: Policy, head: RewardHead, settings: ResolvedOffline, *, token_budget: int
    ) -> None:
        super().__init__(policy, settings, token_budget=token_budget)
        self.head = head

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

    @torch.no_grad()
    def rewards(self, packs: Sequence[Pack]) -> Tensor:
        """The rewards of all answers, in no order."""
        parts = [tensors_of(part, self.policy.device) for part in self._micro_batches(packs)]
        return torch.cat([reward_head.rewards(self.policy, self.head, one) for one in parts])


class RewardTrainer(OfflineTrainer):
    """AdamW on the adapter and the head. Checkpoints have the scale of the rewards at that step."""

    def __init__(
        self,
        policy: Policy,
        head: RewardHead,
        settings: ResolvedOffline,
        *,
        token_budget: int,
        scale: Scale | None,
        measured: Sequence[Pack],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`scale`: that of scores and of steps. None: that of the rewards of `measured`, which are pairs."""
        super().__init__(policy, settings, token_budget=token_budget, beat=beat)
        self.settings = settings
        self.head, self.scale, self.measured = head, scale, measured
        self.of_rewards = RewardGradient(policy, head, settings, token_budget=token_budget)
        self.gradient = self.of_rewards
        self.optimizer = optimizer_of(policy, settings, [head.weight])

    def metrics(self, totals: Totals, **update: Any) -> OfflineMetrics:
        """Accuracies are of pairs and of steps."""
        if totals.pairs:
            return super().metrics(totals, **update)
        measured = OfflineMetrics(totals.loss / totals.tokens, totals.tokens, totals.sequences, **update)
        if self.settings.reward_kind == "scores":
            return measured
        return replace(measured, reward_accuracy=totals.correct / totals.tokens)

    @TURNS  # the scale of the rewards is measured
    def save(self, folder: Path) -> None:
        super().save(folder)
        scale = self.scale or Scale.of(self.of_rewards.rewards(self.measured))
        reward_head.write(folder, self.head, scale, reward_head.template_hash(self.policy.tokenizer))

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.start_from_head(folder)

    def start_from_head(self, folder: Path) -> None:
        """Take the weights of the saved head."""
        with torch.no_grad():
            self.head.weight.copy_(reward_head.read_head(folder, self.policy.device).weight)
