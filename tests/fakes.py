"""Stand-ins for the expensive parts: real classes, no patching. A whole job runs on them in a second."""

import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from core.jobs.hyperparameters import Resolved
from graders.types import ErrorKind, Grade, Item, Sample
from worker.interfaces import Trainer
from worker.model.policy import Policy
from worker.recording.exporters import RunInfo
from worker.run import Run, RunOutcome
from worker.sampling import Answer, Sampling
from worker.training import grpo
from worker.training.gradient import LocalGradient, StepMemory
from worker.training.loss import Batch, StepValues
from worker.training.optimizer import AdapterOptimizer
from worker.training.policy_loss import PolicyLoss
from worker.training.trainable_weights import trained_of
from worker.training.trainer import PeftTrainer
from worker.types import Ended, Group, Prompt, Rollout, UpdateMetrics


@dataclass
class Skill:
    """All that the fake model knows: how likely it is to give the right answer."""

    chance: float = 0.3


class GuessingSampler:
    """Stands in for a model: answers with the row's `answer` or with "wrong"."""

    def __init__(self, skill: Skill) -> None:
        self.skill = skill
        self.calls: list[Sampling] = []

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        self.calls.append(sampling)
        for number, prompt in enumerate(prompts_P):
            for member in reversed(range(sampling.group_size)):  # answers end in an order of their own
                yield Answer(number, member, self._answer(prompt, sampling, member))

    def _answer(self, prompt: Prompt, sampling: Sampling, member: int) -> Rollout:
        right = random.Random(sampling.seed(prompt, member)).random() < self.skill.chance
        text = prompt.item["answer"] if right else "wrong"
        return Rollout((1, 2), (-0.5, -0.5), text, "stop")


class SkillTrainer:
    """Stands in for training: every good answer among bad ones adds a little skill."""

    def __init__(self, skill: Skill) -> None:
        self.skill = skill
        self.updates = 0
        self.groups: list[Group] = []

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def step(self) -> UpdateMetrics:
        self.updates += 1
        groups_P, self.groups = self.groups, []
        mixed = sum(grpo.signal(group.rewards_G) == "mixed" for group in groups_P)
        self.skill.chance = min(1.0, self.skill.chance + 0.05 * mixed)
        rollouts = sum(len(group.rollouts_G) for group in groups_P)
        return UpdateMetrics(0.0, rollouts, 2 * rollouts, 0, 1.0, 0.0, 0.01, 1.0, 0.0)

    def save(self, folder: Path) -> None:
        (folder / "skill.json").write_text(json.dumps([self.skill.chance, self.updates]))

    def load(self, folder: Path) -> None:
        self.skill.chance, self.updates = json.loads((folder / "skill.json").read_text())

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        return nullcontext(0)  # it keeps no earlier skill


class MeasuredTrainer(SkillTrainer):
    """Reports the same measurements of each update."""

    def __init__(self, skill: Skill, measured: UpdateMetrics) -> None:
        super().__init__(skill)
        self.measured = measured

    def step(self) -> UpdateMetrics:
        super().step()
        return self.measured


class RuiningTrainer(SkillTrainer):
    """Stands in for a learning rate far too high: after the first update every answer is wrong."""

    def step(self) -> UpdateMetrics:
        update = super().step()
        self.skill.chance = 0.0
        return update


class WatchedGradient(LocalGradient):
    """Remembers how many answers each row had."""

    def __init__(self, policy: Policy, settings: Resolved, *, token_budget: int) -> None:
        super().__init__(PolicyLoss(policy, settings), token_budget=token_budget)
        self.rows: list[int] = []

    def _backward(self, batch: Batch, values: StepValues) -> None:
        self.rows += [len(part.sequences) for part in batch.packs]
        super()._backward(batch, values)


