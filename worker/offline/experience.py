"""Experience of a run that learns from the rows of its file: of given answers, or of the probabilities of a teacher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs.offline_hyperparameters import ResolvedOffline
from core.step_metrics import StepMetrics
from graders.types import TokenUsage
from worker.clock import Clock
from worker.device_work import DEVICE_WORK
from worker.history import History, Steps
from worker.interfaces import Checkpoints, Recorder, StepDetails
from worker.offline.rows import TokenizedRow
from worker.offline.stream import RowStream, packs_of, sample
from worker.progress import PROGRESS
from worker.recording import alerts, delivery, divergence
from worker.recording.metrics import usage_by_model
from worker.training.offline import OfflineMetrics, OfflineTrainer
from worker.training.trust_region import STEP_METRICS
from worker.training.updates import changed_nothing
from worker.types import Pack, Rollback, Schedule, Stop

# A run has this many validations on some rows, and checkpoints beside those of its epochs.
INTERVALS = 20


@dataclass
class RowExperience:
    """Implements Experience. A validation has the metrics of some rows as "valid", and of all rows as "full_valid"."""

    settings: ResolvedOffline
    seed: int
    train_rows: RowStream
    valid_rows: Sequence[TokenizedRow]
    trainer: OfflineTrainer
    gpus: int = 1  # GPU-seconds in each second of this run
    teacher: str | None = None  # the name under which the tokens of one on a server are counted

    @property
    def schedule(self) -> Schedule:
        settings = self.settings
        return Schedule(
            settings.total_steps,
            validate_every=settings.steps_per_epoch if self.valid_rows else None,
            partial_every=max(1, settings.total_steps // INTERVALS),
            epoch_steps=settings.steps_per_epoch,
        )

    async def learn(self, step: int, clock: Clock) -> OfflineMetrics:
        batch = self.train_rows.batch(step)
        with clock("training"), PROGRESS.phase("training", len(batch)):
            return await DEVICE_WORK.run(self.trainer.step, batch)

    async def validate(self, step: int, clock: Clock) -> dict[str, OfflineMetrics]:
        validated: dict[str, OfflineMetrics] = {}
        with clock("eval"):
            if self.schedule.is_partly_validated(step):
                rows = sample(self.valid_rows, self.settings.batch_size, seed=self.seed, step=step)
                validated["valid"] = await self._measured(rows)
            if self.schedule.is_validated(step):
                validated["full_valid"] = await self._measured(packs_of(self.valid_rows))
        return validated

    async def _measured(self, rows: Sequence[Pack]) -> OfflineMetrics:
        with PROGRESS.phase("validation", len(rows)):
            return await DEVICE_WORK.run(self.trainer.measure, rows)

    def measure(
        self,
        step: int,
        clock: Clock,
        history: History,
        learned: OfflineMetrics | None,
        validated: Mapping[str, OfflineMetrics] | None,
    ) -> StepMetrics:
        data: dict[str, Any] = {"step": step, "total_steps": self.settings.total_steps}
        if self.gpus > 1:
            data["gpus"] = self.gpus
        for split, metrics in (validated or {}).items():
            data |= metrics_of_split(split, metrics)
        if learned is not None:
            data |= metrics_of_split("train", learned) | {
                "grad_norm": learned.grad_norm,
                "skipped_updates": int(learned.skipped),
                **{name: getattr(learned, name) for name in STEP_METRICS},
                "trained_sequences": learned.sequences,
                "trained_tokens": learned.tokens,
                "not_updated_tokens" if changed_nothing(learned) else "learned_tokens": learned.tokens,
            }
            if clock.seconds.get("training"):
                data["training_tokens_per_second"] = learned.tokens / clock.seconds["training"]
        if used := self._teacher_usage(learned, validated):
            data["model_graders_token_usage"] = usage_by_model(used)
        phases = {"eval": 0.0} if self.valid_rows else {}
        total = sum(clock.seconds.values())
        data["timing"] = {"step": {**phases, **clock.seconds, "full_iteration": total}}
        return StepMetrics.model_validate(data)

    def _teacher_usage(
        self, learned: OfflineMetrics | None, validated: Mapping[str, OfflineMetrics] | None
    ) -> dict[str, dict[str, TokenUsage]]:
        """The tokens that a teacher on a server read, by split."""
        splits = {"train": [] if learned is None else [learned], "valid": list((validated or {}).values())}
        used: dict[str, dict[str, TokenUsage]] = {}
        for split, parts in splits.items():
            usages = [one.teacher_usage for one in parts if one.teacher_usage is not None]
            if self.teacher is not None and usages:
                used[split] = {self.teacher: sum(usages, TokenUsage())}
        return used

    def reason_to_stop(self, steps: Steps) -> Stop | None:
        return None

    def rollback(self, history: History, checkpoints: Checkpoints) -> Rollback | None:
        return None

    def details(
        self,
        data: StepMetrics,
        history: History,
        learned: OfflineMetrics | None,
        validated: Mapping[str, OfflineMetrics] | None,
    ) -> StepDetails:
        return StepDetails()

    def check(
        self,
        history: History,
        recorder: Recorder,
        clock: Clock,
        learned: OfflineMetrics | None,
        validated: Mapping[str, OfflineMetrics] | None,
    ) -> None:
        alerts.report_skipped_update(history.steps, recorder)
        alerts.report_updates(history, recorder, self.settings.step_kl)
        for one in (validated or {}).values():
            divergence.check_loss(one.loss)
        divergence.check_updates(history.steps, self.settings.total_steps)

    async def conclude(self, history: History, recorder: Recorder, checkpoints: Checkpoints) -> int:
        """The last checkpoint is the model, as at OpenAI."""
        if not self.valid_rows:  # nothing has measured the weights after the last update
            last = self.train_rows.batch(self.settings.total_steps)
            divergence.check_loss((await self._measured(last)).loss)
        delivery.report_overfitting(history.steps, recorder, self.settings)
        return checkpoints.newest()


def metrics_of_split(split: str, metrics: OfflineMetrics) -> dict[str, float]:
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
