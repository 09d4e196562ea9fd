"""The training loop of one attempt at a job: sample, grade, update, validate, record, checkpoint. Read this file first.

`Run` depends on protocols and on what is recorded, so tests run the real loop on fakes in seconds. worker/assemble.py
builds a Run for a claimed job, and worker/child.py is the process that the supervisor starts for each attempt.
"""

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from core.jobs.hyperparameters import Resolved
from core.jobs.remaining import RemainingSteps
from core.jobs.thresholds import Thresholds
from core.results.step_metrics import StepMetrics
from worker import progress
from worker.clock import Clock
from worker.interfaces import Checkpoints, Exporters, Recorder, Scorer, Trainer
from worker.progress import PROGRESS
from worker.record import alerts, delivery, divergence, metrics, monitors, stopping
from worker.record.gpu_ratio import RatioMeasurement
from worker.record.history import History
from worker.record.verdict import row_scores
from worker.rollout.collect import Collector
from worker.rollout.prompts import PromptStream
from worker.rollout.samplers import Sampler, Sampling
from worker.types import AnswerKey, GradedStep, GraderPart, Group, Prompt, TokenValues, UpdateMetrics


class RunOutcome(enum.Enum):
    DONE = "done"
    INTERRUPTED = "interrupted"  # checkpointed at a step boundary, to be continued


