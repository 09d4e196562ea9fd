"""Train on given answers: an optimizer step for each batch of rows, by the gradient of the job's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from core.jobs.offline_hyperparameters import ResolvedOffline
from graders.types import TokenUsage
from worker.device_work import DEVICE_WORK
from worker.model import reward_head
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead, Scale
from worker.training.distributed import gradient_of
from worker.training.gradient import StepMemory
from worker.training.loss import GradientSums
from worker.training.losses import row_loss_of
from worker.training.optimizer import AdapterOptimizer, optimizer_of
from worker.training.reward import RewardLoss
from worker.training.row_loss import RowLoss
from worker.training.soft_targets import SoftTargetLoss
from worker.training.teacher import TeacherPolicy, TopTeacher
from worker.training.trainable_weights import read_state, save_state, trained_of
from worker.training.trust_region import TrustRegion, step_metrics
from worker.training.world import World
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
    learning_rate: float | None = None  # these as in UpdateMetrics
    update_kl: float | None = None
    update_retries: int | None = None
    rejected_updates: int | None = None
    unmeasured_updates: int | None = None
    teacher_usage: TokenUsage | None = None  # of one on a server

    @classmethod
    def of(cls, totals: GradientSums, **update: Any) -> "OfflineMetrics":
        """`update`: the fields of the step along their gradient; none of a validation."""
        measured = cls(totals.loss / totals.counted, totals.tokens, totals.sequences, **update)
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
        loss: RowLoss | None = None,
        memory: StepMemory | None = None,
        head: Sequence[Parameter] = (),
    ) -> None:
        """`beat` is called after each step, and after each part of a validation.

        Args:
            head: as in AdapterOptimizer.
            world: its ranks compute a share of the gradient.
            loss: None: that of the settings.
            memory: as `gradient_of` says.
        """
        self.policy = policy
        self.loss = loss or row_loss_of(policy, settings)
        self.gradient = gradient_of(self.loss, token_budget, world, memory=memory)
        self.trained = trained_of(self.loss, optimizer_of(policy, settings, world, head), world)
        self.trust = TrustRegion(settings.step_kl)
        self.steps_taken = 0
        self.beat = beat

    @property
    def optimizer(self) -> AdapterOptimizer:
        return self.trained.optimizer

    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """One update with these rows."""
        totals = self.add(self.prepared(packs))
        taken = self.trust.measured_step(self.gradient, self.trained, totals.counted, self.steps_taken)
        self.gradient.end()
        self.steps_taken += 1  # also of a skipped step, so that the schedule depends on the step alone
        self.beat()
        return self.metrics(totals, grad_norm=taken.norm, skipped=taken.norm is None, **step_metrics([taken]))

    def add(self, packs: Sequence[Pack]) -> GradientSums:
        """Add the gradient of the summed loss of these rows."""
        self.gradient.add(packs, self.loss.step_values(self.gradient, packs))
        return self.gradient.collect()

    def measure(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """The metrics of these rows under the current policy."""
        totals = GradientSums()
        for first in range(0, len(packs), 64):
            rows = self.prepared(packs[first : first + 64])
            totals += self.gradient.measure(rows, self.loss.step_values(self.gradient, rows))
            self.beat()
        return self.metrics(totals)

    def prepared(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        """The rows with what rank 0 alone can read of them."""
        return packs

    def metrics(self, totals: GradientSums, **update: Any) -> OfflineMetrics:
        return OfflineMetrics.of(totals, **update)

    def start_from_policy(self) -> None:
        """Take the current adapter for the reference, in place of the base model."""
        self.trained.keep_reference()

    def save(self, folder: Path) -> None:
        state = {
            **self.trained.save(folder),
            "steps_taken": self.steps_taken,
            "step_rate": self.trust.rate,
        }
        save_state(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        state = read_state(folder / "trainer.pt")
        self.trained.load(folder, state)
        self.steps_taken = state["steps_taken"]
        self.trust.rate = state["step_rate"]


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
        memory: StepMemory | None = None,
    ) -> None:
        """`scale`: that of scores and of steps. None: that of the rewards of `measured`, which are pairs."""
        loss = RewardLoss(policy, head, settings)
        super().__init__(
            policy,
            settings,
            token_budget=token_budget,
            beat=beat,
            world=world,
            loss=loss,
            memory=memory,
            head=[head.weight],
        )
        self.settings = settings
        self.head, self.scale, self.measured = head, scale, measured

    def metrics(self, totals: GradientSums, **update: Any) -> OfflineMetrics:
        """Accuracies are of pairs and of steps."""
        if totals.pairs:
            return super().metrics(totals, **update)
        measured = OfflineMetrics(totals.loss / totals.tokens, totals.tokens, totals.sequences, **update)
        if self.settings.reward_kind == "scores":
            return measured
        return replace(measured, reward_accuracy=totals.correct / totals.tokens)

    def save(self, folder: Path) -> None:
        super().save(folder)
        with DEVICE_WORK:
            scale = self.scale or Scale.of(self.rewards(self.measured))
        reward_head.write(folder, self.head, scale, reward_head.template_hash(self.policy.tokenizer))

    def rewards(self, packs: Sequence[Pack]) -> Tensor:
        """The rewards of all answers, in no order."""
        return torch.cat(self.gradient.of_packs(RewardLoss.rewards, packs))

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
        memory: StepMemory | None = None,
    ) -> None:
        in_memory = teacher if isinstance(teacher, TeacherPolicy) else None
        self.served = None if isinstance(teacher, TeacherPolicy) else teacher
        self.soft_targets = SoftTargetLoss(policy, in_memory, settings)
        super().__init__(
            policy,
            settings,
            token_budget=token_budget,
            beat=beat,
            world=world,
            loss=self.soft_targets,
            memory=memory,
        )
        self.top_k = settings.top_k

    def prepared(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        if self.served is None:
            return packs
        assert self.top_k is not None, "without it, a teacher on a server is refused"
        return self.served.with_top(packs, self.top_k)

    def metrics(self, totals: GradientSums, **update: Any) -> OfflineMetrics:
        measured = super().metrics(totals, **update)
        return measured if self.served is None else replace(measured, teacher_usage=self.served.usage())
