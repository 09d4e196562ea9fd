"""The training loop of one attempt at a job that learns from its file: update, validate, record, checkpoint.

The counterpart of worker/run.py for supervised, dpo and reward model jobs, and for distillation by `logits`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from core.jobs.offline_hyperparameters import ResolvedOffline
from core.jobs.remaining import RemainingSteps
from core.jobs.verdict import counted
from core.results.step_metrics import StepMetrics
from graders.types import TokenUsage
from worker import progress
from worker.clock import Clock
from worker.interfaces import Checkpoints, Exporters, Recorder
from worker.learn.offline import OfflineMetrics
from worker.offline.rows import TokenizedRow
from worker.offline.stream import RowStream, packs_of, sample
from worker.progress import PROGRESS
from worker.record import alerts, divergence
from worker.record.metrics import usage_by_model
from worker.run import RunOutcome
from worker.types import Pack

# The end of training is clearly worse than its best epoch if its validation loss is higher by this share.
OVERFIT = 0.02


class OfflineTraining(Protocol):
    def step(self, packs: Sequence[Pack]) -> OfflineMetrics: ...
    def measure(self, packs: Sequence[Pack]) -> OfflineMetrics: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass
class OfflineRun:
    """One attempt at one job, from its newest checkpoint to the last step, or until `stop_requested` returns True."""

    settings: ResolvedOffline
    seed: int
    train_rows: RowStream
    valid_rows: Sequence[TokenizedRow]
    trainer: OfflineTraining
    recorder: Recorder
    checkpoints: Checkpoints
    exporters: Exporters
    stop_requested: Callable[[], bool] = lambda: False
    start: str = "the base model"  # the model that the job started from
    gpus: int = 1  # GPU-seconds in each second of this run
    teacher: str | None = None  # the name under which the tokens of one on a server are counted
    losses: dict[int, float] = field(
        default_factory=dict, init=False
    )  # of the whole validation file, by step
    skipped: int = field(
        default=0, init=False
    )  # consecutive updates without a finite gradient, to the newest

    async def train(self) -> RunOutcome:
        step = self.checkpoints.restore(self.trainer)
        recorded, _ = self.recorder.recorded()
        self.losses = {one.step: one.full_valid_loss for one in recorded if one.full_valid_loss is not None}
        self.exporters.start(recorded)
        if step == 0 and not recorded and self.valid_rows and await self.measure_base():
            return RunOutcome.INTERRUPTED
        while step < self.settings.total_steps:
            step += 1
            with progress.in_step(step):
                stop = await self.step(step)
            if stop and step < self.settings.total_steps:
                return RunOutcome.INTERRUPTED
        if not self.valid_rows:  # nothing has measured the weights after the last update
            divergence.check_loss((await self.validate(self.train_rows.batch(step))).loss)
        self.exporters.close("succeeded")
        self.report_the_end()
        self.recorder.succeed(self.checkpoints.newest())
        return RunOutcome.DONE

    async def step(self, step: int) -> bool:
        """One turn of the loop. Returns whether the run is to stop at this step."""
        clock, settings = Clock(), self.settings
        batch = self.train_rows.batch(step)
        with clock("training"), PROGRESS.phase("training", len(batch)):
            update = await asyncio.to_thread(self.trainer.step, batch)
        is_end = step % settings.steps_per_epoch == 0
        some = whole = None
        if self.valid_rows:
            with clock("eval"):
                if step % self.interval == 0 or step == settings.total_steps:
                    rows = sample(self.valid_rows, settings.batch_size, seed=self.seed, step=step)
                    some = await self.validate(rows)
                if is_end:
                    whole = await self.validate(packs_of(self.valid_rows))
        data = self.measured(step, clock, update, some, whole)
        pause = self.record(data)
        stop = pause or self.stop_requested()
        self.check(step, update, [one.loss for one in (some, whole) if one is not None])
        if is_end or stop or step % self.interval == 0:
            self.checkpoints.save(
                self.trainer,
                step=step,
                valid_reward=None,
                metrics=data.to_data(),
                for_pause=pause,
                for_epoch=is_end,
                is_last=step == settings.total_steps,
            )
        return stop

    async def measure_base(self) -> bool:
        """Step 0: the validation loss before anything is learned. Returns whether the job is to pause."""
        clock = Clock()
        with progress.in_step(0), clock("eval"):
            whole = await self.validate(packs_of(self.valid_rows))
        pause = self.record(self.measured(0, clock, None, None, whole))
        divergence.check_loss(whole.loss)
        return pause

    def check(self, step: int, update: OfflineMetrics, valid_losses: Sequence[float]) -> None:
        """Report a skipped update. Raise TrainingDiverged if the model is no longer usable."""
        self.skipped = self.skipped + 1 if update.skipped else 0
        if self.skipped == 1:
            self.recorder.warn(alerts.SKIPPED, {"step": step})
        for loss in valid_losses:
            divergence.check_loss(loss)
        divergence.check_updates(self.skipped, self.settings.total_steps)

    async def validate(self, rows: Sequence[Pack]) -> OfflineMetrics:
        with PROGRESS.phase("validation", len(rows)):
            return await asyncio.to_thread(self.trainer.measure, rows)

    @property
    def interval(self) -> int:
        """Steps between two measurements on a part of the validation file, and between two checkpoints."""
        return max(1, self.settings.total_steps // 20)

    def measured(
        self,
        step: int,
        clock: Clock,
        update: OfflineMetrics | None,
        some: OfflineMetrics | None,
        whole: OfflineMetrics | None,
    ) -> StepMetrics:
        data: dict[str, Any] = {"step": step, "total_steps": self.settings.total_steps}
        if self.gpus > 1:
            data["gpus"] = self.gpus
        for split, metrics in (("train", update), ("valid", some), ("full_valid", whole)):
            if metrics is not None:
                data |= named(split, metrics)
        if update is not None:
            data |= {
                "grad_norm": update.grad_norm,
                "skipped_updates": int(update.skipped),
                "trained_sequences": update.sequences,
                "trained_tokens": update.tokens,
            }
            if clock.seconds.get("training"):
                data["training_tokens_per_second"] = update.tokens / clock.seconds["training"]
        used: dict[str, dict[str, TokenUsage]] = {}
        for split, parts in (("train", [update]), ("valid", [some, whole])):
            usages = [one.teacher_usage for one in parts if one is not None and one.teacher_usage is not None]
            if self.teacher is not None and usages:
                used[split] = {self.teacher: sum(usages, TokenUsage())}
        if used:
            data["model_graders_token_usage"] = usage_by_model(used)
        data["timing"] = {"step": {**clock.seconds, "full_iteration": sum(clock.seconds.values())}}
        return StepMetrics.model_validate(data)

    def record(self, data: StepMetrics) -> bool:
        left = range(data.step + 1, self.settings.total_steps + 1)
        validated = sum(self.ends_epoch(step) for step in left)
        ahead = RemainingSteps(len(left) - validated, validated, self.ends_epoch(data.step + 1))
        if data.full_valid_loss is not None:
            self.losses[data.step] = data.full_valid_loss
        pause = self.recorder.step(data, [], ahead=ahead)
        self.exporters.put(data)
        return pause

    def ends_epoch(self, step: int) -> bool:
        return bool(self.valid_rows) and step % self.settings.steps_per_epoch == 0

    def report_the_end(self) -> None:
        """Warn if the delivered model has a clearly higher validation loss than the start or an earlier epoch."""
        last = self.losses.get(self.settings.total_steps)
        if last is None:
            return
        best = min(self.losses, key=self.losses.__getitem__)
        if last <= self.losses[best] * (1 + OVERFIT):
            return
        data = {"step": self.settings.total_steps, "full_valid_loss": last, "lowest_at_step": best}
        if best == 0:
            self.recorder.warn(
                f"The validation loss is {last:.3f}, and that of {self.start} was {self.losses[0]:.3f}: training "
                "made the model worse on these rows. A lower learning_rate_multiplier or fewer epochs may help.",
                data,
            )
            return
        epochs = best // self.settings.steps_per_epoch
        self.recorder.warn(
            f"The model overfits: its validation loss is {last:.3f}, and was {self.losses[best]:.3f} at step {best}. "
            f"The checkpoint of step {best} is better if it is still kept; else train for {counted(epochs, 'epoch')}.",
            data,
        )


def named(split: str, metrics: OfflineMetrics) -> dict[str, float]:
    """The metrics of a split by OpenAI's names; those that the method does not have are absent."""
    data: dict[str, float] = {f"{split}_loss": metrics.loss}
    if metrics.token_accuracy is not None:
        data[f"{split}_mean_token_accuracy"] = metrics.token_accuracy
        if split == "train":
            data["train_accuracy"] = metrics.token_accuracy
    for name in ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"):
        value = getattr(metrics, name)
        if value is not None and f"{split}_mean_{name}" in StepMetrics.model_fields:
            data[f"{split}_mean_{name}"] = value
    return data
