"""The training loop of one attempt at a job: learn, validate, record, checkpoint. Read this file first.

It is the same for every method. A run learns from its *experience*: answers that it samples and grades
(worker/rollout/experience.py), or the rows of a file (worker/offline/experience.py). Both learn with a trainer of
worker/training/.

`Run` depends on protocols, so tests run the real loop on fakes in seconds. worker/assemble.py builds a Run for a
claimed job, and worker/child.py is the process that the supervisor starts for each attempt.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core.step_metrics import StepMetrics
from worker import progress
from worker.clock import Clock
from worker.history import History
from worker.interfaces import Checkpoints, Experience, Exporters, Recorder
from worker.progress import PROGRESS


class RunOutcome(enum.Enum):
    DONE = "done"
    INTERRUPTED = "interrupted"  # checkpointed at a step boundary, to be continued
    ROLLED_BACK = "rolled_back"  # to be continued from an earlier checkpoint


@dataclass
class Run:
    """One attempt at one job, from its newest checkpoint to the last step, or until `stop_requested` returns True."""

    experience: Experience[Any, Any]  # one object makes and reads what a step learned and measured
    recorder: Recorder
    checkpoints: Checkpoints
    exporters: Exporters
    stop_requested: Callable[[], bool] = lambda: False
    clock: Callable[[], Clock] = Clock  # one for each step
    history: History = field(default_factory=History, init=False)  # the recorded steps, from `train` on

    async def train(self) -> RunOutcome:
        schedule = self.experience.schedule
        step = self.checkpoints.restore(self.experience.trainer)
        if step is None:
            return RunOutcome.INTERRUPTED
        recorded, self.history = self.recorder.recorded()
        self.exporters.start(recorded)
        is_new = step == 0 and not recorded
        if is_new and schedule.is_validated(0) and await self.measure_start():
            return RunOutcome.INTERRUPTED  # with nothing to checkpoint: it will start from the base again
        while step < schedule.total_steps and not self.has_stopped_early(step):
            step += 1
            with progress.in_step(step):
                ended = await self.step(step)
            if ended is RunOutcome.ROLLED_BACK:
                return ended
            if ended is RunOutcome.DONE:
                break
            if ended is RunOutcome.INTERRUPTED and step < schedule.total_steps:
                return RunOutcome.INTERRUPTED
        best = await self.experience.conclude(self.history, self.recorder, self.checkpoints)
        # Before the job's last status: after it the supervisor may end this process.
        self.exporters.close("succeeded")
        self.recorder.succeed(best)
        return RunOutcome.DONE

    def has_stopped_early(self, step: int) -> bool:
        """Whether an earlier attempt stopped after this step, and ended before it had delivered the model."""
        steps = self.history.steps
        is_newest = step > 0 and bool(steps) and steps[-1].step == step
        return is_newest and self.experience.reason_to_stop(steps) is not None

    async def step(self, step: int) -> RunOutcome | None:
        """One turn of the loop. If it is the run's last one, the policy is checkpointed and the answer says why."""
        clock, experience, validated = self.clock(), self.experience, None
        learned = await experience.learn(step, clock)
        if experience.schedule.is_measured(step):
            validated = await experience.validate(step, clock)

        data = experience.measure(step, clock, self.history, learned, validated)
        early = experience.reason_to_stop([*self.history.steps, data])
        if early is not None and validated is None:
            validated = await experience.validate(step, clock)
            data = experience.measure(step, clock, self.history, learned, validated)
        pause = self.record(data, learned, validated, is_last=early is not None)
        stop = pause or self.stop_requested()
        experience.check(self.history, self.recorder, clock, learned, validated)
        if early is not None:  # before the checkpoint, from which an attempt would not come to this again
            self.recorder.inform(early.message, {"step": step, **early.evidence})
        elif self.is_rolled_back():
            return RunOutcome.ROLLED_BACK
        if experience.schedule.is_saved(step) or early is not None or stop:
            self.save(data, for_pause=pause)
        if early is not None:
            return RunOutcome.DONE
        return RunOutcome.INTERRUPTED if stop else None

    def is_rolled_back(self) -> bool:
        """Whether the model has collapsed, so that the next attempt continues from an earlier checkpoint."""
        rollback = self.experience.rollback(self.history, self.checkpoints)
        return rollback is not None and self.checkpoints.roll_back(rollback)

    async def measure_start(self) -> bool:
        """Step 0: how good the model is before it has learned anything. Returns whether the job is to pause."""
        with progress.in_step(0):
            clock = self.clock()
            validated = await self.experience.validate(0, clock)
            data = self.experience.measure(0, clock, self.history, None, validated)
            pause = self.record(data, None, validated)
            self.experience.check(self.history, self.recorder, clock, None, validated)
            return pause

    def record(self, data: StepMetrics, learned: Any, validated: Any, *, is_last: bool = False) -> bool:
        """Record a step, and send its metrics to the exporters. Returns whether the job is to pause."""
        details = self.experience.details(data, self.history, learned, validated)
        ahead = self.experience.schedule.remaining(data.step, is_last=is_last)
        pause = self.recorder.step(
            data,
            details.stored,
            ahead=ahead,
            valid_scores=details.valid_scores,
            shadow_scores=details.shadow_scores,
            findings=details.findings,
            alarm=details.alarm,
        )
        self.history.add(data, [finding.rule for finding in details.findings])
        self.history.keep_scores(data.step, details.valid_scores, details.shadow_scores)
        self.exporters.put(data)
        return pause

    def save(self, data: StepMetrics, *, for_pause: bool) -> None:
        schedule, step = self.experience.schedule, data.step
        with PROGRESS.phase("saving"):
            self.checkpoints.save(
                self.experience.trainer,
                step=step,
                valid_reward=data.full_valid_mean_reward,
                metrics=data.to_data(),
                for_pause=for_pause,
                for_epoch=schedule.ends_epoch(step),
                is_last=schedule.ends_epoch(step) and step == schedule.total_steps,
            )
