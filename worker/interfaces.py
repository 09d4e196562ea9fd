"""The protocols on which the training loops depend. Each names the class that a run gets."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from core.jobs.remaining import RemainingSteps
from core.jobs.verdict import Verdict
from core.step_metrics import StepMetrics
from worker.clock import Clock
from worker.history import History, Steps
from worker.sampling import Answer
from worker.types import (
    Ended,
    Finding,
    GradedStep,
    Group,
    Pause,
    Prompt,
    Rollback,
    RowScores,
    Schedule,
    Stop,
    UpdateMetrics,
)

Learned = TypeVar("Learned")
Validated = TypeVar("Validated")


class Savable(Protocol):
    """A trainer, as checkpoints store it."""

    def save(self, folder: Path) -> None:
        """Write the adapter (PEFT format) or the whole model, and the state that `load` needs to resume exactly."""
        ...

    def load(self, folder: Path) -> None: ...


class Trainer(Savable, Protocol):
    """worker/training/trainer.py: PeftTrainer."""

    def add(self, group: Group) -> None:
        """Add a graded group to the step. May be called while other answers of the step are still being sampled."""
        ...

    def step(self) -> UpdateMetrics:
        """Update the policy with the groups added since the last step. The sampler then draws from the new policy."""
        ...

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        """In the context the sampler reads the policy of `steps` steps ago, at most `off_policy_steps`.

        No step may be taken meanwhile. Returns how many steps ago it is: fewer where there were no more.
        """
        ...


class Scorer(Protocol):
    """Scores answers, by a grader or a teacher.

    worker/rollout/experience.py: Rewards. worker/rollout/distillation_rewards.py: TeacherRewards.
    """

    async def grade(
        self,
        prompts_P: Sequence[Prompt],
        answers: AsyncIterator[Answer],
        group_size: int,
        clock: Clock,
        use: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """Return the scored groups, with prompts and members in order.

        Args:
            use: called with each group in a thread, in an order that does not depend on the time of grading.
        """
        ...


class Recorder(Protocol):
    """Records the run for its job. worker/recording/recorder.py: JobRecorder."""

    @property
    def method(self) -> str:
        """The job's method, which is a part of the paths of its hyperparameters."""
        ...

    @property
    def parent_model(self) -> str | None:
        """The tuned model that the job trains further; None: it trains the base model."""
        ...

    @property
    def start_name(self) -> str:
        """The model that the job started from, in sentences."""
        ...

    @property
    def is_held_out(self) -> bool:
        """Whether the validation rows are not those that the job trains on."""
        ...

    def recorded(self) -> tuple[list[StepMetrics], History]:
        """The steps that earlier attempts recorded."""
        ...

    def row_scores(self, step: int) -> RowScores | None:
        """The row scores of the validation of this step, if they were recorded."""
        ...

    def step(
        self,
        measured: StepMetrics,
        stored: Sequence[GradedStep],
        *,
        ahead: RemainingSteps,
        valid_scores: RowScores | None = None,
        shadow_scores: RowScores | None = None,
        findings: Sequence[Finding] = (),
        alarm: Pause | None = None,
    ) -> bool:
        """Record one finished step. Returns whether the job must pause, because of its user, its budget or an alarm.

        Raises:
            LeaseLost: the job was cancelled or another worker has claimed it; nothing was recorded.
        """
        ...

    def inform(self, message: str, data: dict[str, Any]) -> None: ...

    def warn(self, message: str, data: dict[str, Any]) -> None: ...

    def judged(self, verdict: Verdict, message: str, *, level: str, data: dict[str, Any]) -> None:
        """Record the verdict with an event."""
        ...

    def succeed(self, step: int) -> None:
        """Deliver the checkpoint of this step, and end the job, in one transaction."""
        ...


