"""One attempt at one job: sample, grade, update, record, checkpoint. The file to read first.

`Run` is the loop. Everything expensive in it comes in as a small protocol, so the real loop runs in a test in
seconds. Below it, `main` is the entry of the child process that the supervisor starts for each attempt.
"""

import argparse
import asyncio
import enum
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core import datasets, methods
from core.blobs import BlobStore, open_blobs
from core.db import Database
from core.jobs import Claim, LeaseLost
from core.methods import Hyperparameters, Resolved
from core.models import File, Job
from core.registry import Registry
from core.settings import Settings
from graders.spec import GraderSpec, InvalidGrader, parse_grader
from graders.types import Grader
from worker import metrics, process
from worker.backends import open_backends
from worker.checkpoints import Checkpoints
from worker.clock import Clock
from worker.data import PromptStream, PromptTooLong, tokenize
from worker.recorder import GradedStep, Recorder
from worker.rewards import Rewards
from worker.samplers import Sampler, Sampling
from worker.steps import with_steps_only
from worker.trainer import Trainer
from worker.types import Group, Prompt


class Outcome(enum.Enum):
    DONE = "done"
    INTERRUPTED = "interrupted"  # checkpointed at a step boundary, to be continued


@dataclass
class Run:
    """One attempt at one job, from its newest checkpoint to the last step, or to where it is asked to stop."""

    settings: Resolved
    seed: int
    spec: GraderSpec
    train_prompts: PromptStream
    valid_prompts: Sequence[Prompt]
    sampler: Sampler
    rewards: Rewards
    trainer: Trainer
    recorder: Recorder
    checkpoints: Checkpoints
    stop_requested: Callable[[], bool] = lambda: False
    # The job fails when more than half of the grades of this many steps in a row do.
    failing_steps: int = 3
    steps_without_signal: int = field(default=0, init=False)
    steps_that_failed: int = field(default=0, init=False)

    async def train(self) -> Outcome:
        step = self.checkpoints.restore(self.trainer)
        if step == 0 and not self.recorder.has_step(0):
            await self.measure_base()
        while step < self.settings.total_steps:
            step += 1
            stop = await self.step(step)
            if stop and step < self.settings.total_steps:
                return Outcome.INTERRUPTED
        self.finish()
        return Outcome.DONE

    async def step(self, step: int) -> bool:
        """One turn of the loop. Returns whether the run should stop here; if so, it is checkpointed."""
        clock = Clock()
        prompts_P = self.train_prompts.batch(step)
        answers = self.sampler.sample(prompts_P, self.sampling(step))
        groups_P = await self.rewards.grade(prompts_P, answers, clock)
        if self.settings.supervision == "process":
            groups_P = with_steps_only(groups_P)
        with clock("training"):
            update = self.trainer.update(groups_P)
        valid_P = None
        if self.is_measured(step):
            with clock("eval"):
                valid_P = await self.validate(step)

        data = metrics.of_step(
            step=step,
            total_steps=self.settings.total_steps,
            spec=self.spec,
            supervision=self.settings.supervision,
            train_P=groups_P,
            valid_P=valid_P,
            update=update,
            seconds=clock.seconds,
        )
        stop = self.record(data, groups_P, valid_P) or self.stop_requested()
        self.warn(step, groups_P)
        if valid_P is not None or stop:
            reward = metrics.mean_reward(valid_P) if valid_P is not None else None
            self.checkpoints.save(self.trainer, step=step, valid_reward=reward, metrics=data)
        return stop

    async def measure_base(self) -> None:
        """Step 0: how good the model is before it has learned anything."""
        clock = Clock()
        with clock("eval"):
            valid_P = await self.validate(0)
        data = metrics.of_step(
            step=0,
            total_steps=self.settings.total_steps,
            spec=self.spec,
            supervision=self.settings.supervision,
            train_P=[],
            valid_P=valid_P,
            update=None,
            seconds=clock.seconds,
        )
        self.record(data, [], valid_P)

    async def validate(self, step: int) -> list[Group]:
        answers = self.sampler.sample(self.valid_prompts, self.sampling(step, validation=True))
        return await self.rewards.grade(self.valid_prompts, answers, Clock())

    def is_measured(self, step: int) -> bool:
        return step % self.settings.eval_interval == 0 or step == self.settings.total_steps

    def sampling(self, step: int, *, validation: bool = False) -> Sampling:
        settings = self.settings
        return Sampling(
            group_size=settings.eval_samples if validation else settings.group_size,
            temperature=settings.eval_temperature if validation else settings.temperature,
            max_completion_tokens=settings.max_completion_tokens,
            # Validation draws the same numbers every time, so that its curve shows the policy and not the dice.
            job_seed=self.seed + 1 if validation else self.seed,
            step=0 if validation else step,
        )

    def record(self, data: dict[str, Any], train_P: Sequence[Group], valid_P: Sequence[Group] | None) -> bool:
        stored = [GradedStep("train", train_P)] if train_P else []
        if valid_P is not None:
            stored.append(GradedStep("valid", valid_P))
        return self.recorder.step(data, stored, remaining_steps=self.settings.total_steps - data["step"])

    def warn(self, step: int, groups_P: Sequence[Group]) -> None:
        """Say at once what a user would otherwise find out after hours."""
        failures = metrics.ungraded(groups_P)
        if failures is not None:
            self.recorder.warn(failures.message, {"step": step, "reasons": failures.reasons})
        self.steps_that_failed = self.steps_that_failed + 1 if failures and failures.share > 0.5 else 0
        if failures and self.steps_that_failed >= self.failing_steps:
            message = f"In {self.steps_that_failed} steps in a row most answers could not be graded. {failures.message}"
            raise UserMistake("grader_failed", message, "method.reinforcement.grader")
        silence = metrics.no_signal(groups_P, self.settings.supervision)
        self.steps_without_signal = self.steps_without_signal + 1 if silence else 0
        if silence and self.steps_without_signal in (1, 5, 25):  # not every step: a warning has to stay news
            data = {"step": step, "steps_in_a_row": self.steps_without_signal}
            self.recorder.warn(silence, data)

    def finish(self) -> None:
        best = self.checkpoints.best()
        if best is None:
            raise UserMistake(
                "invalid_grader", "Not one validation answer could be graded, so there is no best model."
            )
        self.recorder.succeed(best)


