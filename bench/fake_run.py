"""A run without a model: sampling and updates take milliseconds, and all other code is regraft's own.

The loop, the recorder, the checkpoints, the lease and its fencing are those of worker/run.py. The adapter is a hash of
every rollout and reward that the trainer has ever learned from, in order, so that a step that is lost, repeated or
computed from other answers changes each adapter after it. torch is not imported: it would take ten times as long as
all else that an attempt does.
"""

import hashlib
import json
import random
import sys
import types
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.sampling import Answer, Sampling
    from worker.types import Group, Prompt, UpdateMetrics

PARAMETERS, CONTEXT = 1000, 128


def without_torch() -> None:
    """Replace the modules that the loop imports only for types. Call it before worker.run is imported."""
    for name in (
        "torch",
        "worker.model.memory",
        "worker.training.trainer",
        "worker.rollout.reward_models",
        "worker.rollout.distillation_rewards",
    ):
        sys.modules[name] = Types(name)


class Types(types.ModuleType):
    """A module whose every name stands for any type; used in annotations and as defaults only."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class FakePolicy:
    """The hash of what was learned. It decides what is sampled next, as a policy does."""

    def __init__(self) -> None:
        self.adapter = b"base"
        self.steps = 0


class FakeSampler:
    def __init__(self, policy: FakePolicy) -> None:
        self.policy = policy

    async def sample(self, prompts_P: "Sequence[Prompt]", sampling: "Sampling") -> "AsyncIterator[Answer]":
        from worker.sampling import Answer
        from worker.types import Rollout

        for number, prompt in enumerate(prompts_P):
            for member in range(sampling.group_size):
                dice = random.Random(f"{sampling.seed(prompt, member)}/{self.policy.adapter.hex()}")
                text = prompt.item["answer"] if dice.random() < 0.5 else "wrong"
                yield Answer(number, member, Rollout((1, 2), (-0.5, -0.5), text, "stop"))


class FakeTrainer:
    def __init__(self, policy: FakePolicy) -> None:
        self.policy = policy
        self._groups: list[Group] = []

    def add(self, group: "Group") -> None:
        self._groups.append(group)

    def step(self) -> "UpdateMetrics":
        from worker.types import UpdateMetrics

        policy, groups_P = self.policy, self._groups
        self._groups = []
        policy.steps += 1
        learned = [
            [group.prompt.line, [rollout.text for rollout in group.rollouts_G], group.rewards_G]
            for group in sorted(groups_P, key=lambda one: one.prompt.line)
        ]
        text = json.dumps([policy.adapter.hex(), policy.steps, learned])
        policy.adapter = hashlib.sha256(text.encode()).digest()
        answers = sum(len(group.rollouts_G) for group in groups_P)
        return UpdateMetrics(0.0, answers, 2 * answers, 0, 1.0, 0.0, 0.01, 1.0, 0.0)

    def save(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(self.policy.adapter)
        (folder / "trainer.pt").write_text(json.dumps(self.policy.steps))

    def load(self, folder: Path) -> None:
        self.policy.adapter = (folder / "adapter_model.safetensors").read_bytes()
        self.policy.steps = json.loads((folder / "trainer.pt").read_text())


def assemble(
    attempt: Any,
    spec: Any,
    grader: Any,
    settings: Any,
    scratch: Path,
    stop_requested: Any,
    beat: Any,
    world: Any,
) -> Any:
    """As worker.assemble.assemble, with the fakes in place of the model."""
    from core.jobs import hyperparameters
    from worker.heartbeat import HeartbeatSampler, HeartbeatTrainer
    from worker.recording.checkpoints import JobCheckpoints
    from worker.recording.exporters.threads import ExporterThreads
    from worker.recording.recorder import JobRecorder
    from worker.rollout.experience import Rewards, RolloutExperience, grader_parts
    from worker.rollout.prompts import PromptStream, tokenize
    from worker.rollout.rows import read_rows
    from worker.run import Run

    job, rows = attempt.job, read_rows(attempt)
    asked = hyperparameters.Hyperparameters.model_validate(job.body["hyperparameters"])
    resolved = hyperparameters.resolve(asked, rows=len(rows.train), parameters=PARAMETERS, context=CONTEXT)
    resolved = hyperparameters.with_first_values(resolved, job.resolved)
    room = {"context": CONTEXT, "max_completion_tokens": resolved.max_completion_tokens}
    train = tokenize(rows.train, lambda messages, tools: [1, 2], file=job.training_file, **room)
    valid = tokenize(rows.valid, lambda messages, tools: [1, 2], file=job.validation_file, **room)
    recorder = JobRecorder(attempt, settings.default_limits)
    recorder.resolved(resolved, "fake")
    policy = FakePolicy()
    experience = RolloutExperience(
        settings=resolved,
        seed=job.seed,
        graders=grader_parts(spec),
        train_prompts=PromptStream(train, batch_size=resolved.batch_size, seed=job.seed),
        valid_prompts=valid,
        sampler=HeartbeatSampler(FakeSampler(policy), beat),
        rewards=Rewards(grader),
        trainer=HeartbeatTrainer(FakeTrainer(policy), beat),
        failing_steps=settings.failing_steps,
    )
    checkpoints = JobCheckpoints(attempt, scratch)
    return Run(experience, recorder, checkpoints, ExporterThreads(), stop_requested)
