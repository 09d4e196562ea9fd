"""Sampling and learning that take turns on the same GPUs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from core.jobs.hyperparameters import Hyperparameters, resolve
from graders.types import Grade
from tests.fakes import learn
from tests.hyperparameters import in_groups
from tests.present import untyped
from tests.worker.test_training import asked, drawn, prompt, sampling
from worker.model.policy import Policy
from worker.model.sizing import Estimate, MemoryPlan
from worker.prepare.memory_plan import takes_turns
from worker.prepare.rollouts import report_placement
from worker.prepare.teachers import TeacherModel
from worker.sampling.placement import ONE_ENGINE
from worker.training.step_hooks import HookedTrainer
from worker.training.trainer import PeftTrainer
from worker.types import Group, Rollout, UpdateMetrics

GROUP = Group(cast(Any, None), (Rollout((1,), (0.0,), "", "stop"),), (Grade(1.0),))


@dataclass
class Diary:
    """A sampler, a trainer and a recorder that write down what happens to them."""

    said: list[Any] = field(default_factory=list)

    def sleep(self) -> None:
        self.said.append("sleep")

    def update_in_flight(self) -> None:
        self.said.append("update")

    def add(self, group: Group) -> None:
        self.said.append("add")

    def step(self) -> UpdateMetrics:
        self.said.append("step")
        return UpdateMetrics(0.0, 0, 0, 0, None, None, None, None, None)

    def save(self, folder: Path) -> None:
        self.said.append(("save", folder))

    def load(self, folder: Path) -> None:
        self.said.append(("load", folder))

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        return nullcontext(steps)

    def inform(self, message: str, data: dict[str, Any]) -> None:
        self.said.append((message, data))


def test_the_sampler_is_called_before_and_after_a_step() -> None:
    diary = Diary()
    trainer = HookedTrainer(diary, before_step=diary.sleep, after_step=diary.update_in_flight)

    trainer.add(GROUP)
    trainer.step()
    trainer.save(Path("a"))
    trainer.load(Path("a"))

    assert diary.said == ["add", "sleep", "step", "update", ("save", Path("a")), ("load", Path("a"))]


def test_the_trainer_gives_its_memory_back_at_the_end_of_each_step(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy()
    one = prompt(policy, "say yes")
    rollouts = drawn(policy, [one], sampling())[0]
    released: list[int] = []
    trainer = PeftTrainer(
        policy, asked({}), token_budget=4096, release=lambda: released.append(trainer.steps_taken)
    )

    for _ in range(2):
        learn(trainer, [Group(one, rollouts, tuple(map(Grade, (1.0, 0.0, 0.5, 0.0))))])

    assert released == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "teacher", "has_judges", "expected"),
    [
        ({}, None, False, True),
        ({"overlap": True}, None, False, False),
        ({"off_policy_steps": 1}, None, False, False),
        ({}, TeacherModel("base", None, None), False, False),
        ({}, TeacherModel("served", None, None, server=cast(Any, object())), False, True),
        ({}, None, True, False),
    ],
)
def test_a_job_that_samples_while_its_gpu_computes_takes_no_turns(
    schedule: dict[str, Any], teacher: TeacherModel | None, has_judges: bool, expected: bool
) -> None:
    settings = resolve(
        Hyperparameters.model_validate({"advanced": in_groups(schedule)}),
        rows=8,
        parameters=1000,
        context=512,
    )

    assert takes_turns(settings, teacher, has_judges=has_judges) is expected


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_placement_of_a_job_says_whether_its_engines_sleep(sleeps: bool) -> None:
    diary = Diary()
    estimate = Estimate(2, 0, 0, 0, 0, 0, 0, 0, sleeps=sleeps)

    untyped(report_placement)(diary, ONE_ENGINE, MemoryPlan(2048, 1, False, estimate))

    [(message, data)] = diary.said
    assert ("They sleep while the job learns." in message) is sleeps
    assert data["sleeps"] is sleeps
