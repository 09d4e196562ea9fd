"""The protocols on which the training loops depend. Each names the class that a run gets."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from core.jobs.remaining import RemainingSteps
from core.jobs.verdict import Verdict
from core.results.step_metrics import StepMetrics
from worker.clock import Clock
from worker.record.exporters.types import Ended
from worker.record.history import History
from worker.record.monitors import Finding
from worker.record.verdict import RowScores
from worker.rollout.samplers import Answer
from worker.types import GradedStep, Group, Prompt, UpdateMetrics


class Savable(Protocol):
    """A trainer, as checkpoints store it."""

    def save(self, folder: Path) -> None:
        """Write the adapter (PEFT format) or the whole model, and the state that `load` needs to resume exactly."""
        ...

    def load(self, folder: Path) -> None: ...


class Trainer(Savable, Protocol):
    """worker/learn/trainer.py: PeftTrainer."""

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
    """Scores answers: by a grader (worker/rollout/rewards.py), or by a teacher (worker/rollout/taught.py)."""

    async def grade(
        self,
        prompts_P: Sequence[Prompt],
        answers: AsyncIterator[Answer],
        group_size: int,
        clock: Clock,
        use: Callable[[Group], None] | None = None,
    ) -> list[Group]: ...


class Recorder(Protocol):
    """Records the run for its job. worker/record/recorder.py: JobRecorder."""

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
        findings: Sequence[Finding] = (),
    ) -> bool:
        """Record one finished step. Returns whether the job must pause, because of its user or of its budget."""
        ...

    def inform(self, message: str, data: dict[str, Any]) -> None: ...

    def warn(self, message: str, data: dict[str, Any]) -> None: ...

    def judged(self, verdict: Verdict, message: str, *, level: str, data: dict[str, Any]) -> None:
        """Record the verdict with an event."""
        ...

    def succeed(self, step: int) -> None:
        """Deliver the checkpoint of this step, and end the job."""
        ...


class Checkpoints(Protocol):
    """Of the job. worker/record/checkpoints.py: JobCheckpoints."""

    def restore(self, trainer: Savable) -> int:
        """Load the newest valid checkpoint. Returns its step; 0 without one."""
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
    ) -> None: ...

    def best(self) -> int | None:
        """The step of the one with the highest validation reward; None: no validation was graded."""
        ...

    def newest(self) -> int:
        """The step of the newest one, of a job that has one."""
        ...

    def delete_resume_files(self) -> None:
        """Delete what only a run that resumes reads."""
        ...


class Exporters(Protocol):
    """Who else gets the metrics. worker/record/exporters/threads.py: ExporterThreads."""

    def start(self, recorded: Sequence[StepMetrics]) -> None: ...

    def put(self, data: StepMetrics) -> None: ...

    def close(self, ended: Ended) -> None:
        """Send what waits, and say how the attempt ended. A second call does nothing."""
        ...

    def abandon(self) -> None:
        """Send nothing more: another process may be writing to the same runs by now."""
        ...
