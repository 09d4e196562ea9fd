"""One attempt at one job: sample, grade, update, record, checkpoint. The file to read first.

`Run` is the loop. Everything expensive in it comes in as a small protocol, so the real loop runs in a test in
seconds. Below it, `main` is the entry of the child process that the supervisor starts for each attempt.
"""

import argparse
import asyncio
import enum
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.database.engine import Database
from core.database.tables import File, Job
from core.jobs import events, hyperparameters, lifecycle
from core.jobs.estimates import Ahead
from core.jobs.hyperparameters import Hyperparameters, Resolved
from core.jobs.lifecycle import Claim, LeaseLost
from core.jobs.thresholds import Thresholds
from core.jobs.verdict import Verdict
from core.registry import Device, Registry
from core.response_format import SchemaTooLarge, stored_held_to
from core.settings import Settings
from core.storage import datasets, files
from core.storage.store import BlobStore, blobs_of
from core.telemetry import logs
from graders.environments.catalog import EnvironmentNotBuilt
from graders.spec import GraderSpec, InvalidGrader, parse_grader
from graders.types import Grader
from worker import instruments, process
from worker.backends import open_backends
from worker.clock import Clock
from worker.heartbeat import Beat, WatchedGrader, WatchedSampler, WatchedTrainer, beats_into
from worker.instruments import ObservedGrader, ObservedSampler
from worker.learn.members import members_of
from worker.learn.ranks import Model, Ranks, TooFewGpus
from worker.learn.trainer import Trainer
from worker.record import metrics, monitors, stopping
from worker.record.checkpoints import Checkpoints
from worker.record.exporters.choice import feeds_of
from worker.record.exporters.feed import Feeds, left_behind
from worker.record.history import History, reduced
from worker.record.recorder import Quota, Recorder
from worker.record.rollouts import GradedStep
from worker.record.verdict import compare, row_scores
from worker.refusals import ModelUnavailable, Refusal
from worker.retry import Patience
from worker.rollout.collect import Collector
from worker.rollout.prompts import PromptStream, PromptTooLong, tokenize
from worker.rollout.rewards import Rewards
from worker.rollout.sampler_gate import SamplerGate
from worker.rollout.samplers import Sampler, Sampling
from worker.types import Group, Prompt, UpdateMetrics


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
    held_to: str = ""  # the schema that answers are JSON of (core/response_format.py)
    feeds: Feeds = field(default_factory=Feeds)  # who else gets the metrics
    gpus: int = 1  # a second of this run is so many GPU-seconds
    thresholds: Thresholds = field(default_factory=Thresholds)  # of the warnings
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

    async def train(self) -> Outcome:
        step = self.checkpoints.restore(self.trainer)
        recorded, self.history = self.recorder.recorded()
        self.feeds.start(recorded)
        if step == 0 and not recorded and await self.measure_base():
            return Outcome.INTERRUPTED  # with nothing to checkpoint: it will start from the base again
        while step < self.settings.total_steps:
            step += 1
            with instruments.step(step):
                ended = await self.step(step)
            if ended is Outcome.DONE:
                break
            if ended is Outcome.INTERRUPTED and step < self.settings.total_steps:
                return Outcome.INTERRUPTED
        self.finish()
        return Outcome.DONE

    async def step(self, step: int) -> Outcome | None:
        """One turn of the loop. If it is the run's last one, the policy is checkpointed and the answer says why."""
        clock = Clock()
        groups_P, others_P = await self.collector.collect(step, clock)
        with clock("training"):
            update = await asyncio.to_thread(self.trainer.step)
        valid_P = await self.validate(clock) if self.is_measured(step) else None

        data = self.measure(step, clock, groups_P, others_P, update, valid_P)
        early = stopping.reason_to_stop([*self.history.steps, data], self.settings)
        if early is not None and valid_P is None:
            valid_P = await self.validate(clock)
            data = self.measure(step, clock, groups_P, others_P, update, valid_P)
        pause = self.record(data, groups_P, others_P, valid_P, is_last=early is not None)
        stop = pause or self.stop_requested()
        self.warn(step, groups_P)
        self.gate(data)
        if valid_P is not None or stop:
            reward = metrics.mean_reward(valid_P) if valid_P is not None else None
            self.checkpoints.save(self.trainer, step=step, valid_reward=reward, metrics=data, for_pause=pause)
        if early is not None:
            self.recorder.inform(early.message, {"step": step, **early.evidence})
            return Outcome.DONE
        return Outcome.INTERRUPTED if stop else None

    async def measure_base(self) -> bool:
        """Step 0: how good the model is before it has learned anything. Returns whether the job is to pause."""
        with instruments.step(0):
            clock = Clock()
            valid_P = await self.validate(clock)
            return self.record(self.measure(0, clock, [], [], None, valid_P), [], [], valid_P)

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
        )
        answers = self.sampler.sample(self.valid_prompts, sampling)
        with clock("eval"):
            return await self.rewards.grade(self.valid_prompts, answers, sampling.group_size, Clock())

    def is_measured(self, step: int) -> bool:
        return step % self.settings.eval_interval == 0 or step == self.settings.total_steps

    def ahead(self, step: int) -> Ahead:
        """What is left to do after this step."""
        left = range(step + 1, self.settings.total_steps + 1)
        validated = sum(map(self.is_measured, left))
        return Ahead(len(left) - validated, validated, self.is_measured(step + 1))

    def measure(
        self,
        step: int,
        clock: Clock,
        train_P: Sequence[Group],
        others_P: Sequence[Group],
        update: UpdateMetrics | None,
        valid_P: Sequence[Group] | None,
    ) -> dict[str, Any]:
        return metrics.of_step(
            step=step,
            total_steps=self.settings.total_steps,
            spec=self.spec,
            supervision=self.settings.supervision,
            train_P=train_P,
            others_P=others_P,
            valid_P=valid_P,
            update=update,
            seconds=clock.seconds,
            gpus=self.gpus,
            base_scores=self.history.base_scores,
        )

    def record(
        self,
        data: dict[str, Any],
        train_P: Sequence[Group],
        others_P: Sequence[Group],
        valid_P: Sequence[Group] | None,
        *,
        is_last: bool = False,
    ) -> bool:
        ahead = Ahead(0, 0, False) if is_last else self.ahead(data["step"])
        stored: list[GradedStep] = []
        if train_P:
            stored.append(GradedStep("train", [*train_P, *others_P], self.settings, own=len(train_P)))
        if valid_P is not None:
            stored.append(GradedStep("valid", valid_P))
        scores = None if valid_P is None else row_scores(valid_P)
        found = monitors.check([*self.history.steps, reduced(data)], self.thresholds, self.history.warned)
        pause = self.recorder.step(data, stored, ahead=ahead, valid_scores=scores, findings=found)
        self.history.add(data, [finding.rule for finding in found])
        if data["step"] == 0:
            self.history.base_scores = scores
        self.feeds.put(data)
        return pause

    def warn(self, step: int, groups_P: Sequence[Group]) -> None:
        """Say at once what a user would otherwise find out after hours."""
        failures = metrics.ungraded(groups_P)
        steps = self.history.steps  # this one included
        silence = metrics.no_signal(
            groups_P, self.settings.supervision, steps[:-1], cause_known="collapse" in self.history.warned
        )
        if failures is None and silence is None:
            return
        if failures is not None:
            self.recorder.warn(failures.message, {"step": step, "reasons": failures.reasons})
            failed = stopping.in_a_row(steps, lambda one: one.get("mean_unresponsive_rewards", 0.0) > 0.5)
            if failed >= self.failing_steps:
                message = f"In {failed} steps in a row most answers could not be graded. {failures.message}"
                raise UserMistake("grader_failed", message, "method.reinforcement.grader")
        if silence is not None:
            silent = stopping.in_a_row(steps, lambda one: one.get("groups_mixed_share") == 0.0)
            if silent in (1, 5, 25):  # not every step: a warning has to stay news
                tell = self.recorder.inform if silence.is_success else self.recorder.warn
                tell(silence.message, {"step": step, "steps_in_a_row": silent})

    def gate(self, data: dict[str, Any]) -> None:
        """Fail a job that asked for it and has too little to learn from, after its first step and no checkpoint."""
        share, bound = data["groups_mixed_share"], self.settings.fail_below_signal
        if data["step"] == 1 and share < bound:
            raise UserMistake(
                "no_signal",
                f"In the first step {share:.0%} of the groups had signal, less than fail_below_signal ({bound:.0%}). A "
                "preview (POST /v1/regraft/preview) says what to do about it.",
                "method.reinforcement.hyperparameters.advanced.fail_below_signal",
            )

    def finish(self) -> None:
        best = self.checkpoints.best()
        if best is None:
            raise UserMistake(
                "invalid_grader", "Not one validation answer could be graded, so there is no best model."
            )
        verdict = self.judge(best.step)
        if self.settings.require_improvement and (verdict is None or verdict.outcome != "improved"):
            numbers = "" if verdict is None else f" {verdict.sentence()}"
            raise UserMistake(
                "no_improvement",
                "require_improvement is set, and the validation reward is not significantly above the base model's."
                f"{numbers} The checkpoints are kept.",
                "method.reinforcement.hyperparameters.advanced.require_improvement",
            )
        # Before the job's last status: once it has that, nobody holds it, and this process may be ended.
        self.feeds.close("succeeded")
        self.recorder.succeed(best)

    def judge(self, step: int) -> Verdict | None:
        """Compare the checkpoint of this step, which is to be delivered, with the base model, and record the verdict.

        None: there is nothing to compare, and a warning says so.
        """
        base, tuned = self.history.base_scores, self.recorder.row_scores(step)
        compared = compare(base, tuned) if base is not None and tuned is not None else None
        if compared is None:
            known = base is not None and tuned is not None
            reason = (
                "no validation row was graded for both"
                if known
                else "an earlier version of the service recorded their validations without the scores of the rows"
            )
            self.recorder.warn(f"The model cannot be compared with its base model: {reason}.", {})
            return None
        damage = monitors.damage(self.history.steps, step, self.thresholds)
        verdict = compared.verdict(step, None if damage is None else damage[0])
        if not verdict.below_base:
            self.recorder.judged(verdict, verdict.sentence(), level="info", data={})
            return verdict
        cause, evidence = monitors.likely_cause(self.history.steps, verdict, self.thresholds)
        if verdict.outcome == "worse":
            found = "is worse than the base model"
        elif verdict.ci_low is None:
            found = "is below the base model, with too few validation rows to tell them apart"
        else:
            found = "is below the base model, not significantly"
        message = f"The delivered model {found}. {verdict.sentence()} Likely cause: {evidence}"
        self.recorder.judged(verdict, message, level="error", data={"cause": cause})
        return verdict


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
    beat: Beat,
) -> Outcome:
    """Train a claimed job. Its grader may hold connections, which belong to the running event loop."""
    patience = Patience(settings.patience_seconds, partial(tell, database, claim))
    job = patience(partial(read_job, database, claim))
    try:
        spec = parse_grader(job.reinforcement["grader"])
        async with open_backends(settings).open(spec) as grader:
            watched = ObservedGrader(WatchedGrader(grader, beat), spec)
            with Ranks(settings.ranks, members_of(settings)) as ranks:
                with failing_once():
                    run = load(
                        settings,
                        database,
                        blobs,
                        claim,
                        job,
                        spec,
                        watched,
                        scratch,
                        stop,
                        beat,
                        patience,
                        ranks,
                    )
                with closed_at_the_end(run.feeds):
                    return await trained(run)
    except InvalidGrader as refused:
        raise UserMistake("invalid_grader", str(refused), "method.reinforcement.grader") from refused