class UserMistake(Exception):
    """The job cannot succeed as it was asked for; trying again would not help."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


async def attempt(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    claim: Claim,
    scratch: Path,
    stop: Callable[[], bool],
) -> Outcome:
    """Train a claimed job. Its grader may hold connections, which belong to the running event loop."""
    with database.read() as session:
        job = session.query(Job).where(Job.id == claim.job_id).one()
    try:
        spec = parse_grader(job.reinforcement["grader"])
        async with open_backends(settings).open(spec) as grader:
            run = load(settings, database, blobs, claim, job, spec, grader, scratch, stop)
            return await run.train()
    except InvalidGrader as refused:
        raise UserMistake("invalid_grader", str(refused), "method.reinforcement.grader") from refused


def load(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    claim: Claim,
    job: Job,
    spec: GraderSpec,
    grader: Grader,
    scratch: Path,
    stop: Callable[[], bool],
) -> Run:
    """Put a Run together for a claimed job: read its files, load its model, resolve what it left to us."""
    # Here and not above: a test of the loop should not wait for torch and transformers to be imported.
    import torch

    from worker.policy import Policy, load_base
    from worker.samplers import choice
    from worker.trainer import PeftTrainer

    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    with database.read() as session:
        files = {file.id: file for file in session.query(File).where(File.project_id == job.project_id)}
    entry = Registry.load(settings.models_file).get(job.model)
    try:
        sampler, sampler_version = choice.choose(entry, settings)
    except choice.SamplerMissing as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause
    base = load_base(job.model, entry, settings.model_cache, "cuda" if torch.cuda.is_available() else "cpu")
    train_rows = datasets.read_examples(blobs.open(files[job.training_file].blob_key))
    assert job.validation_file is not None, "the API requires one"
    valid_rows = datasets.read_examples(blobs.open(files[job.validation_file].blob_key))

    resolved = methods.resolve(
        Hyperparameters.model_validate(job.reinforcement["hyperparameters"]),
        rows=len(train_rows),
        parameters=base.parameters,
        context=base.context,
    )
    policy = Policy(base, rank=resolved.lora_rank, alpha=resolved.lora_alpha, seed=job.seed)
    limit = resolved.max_completion_tokens
    try:
        train = tokenize(train_rows, policy, file=job.training_file, max_completion_tokens=limit)
        valid = tokenize(valid_rows, policy, file=job.validation_file, max_completion_tokens=limit)
    except PromptTooLong as cause:
        raise UserMistake("prompt_too_long", str(cause), "training_file") from cause

    recorder = Recorder(database, blobs, claim, job)
    recorder.resolved(resolved, f"{sampler} {sampler_version}")
    return Run(
        settings=resolved,
        seed=job.seed,
        spec=spec,
        train_prompts=PromptStream(train, batch_size=resolved.batch_size, seed=job.seed),
        valid_prompts=valid,
        sampler=choice.build(sampler, policy, settings, recorder),
        rewards=Rewards(grader),
        trainer=PeftTrainer(policy, resolved, token_budget=settings.train_token_budget),
        recorder=recorder,
        checkpoints=Checkpoints(database, blobs, claim, job, scratch),
        stop_requested=stop,
        failing_steps=settings.failing_steps,
    )


def main() -> int:
    """Run one claimed job in this process. The exit status is the whole answer to the supervisor."""
    parser = argparse.ArgumentParser(prog="python -m worker.run")
    parser.add_argument("job_id")
    parser.add_argument("epoch", type=int)
    parser.add_argument("parent", type=int, help="process id of the supervisor: this run dies with it")
    args = parser.parse_args()
    process.die_with_parent(args.parent)

    stopping = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides

    settings = Settings()
    database = Database(settings.database)
    blobs = open_blobs(settings.blobs, endpoint_url=settings.s3_endpoint_url)
    claim = Claim(args.job_id, args.epoch, "run")
    try:
        with TemporaryDirectory(prefix="regraft-") as scratch:
            outcome = asyncio.run(attempt(settings, database, blobs, claim, Path(scratch), lambda: stopping))
    except LeaseLost:
        return process.LOST
    except UserMistake as mistake:
        with database.read() as session:
            job = session.query(Job).where(Job.id == claim.job_id).one()
        Recorder(database, blobs, claim, job).fail(
            code=mistake.code, message=mistake.message, param=mistake.param
        )
        return process.USER_MISTAKE
    return process.DONE if outcome is Outcome.DONE else process.DRAINED


if __name__ == "__main__":
    sys.exit(main())