class RecordingTrainer(PeftTrainer):
    """The real trainer, without an optimizer: keeps the gradient of each update and leaves the weights as they are."""

    def __init__(
        self,
        policy: Policy,
        settings: Resolved,
        *,
        token_budget: int,
        kind: "type[RecordingOptimizer] | None" = None,
        memory: StepMemory | None = None,
    ) -> None:
        super().__init__(policy, settings, token_budget=token_budget, memory=memory)
        self.recording = (kind or RecordingOptimizer)(
            policy,
            learning_rate=settings.learning_rate,
            betas=(0.9, 0.95),
            max_grad_norm=settings.max_grad_norm,
            warmup_steps=settings.warmup_steps,
        )
        self.trained = trained_of(self.loss, self.recording)

    @property
    def gradients(self) -> list[list[Tensor]]:
        return self.recording.gradients


class RecordingOptimizer(AdapterOptimizer):
    """Keeps the clipped gradient of each step and leaves the weights as they are."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        super().__init__(policy, **options)
        self.gradients: list[list[Tensor]] = []

    def descend(self, steps_taken: int, rate: float) -> float:
        gradients = [parameter.grad for parameter in self.policy.trainable]
        kept = [gradient.clone() for gradient in gradients if gradient is not None]
        self.gradients.append(kept)
        return self.learning_rate


class IdleTrainer(SkillTrainer):
    """Takes its steps and leaves the model as it is."""

    def step(self) -> UpdateMetrics:
        chance = self.skill.chance
        update = super().step()
        self.skill.chance = chance
        return update


@dataclass
class WatchedRun(Run):
    """The real loop, which calls `before_step` with the number of each step before it begins."""

    before_step: Callable[[int], None] = lambda step: None

    async def step(self, step: int) -> RunOutcome | None:
        self.before_step(step)
        return await super().step(step)


def crash_at(step: int) -> Callable[[int], None]:
    """For `before_step`: the process runs out of memory at this step."""

    def crash(number: int) -> None:
        if number == step:
            raise RuntimeError("out of memory")

    return crash


def learn(trainer: Trainer, groups_P: Sequence[Group]) -> UpdateMetrics:
    """One whole step of a trainer."""
    for group in groups_P:
        trainer.add(group)
    return trainer.step()


class ExactGrader:
    """1 for the row's answer, else 0."""

    name, type = "exact", "string_check"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(float(sample.output_text == item["answer"]))


class EveryFourthFails:
    """Cannot judge every fourth answer it sees; raises on it, as other people's code does."""

    name, type = "flaky", "string_check"

    def __init__(self) -> None:
        self.seen = 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.seen += 1
        if self.seen % 4 == 0:
            raise RuntimeError("the judge is asleep")
        return Grade(float(sample.output_text == item["answer"]))


class SameForAll:
    """Gives every answer the same score."""

    name, type = "same", "string_check"

    def __init__(self, score: float) -> None:
        self.score = score

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(self.score)


class Halves:
    """Good, bad, good, bad: there is signal in every group."""

    name, type = "halves", "string_check"

    def __init__(self) -> None:
        self.seen = 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.seen += 1
        return Grade(float(self.seen % 2))


class NeverGrades:
    name, type = "never", "string_check"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return Grade(None, "no opinion", ErrorKind.other_error)


class Notebook:
    """An exporter on paper.

    `last`: the step that it has from earlier; `failures`: calls that fail before one succeeds.
    """

    def __init__(self, *, last: int | None = None, failures: int = 0) -> None:
        self.last = last
        self.failures = failures
        self.answered = threading.Event()
        self.pages: list[tuple[str, str | int]] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def start(self, run_info: RunInfo) -> int | None:
        self._write("start", run_info.job_id)
        return max(self.metrics, default=self.last)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step)
        self.metrics[step] = dict(metrics)

    def finish(self, ended: Ended) -> None:
        self._write("finish", ended)

    def _write(self, what: str, which: str | int) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route")
        self.pages.append((what, which))
        self.answered.set()


class EverySecond:
    """Likes every second answer, so that a group has signal."""

    name, type = "second", "string_check"

    def __init__(self) -> None:
        self.likes = False

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.likes = not self.likes
        return Grade(float(self.likes))