async def trained(run: Run) -> Outcome:
    try:
        with failing_once():
            return await run.train()
    except SchemaTooLarge as cause:
        raise UserMistake("schema_too_large", str(cause), "method.reinforcement.response_format") from cause


@contextmanager
def failing_once() -> Iterator[None]:
    """A refusal fails the job by its code, without a traceback and without another attempt."""
    try:
        yield
    except Refusal as refusal:
        raise UserMistake(refusal.code, str(refusal), refusal.param) from refusal


@contextmanager
def closed_at_the_end(feeds: Feeds) -> Iterator[None]:
    """Tell the services how the attempt ended, if it has not told them."""
    try:
        yield
    except LeaseLost:
        feeds.abandon()
        raise
    except UserMistake:
        feeds.close("failed")
        raise
    except BaseException:
        feeds.close("interrupted")
        raise
    feeds.close("interrupted")


def read_job(database: Database, claim: Claim) -> Job:
    with database.read() as session:
        return session.query(Job).where(Job.id == claim.job_id).one()


def tell(database: Database, claim: Claim, incident: str) -> None:
    """What the run met with, as an event of the job."""
    with lifecycle.fenced(database, claim) as (session, job):
        events.append(session, job.id, incident, level="warn")


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
    beat: Beat,
    patience: Patience,
    ranks: Ranks,
) -> Run:
    """Put a Run together for a claimed job: read its files, load its model, resolve what it left to us."""
    # Here and not above: a test of the loop should not wait for torch and transformers to be imported.
    import torch

    from worker.learn.trainer import PeftTrainer
    from worker.model import memory, sizing, support
    from worker.model.policy import DTYPES, read_config, read_tokenizer, render, source_of
    from worker.rollout.samplers import choice

    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    assert job.validation_file is not None, "the API requires one"
    train_rows, valid_rows = patience(partial(read_data, database, blobs, job))
    entry = Registry.load(settings.models_file).get(job.model)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = settings.of_class(settings.gpu_class)
    try:
        sampler, sampler_version = choice.choose(entry, settings, device)
    except choice.SamplerMissing as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause

    if device == "cuda" and ranks.count > torch.cuda.device_count():
        raise TooFewGpus(
            f"REGRAFT_RANKS is {ranks.count}, and there are {torch.cuda.device_count()} GPUs here."
        )
    # Everything that can be wrong is looked at before the weights are loaded, which may take minutes.
    source = source_of(entry, settings.model_cache)
    config = read_config(source)
    support.refuse_by_config(config, entry.context)
    with support.refusing(config):
        shape = memory.shape_of(config, DTYPES[entry.dtype])
    resolved = hyperparameters.resolve(
        Hyperparameters.model_validate(job.reinforcement["hyperparameters"]),
        rows=len(train_rows),
        parameters=shape.parameters,
        context=entry.context,
    )
    resolved = hyperparameters.kept(resolved, job.resolved)
    limit = resolved.max_completion_tokens
    rendered = partial(render, read_tokenizer(entry, source, resolved.chat_template))
    room = {"context": entry.context, "max_completion_tokens": limit}
    try:
        train = tokenize(train_rows, rendered, file=job.training_file, **room)
        valid = tokenize(valid_rows, rendered, file=job.validation_file, **room)
    except PromptTooLong as cause:
        raise UserMistake("prompt_too_long", str(cause), "training_file") from cause
    if resolved.off_policy_steps and sampler == "transformers":
        raise UserMistake(
            "invalid_value", hyperparameters.NO_SAMPLER_OF_ITS_OWN, "method.reinforcement.hyperparameters"
        )
    work = sizing.workload(
        rank=resolved.lora_rank,
        prompt=max(len(prompt.ids) for prompt in [*train, *valid]),
        completion=limit,
        batch=resolved.batch_size + resolved.resample_prompts,
        group=resolved.group_size,
        valid_rows=len(valid),
        eval_samples=resolved.eval_samples,
    )
    try:
        # Processes on a CPU share its memory; on GPUs each has one to itself.
        free = memory.available(device) // (ranks.count if device == "cpu" else 1)
        packed = device == "cpu" and entry.dtype == "float32"
        here = sizing.machine(settings, device, free, sampler, packed=packed)
        planned = sizing.plan(job.model, shape, work, here)
    except sizing.DoesNotFit as cause:
        raise UserMistake("not_enough_memory", str(cause), "model") from cause

    beat()
    held_to = stored_held_to(job.reinforcement["response_format"])
    model = Model(job.model, entry, settings.model_cache, resolved, job.seed, planned.checkpointed)
    computing: dict[str, Any] = {"token_budget": planned.token_budget, "held_to": held_to}
    ranks.start(model, device=device, threads=settings.torch_threads, **computing)
    policy = model.load(device)
    beat()
    support.probe(policy, sampled=sampler == "transformers")
    beat()
    ranks.wait()
    quota = Quota(settings.rollout_bytes_per_job, settings.rollouts_per_step)
    recorder = Recorder(database, blobs, claim, job, patience, settings.default_limits, quota)
    recorder.resolved(resolved, f"{sampler} {sampler_version}")
    if device == "cuda" or planned.checkpointed:
        recorder.inform(planned.described(shape, work), {})
    gate = SamplerGate.of(
        settings.max_logprob_gap, sampler=f"{sampler} {sampler_version}", precision=entry.dtype
    )
    return Run(
        settings=resolved,
        seed=job.seed,
        spec=spec,
        train_prompts=PromptStream(train, batch_size=resolved.batch_size, seed=job.seed),
        valid_prompts=valid,
        sampler=ObservedSampler(
            WatchedSampler(
                choice.build(
                    sampler, policy, settings, recorder, shape=shape, plan=planned, longest=work.longest
                ),
                beat,
            )
        ),
        rewards=Rewards(grader, parse_json=bool(held_to)),
        trainer=WatchedTrainer(
            PeftTrainer(policy, resolved, **computing, helpers=ranks.helpers, gate=gate), beat
        ),
        recorder=recorder,
        checkpoints=Checkpoints(database, blobs, claim, job, scratch, patience),
        stop_requested=stop,
        failing_steps=settings.failing_steps,
        held_to=held_to,
        feeds=feeds_of(job, resolved, settings, recorder.warn),
        gpus=ranks.total if device == "cuda" else 1,
        thresholds=settings.warnings,
    )