class Checkpoints(Protocol):
    """Of the job. worker/recording/checkpoints.py: JobCheckpoints."""

    def restore(self, trainer: Savable) -> int | None:
        """Load the newest valid checkpoint into the trainer, and return its step; 0 without one.

        None: there is none any more, and only another attempt loads the weights that the job starts from.

        Raises:
            StoreEmpty: the store has no blobs at all. Nothing was loaded or deleted.
            UnknownFormat: this version cannot read the checkpoint. Nothing was loaded or deleted.
            InvalidModel: the files are undamaged but do not fit the model. Nothing was deleted.
        """
        ...

    def save(
        self,
        trainer: Savable,
        *,
        step: int,
        valid_reward: float | None,
        metrics: dict[str, Any],
        for_pause: bool = False,
        for_epoch: bool = False,
        is_last: bool = False,
    ) -> None:
        """Store the trainer's state as the checkpoint of this step, and delete those it replaces.

        A checkpoint with a validation reward, of a pause or of an epoch is published as a model, `…:ckpt-step-N`;
        others are used only to resume.

        Args:
            is_last: it will get the job's own name.
        """
        ...

    def best(self) -> int | None:
        """The step of the one with the highest validation reward, of equals the earliest; None: none was graded."""
        ...

    def newest(self) -> int:
        """The step of the newest one, of a job that has one."""
        ...

    def steps(self) -> Sequence[int]:
        """The steps of all checkpoints."""
        ...

    def roll_back(self, rollback: Rollback) -> bool:
        """Have the next attempt continue as `rollback` says, and record its event.

        Returns:
            False: nothing has changed, because a later checkpoint is in use by an alias or by another job.
        """
        ...

    def delete_resume_files(self) -> None:
        """Delete what only a run that resumes reads."""
        ...


class Exporters(Protocol):
    """Who else gets the metrics. worker/recording/exporters/threads.py: ExporterThreads."""

    def start(self, recorded: Sequence[StepMetrics]) -> None: ...

    def put(self, data: StepMetrics) -> None: ...

    def close(self, ended: Ended) -> None:
        """Send what waits, and say how the attempt ended. A second call does nothing."""
        ...

    def abandon(self) -> None:
        """Send nothing more: another process may be writing to the same runs by now."""
        ...


@dataclass(frozen=True)
class StepDetails:
    """The parts of a step's record beside its metrics."""

    stored: Sequence[GradedStep] = ()
    valid_scores: RowScores | None = None  # None: no answers were validated
    shadow_scores: RowScores | None = None  # None: there is no shadow grader either
    findings: Sequence[Finding] = ()
    alarm: Pause | None = None  # of a finding that pauses the job


class Experience(Protocol[Learned, Validated]):
    """The source that a run learns from and is validated on.

    Sampled answers with their grades (worker/rollout/experience.py: RolloutExperience), or the rows of a file
    (worker/offline/experience.py: RowExperience). `Learned` is what one step learned from and what its update
    measured, `Validated` is one validation.
    """

    @property
    def trainer(self) -> Savable: ...

    @property
    def schedule(self) -> Schedule: ...

    async def learn(self, step: int, clock: Clock) -> Learned:
        """Collect what this step learns from, and update the policy with it."""
        ...

    async def validate(self, step: int, clock: Clock) -> Validated:
        """Measure the policy as it is after this step. Step 0 is the model that the job starts from."""
        ...

    def measure(
        self, step: int, clock: Clock, history: History, learned: Learned | None, validated: Validated | None
    ) -> StepMetrics:
        """The metrics of a step; nothing is learned in step 0. `history` has the steps before it."""
        ...

    def reason_to_stop(self, steps: Steps) -> Stop | None:
        """The reason to end the run after the last of these steps; None: it continues."""
        ...

    def rollback(self, history: History, checkpoints: Checkpoints) -> Rollback | None:
        """Return how the run continues if its newest step shows that the model has collapsed; None: as it is."""
        ...

    def details(
        self, data: StepMetrics, history: History, learned: Learned | None, validated: Validated | None
    ) -> StepDetails:
        """Return the rest of the record of a step with these metrics. `history` has the steps before it."""
        ...

    def check(
        self,
        history: History,
        recorder: Recorder,
        clock: Clock,
        learned: Learned | None,
        validated: Validated | None,
    ) -> None:
        """Warn of what is wrong with the newest step of the history.

        Raises:
            UserMistake: the job cannot succeed.
            TrainingDiverged: the model is no longer usable.
        """
        ...

    async def conclude(self, history: History, recorder: Recorder, checkpoints: Checkpoints) -> int:
        """Judge the finished run. Returns the step whose checkpoint becomes the job's model.

        Raises:
            UserMistake, TrainingDiverged: no checkpoint may.
        """
        ...
