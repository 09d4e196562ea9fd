"""Train on given answers: an optimizer step for each batch of rows, by the gradient of the job's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from core.jobs.offline_hyperparameters import ResolvedOffline
from graders.types import TokenUsage
from worker.learn.offline_gradient import OfflineGradient
from worker.learn.offline_ranks import DistributedOffline
from worker.learn.optimizer import AdapterOptimizer, optimizer_of
from worker.learn.reward import RewardGradient
from worker.learn.soft_targets import SoftTargetGradient
from worker.learn.teacher import TeacherPolicy, TopTeacher
from worker.learn.totals import Totals
from worker.learn.trained import read_state, trained_of
from worker.learn.world import World
from worker.model import reward_head
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead, Scale
from worker.sharing.turns import TURNS
from worker.types import Pack


@dataclass(frozen=True)
class OfflineMetrics:
    """Statistics of a step or of a validation; before the update of the step."""

    loss: float
    tokens: int  # that are learned
    sequences: int
    token_accuracy: float | None = None  # supervised: share of tokens that the model thinks likeliest
    # Preference; `reward` is beta h, or beta times the mean log-probability for losses without a reference.
    reward_accuracy: float | None = None  # share of pairs in which the preferred answer has more
    reward_margin: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    grad_norm: float | None = None
    skipped: bool = False  # the gradient was not finite, so the step was not taken
    teacher_usage: TokenUsage | None = None  # of one on a server

    @classmethod
    def of(cls, totals: Totals, *, grad_norm: float | None = None, skipped: bool = False) -> "OfflineMetrics":
        measured = cls(totals.loss / totals.counted, totals.tokens, totals.sequences)
        measured = replace(measured, grad_norm=grad_norm, skipped=skipped)
        if totals.answers and not totals.pairs:
            others = totals.answers - totals.desirable
            chosen = totals.chosen / totals.desirable if totals.desirable else None
            rejected = totals.rejected / others if others else None
            return replace(measured, chosen_reward=chosen, rejected_reward=rejected)
        if not totals.pairs:
            return replace(measured, token_accuracy=totals.correct / totals.tokens)
        return replace(
            measured,
            reward_accuracy=totals.correct / totals.pairs,
            reward_margin=(totals.chosen - totals.rejected) / totals.pairs,
            chosen_reward=totals.chosen / totals.pairs,
            rejected_reward=totals.rejected / totals.pairs,
        )


class OfflineTrainer:
    """AdamW on the policy's trainable weights in float32: the adapter's, or all of the model."""

    def __init__(
        self,
        policy: Policy,
        settings: ResolvedOffline,
        *,
        token_budget: int,
        beat: Callable[[], None] = lambda: None,
        world: World | None = None,
        own: OfflineGradient | None = None,
    ) -> None:
        """`beat` is called after each step, and after each part of a validation.

        Args:
            world: its ranks compute a share of the gradient.
            own: the gradient of another loss than that of the settings.
        """
        self.policy = policy
        self.own = own or OfflineGradient(policy, settings, token_budget=token_budget)
        self.ranks = None if world is None else DistributedOffline(self.own, world)
        self.gradient = self.ranks or self.own
        self.trained = trained_of(self.own, optimizer_of(policy, settings, world), world)
        self.steps_taken = 0
        self.beat = beat

    @property
    def optimizer(self) -> AdapterOptimizer:
        return self.trained.optimizer

    @TURNS
    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """One update with these rows."""
        totals = self.gradient.add(self.prepared(packs))
        norm = self.trained.step(totals.counted, self.steps_taken)
        self.steps_taken += 1  # also of a skipped step, so that the schedule depends on the step alone
        self.beat()
        return self.metrics(totals, grad_norm=norm, skipped=norm is None)

    @TURNS
    def measure(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """The metrics of these rows under the current policy."""
        totals = Totals()
        for first in range(0, len(packs), 64):
            totals += self.gradient.measure(self.prepared(packs[first : first + 64]))
            self.beat()
        return self.metrics(totals)

    def prepared(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        """The rows with what rank 0 alone can read of them."""
        return packs

    def metrics(self, totals: Totals, **update: Any) -> OfflineMetrics:
        return OfflineMetrics.of(totals, **update)

    def start_from_policy(self) -> None:
        """Take the current adapter for the reference, in place of the base model."""
        self.trained.keep_reference()

    def save(self, folder: Path) -> None:
        state = {**self.trained.save(folder), "steps_taken": self.steps_taken}
        torch.save(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        state = read_state(folder / "trainer.pt")
        self.trained.load(folder, state)
        self.steps_taken = state["steps_taken"]


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
        world: World | None = None,
    ) -> None:
        """`scale`: that of scores and of steps. None: that of the rewards of `measured`, which are pairs."""
        self.of_rewards = RewardGradient(policy, head, settings, token_budget=token_budget)
        super().__init__(
            policy, settings, token_budget=token_budget, beat=beat, world=world, own=self.of_rewards
        )
        self.settings = settings
        self.head, self.scale, self.measured = head, scale, measured
        self.trained = trained_of(self.own, optimizer_of(policy, settings, world, [head.weight]), world)

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
        scale = self.scale or Scale.of((self.ranks or self.of_rewards).rewards(self.measured))
        reward_head.write(folder, self.head, scale, reward_head.template_hash(self.policy.tokenizer))

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.start_from_head(folder)

    def start_from_head(self, folder: Path) -> None:
        """Take the weights of the saved head."""
        with torch.no_grad():
            self.head.weight.copy_(reward_head.read_head(folder, self.policy.device).weight)


class SoftTargetTrainer(OfflineTrainer):
    """AdamW on the adapter, with the forward KL to a teacher as the loss."""

    def __init__(
        self,
        policy: Policy,
        teacher: TeacherPolicy | TopTeacher,
        settings: ResolvedOffline,
        *,
        token_budget: int,
        beat: Callable[[], None] = lambda: None,
        world: World | None = None,
    ) -> None:
        in_memory = teacher if isinstance(teacher, TeacherPolicy) else None
        self.served = None if isinstance(teacher, TeacherPolicy) else teacher
        self.soft_targets = SoftTargetGradient(policy, in_memory, settings, token_budget=token_budget)
        super().__init__(
            policy, settings, token_budget=token_budget, beat=beat, world=world, own=self.soft_targets
        )
        self.top_k = settings.top_k

    def prepared(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        if self.served is None:
            return packs
        assert self.top_k is not None, "without it, a teacher on a server is refused"
        return self.served.with_top(packs, self.top_k)

    def metrics(self, totals: Totals, **update: Any) -> OfflineMetrics:
        measured = super().metrics(totals, **update)
        return measured if self.served is None else replace(measured, teacher_usage=self.served.usage())