def read_data(
    database: Database, blobs: BlobStore, job: Job
) -> tuple[list[datasets.Example], list[datasets.Example]]:
    """The rows of the training file and of the validation file.

    Raises:
        UserMistake: one of them is missing or damaged. Another attempt would find the same.
    """
    assert job.validation_file is not None, "the API requires one"
    with database.read() as session:
        stored = {file.id: file for file in session.query(File).where(File.project_id == job.project_id)}

    def rows(param: str, file_id: str) -> list[datasets.Example]:
        if file_id not in stored:
            raise UserMistake(f"invalid_{param}", f"The file {file_id} was deleted.", param)
        try:
            return files.read_rows(blobs, stored[file_id])
        except (files.FileDamaged, datasets.InvalidDataset) as cause:
            raise UserMistake(f"invalid_{param}", str(cause), param) from cause

    return rows("training_file", job.training_file), rows("validation_file", job.validation_file)


def get_ready() -> None:
    """Import what `load` will need. It takes seconds, and a spare child has done it before there is a job."""
    for name in (
        "peft",
        "torch",
        "transformers",
        "worker.model.policy",
        "worker.rollout.samplers.choice",
        "worker.model.support",
        "worker.learn.trainer",
    ):
        import_module(name)


def main() -> int:
    """Run one claimed job in this process: the one that stdin names, `job_id epoch`, once that is known.

    The exit status is the whole answer to the supervisor.
    """
    parser = argparse.ArgumentParser(prog="python -m worker.run")
    parser.add_argument("parent", type=int, help="process id of the supervisor: this run dies with it")
    parser.add_argument("progress", type=Path, help="the file to touch whenever the run got somewhere")
    args = parser.parse_args()
    process.die_with_parent(args.parent)

    stopping = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides

    get_ready()
    settings = Settings()
    database = Database(settings.database)
    blobs = blobs_of(settings)
    job_id, epoch = sys.stdin.readline().split()
    claim = Claim(job_id, int(epoch), "run")
    # Once for the operator, beside what the supervisor says, and once for the job's own log.
    logs.configure([logs.handler(settings.log_format, sys.stdout), logs.handler("text", sys.stderr)])
    try:
        watched = instruments.attempt(claim, args.progress, settings.otlp_endpoint)
        with TemporaryDirectory(prefix="regraft-") as scratch, watched:
            beat = beats_into(args.progress)
            outcome = asyncio.run(
                attempt(settings, database, blobs, claim, Path(scratch), lambda: stopping, beat)
            )
    except LeaseLost:
        return process.LOST
    except ModelUnavailable as cause:
        # Worth another attempt, and no fault of the code: the words are enough.
        print(cause, file=sys.stderr)  # noqa: T201 - what the supervisor quotes
        return process.FAILED
    except EnvironmentNotBuilt as missing:
        with lifecycle.fenced(database, claim) as (session, job):
            lifecycle.put_off(session, job, reason=str(missing))
        return process.PUT_OFF
    except UserMistake as mistake:
        patience = Patience(settings.patience_seconds, partial(tell, database, claim))
        job = patience(partial(read_job, database, claim))
        Recorder(database, blobs, claim, job, patience).fail(
            code=mistake.code, message=mistake.message, param=mistake.param
        )
        return process.USER_MISTAKE
    return process.DONE if outcome is Outcome.DONE else process.DRAINED


if __name__ == "__main__":
    status = main()
    if left_behind():
        sys.stderr.flush()
        os._exit(status)  # and no library of a service finishes what it had begun
    sys.exit(status)