@dataclass
class Run:
    """One attempt at one job, from its newest checkpoint to the last step, or until `stop_requested` returns True."""

    settings: Resolved
    seed: int
    graders: Sequence[GraderPart]  # by name in the metrics; none if a teacher scores the answers
    train_prompts: PromptStream
    valid_prompts: Sequence[Prompt]
    sampler: Sampler
    rewards: Scorer
    trainer: Trainer
    recorder: Recorder
    checkpoints: Checkpoints
    exporters: Exporters
    stop_requested: Callable[[], bool] = lambda: False
    # The job fails when more than half of the grades of this many steps in a row do.
    failing_steps: int = 3
    held_to: str = ""  # the schema that answers are JSON of (core/response_format.py)
    gpus: int = 1  # GPU-seconds in each second of this run
    thresholds: Thresholds = field(default_factory=Thresholds)  # of the warnings
    ratio: RatioMeasurement | None = None  # if some GPUs sample while others learn
    history: History = field(default_factory=History, init=False)  # the recorded steps, from `train` on
    collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.settings,
            self.seed,
            self.train_prompts,
            self.sampler,
            self.rewards,
            self.trainer,
            self.held_to,
        )

    async def train(self) -> RunOutcome:
        step = self.checkpoints.restore(self.trainer)
        recorded, self.history = self.recorder.recorded()
        self.exporters.start(recorded)
        if step == 0 and not recorded and await self.measure_base():
            return RunOutcome.INTERRUPTED  # with nothing to checkpoint: it will start from the base again
        while step < self.settings.total_steps:
            step += 1
            with progress.in_step(step):
                ended = await self.step(step)
            if ended is RunOutcome.DONE:
                break
            if ended is RunOutcome.INTERRUPTED and step < self.settings.total_steps:
                return RunOutcome.INTERRUPTED
        delivery.deliver(
            self.checkpoints, self.recorder, self.exporters, self.history, self.settings, self.thresholds
        )
        return RunOutcome.DONE

    async def step(self, step: int) -> RunOutcome | None:
        """One turn of the loop. If it is the run's last one, the policy is checkpointed and the answer says why."""
        clock = Clock()
        groups_P, resampled_P = await self.collector.collect(step, clock)
        with clock("training"), PROGRESS.phase("training"):
            update = await asyncio.to_thread(self.trainer.step)
        valid_P = await self.validate(clock) if self.is_measured(step) else None

        data = self.measure(step, clock, groups_P, resampled_P, update, valid_P)
        early = stopping.reason_to_stop([*self.history.steps, data], self.settings)
        if early is not None and valid_P is None:
            valid_P = await self.validate(clock)
            data = self.measure(step, clock, groups_P, resampled_P, update, valid_P)
        pause = self.record(
            data, groups_P, resampled_P, valid_P, tokens=update.tokens, is_last=early is not None
        )
        stop = pause or self.stop_requested()
        alerts.report(groups_P, self.history, self.recorder, self.settings, self.failing_steps)
        alerts.require_signal(data, self.recorder, self.settings)
        alerts.report_ratio(self.ratio, data, clock.seconds["training"], self.recorder)
        self.check([*groups_P, *resampled_P, *(valid_P or [])])
        if valid_P is not None or stop:
            reward = metrics.mean_reward(valid_P) if valid_P is not None else None
            with PROGRESS.phase("saving"):
                self.checkpoints.save(
                    self.trainer, step=step, valid_reward=reward, metrics=data.to_data(), for_pause=pause
                )
        if early is not None:
            self.recorder.inform(early.message, {"step": step, **early.evidence})
            return RunOutcome.DONE
        return RunOutcome.INTERRUPTED if stop else None

    async def measure_base(self) -> bool:
        """Step 0: how good the model is before it has learned anything. Returns whether the job is to pause."""
        with progress.in_step(0):
            clock = Clock()
            valid_P = await self.validate(clock)
            pause = self.record(self.measure(0, clock, [], [], None, valid_P), [], [], valid_P)
            self.check(valid_P)
            return pause

    async def validate(self, clock: Clock) -> list[Group]:
        await self.collector.sampler_is_free()
        settings = self.settings
        sampling = Sampling(
            group_size=settings.eval_samples,
            temperature=settings.eval_temperature,
            max_completion_tokens=settings.max_completion_tokens,
            # The same numbers are drawn every time, so that its curve shows the policy and not the dice.
            job_seed=self.seed + 1,
            step=0,
            held_to=self.held_to,
            thinking_budget=settings.thinking_budget,
        )
        answers = self.sampler.sample(self.valid_prompts, sampling)
        with clock("eval"):
            return await self.rewards.grade(self.valid_prompts, answers, sampling.group_size, Clock())

    def check(self, groups_P: Sequence[Group]) -> None:
        """Raise TrainingDiverged if the newest step was computed by a model that is no longer usable."""
        divergence.check_answers(rollout for group in groups_P for rollout in group.rollouts_G)
        skipped = stopping.in_a_row(self.history.steps, lambda one: one.skipped_updates == 1)
        divergence.check_updates(skipped, self.settings.total_steps)

    def compared_rewards(self, train_P: Sequence[Group]) -> list[Sequence[float | None]]:
        """The rewards that the loss compares with each other, by group; none if it compares those of all groups."""
        if self.settings.has_token_rewards:
            return []
        return [group.taught_by(self.settings.supervision) for group in train_P if not group.has_teacher]

    def is_measured(self, step: int) -> bool:
        return step % self.settings.eval_interval == 0 or step == self.settings.total_steps

    def ahead(self, step: int) -> RemainingSteps:
        """Count the steps after this one, with and without a validation."""
        left = range(step + 1, self.settings.total_steps + 1)
        validated = sum(map(self.is_measured, left))
        return RemainingSteps(len(left) - validated, validated, self.is_measured(step + 1))

    def measure(
        self,
        step: int,
        clock: Clock,
        train_P: Sequence[Group],
        resampled_P: Sequence[Group],
        update: UpdateMetrics | None,
        valid_P: Sequence[Group] | None,
    ) -> StepMetrics:
        return metrics.of_step(
            step=step,
            total_steps=self.settings.total_steps,
            graders=self.graders,
            supervision=self.settings.supervision,
            train_P=train_P,
            resampled_P=resampled_P,
            valid_P=valid_P,
            update=update,
            seconds=clock.seconds,
            ahead_seconds=self.collector.ahead_seconds if train_P else None,
            gpus=self.gpus,
            base_scores=self.history.base_scores,
            pass_score=self.settings.eval_pass_score,
        )

    def record(
        self,
        data: StepMetrics,
        train_P: Sequence[Group],
        resampled_P: Sequence[Group],
        valid_P: Sequence[Group] | None,
        *,
        tokens: Mapping[AnswerKey, TokenValues] = MappingProxyType({}),
        is_last: bool = False,
    ) -> bool:
        ahead = RemainingSteps(0, 0, False) if is_last else self.ahead(data.step)
        stored: list[GradedStep] = []
        if train_P:
            stored.append(
                GradedStep("train", [*train_P, *resampled_P], self.settings, own=len(train_P), tokens=tokens)
            )
        if valid_P is not None:
            stored.append(GradedStep("valid", valid_P))
        scores = None if valid_P is None else row_scores(valid_P)
        found = monitors.check(
            [*self.history.steps, data.without_sections()], self.thresholds, self.history.warned
        )
        found += monitors.alike_rewards(self.compared_rewards(train_P), self.history.warned)
        pause = self.recorder.step(data, stored, ahead=ahead, valid_scores=scores, findings=found)
        self.history.add(data, [finding.rule for finding in found])
        if data.step == 0:
            self.history.base_scores = scores
        self.exporters.put(data)
        return pause
