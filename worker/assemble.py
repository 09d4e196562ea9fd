"""From a claimed job to its Run, in five parts: data, base model, task, memory plan, policy.

What can be refused is refused before the weights are loaded, which may take minutes. Importing this module imports
torch, peft and transformers, which takes seconds: worker/child.py does it before it waits for its job.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sqlalchemy.orm import Session
from transformers import PretrainedConfig, PreTrainedModel

from core.database.tables import Job
from core.errors import InvalidRequest, NotFound
from core.jobs import full, hyperparameters
from core.jobs.distillation import asked_of, param_of, teacher_of, top_of
from core.jobs.hyperparameter_groups import LoraTargets
from core.jobs.hyperparameters import Hyperparameters, Resolved
from core.model_checks import ModelChecks, installed_versions
from core.registry import BaseModelEntry, Device, Registry, SamplerName
from core.response_format import stored_held_to
from core.results.lineage import Parent, grading_model, start_of
from core.settings import Settings
from graders.build import reward_model_parts
from graders.judge.judges import JudgeModel
from graders.spec import GraderSpec
from graders.types import Grader
from worker.attempt import Attempt
from worker.backends import open_backends
from worker.heartbeat import Beat, WatchedSampler, WatchedTrainer
from worker.instruments import ObservedSampler
from worker.learn.distributed import LoadModel, load_checked, loading
from worker.learn.gradient import keep_memory
from worker.learn.loading import LoadingTrainer, SamplerMeanwhile
from worker.learn.rank_model import Model
from worker.learn.step_hooks import HookedTrainer
from worker.learn.teacher import PolicyTeacher
from worker.learn.trainer import PeftTrainer, Trainer
from worker.learn.world import World
from worker.model import full as full_policy
from worker.model import memory, quantized, sizing, support, teachers, verdicts
from worker.model.adapters import adapter_targets
from worker.model.architecture import refusing, without_weights
from worker.model.parent import continuing, start_from, whole_weights
from worker.model.policy import DTYPES, Policy, read_config, read_tokenizer, render, source_of
from worker.model.reasoning import Reasoning, detect, plan_effort
from worker.model.sizing import MemoryPlan, Shape, Workload
from worker.model.spelling import Speller
from worker.model.support import ForwardVerdict
from worker.model.teachers import TeacherModel
from worker.model.unloaded import unloaded_policy
from worker.offline.templates import template_of
from worker.progress import PROGRESS
from worker.record.checkpoints import Checkpoints
from worker.record.exporters.choice import feeds_of
from worker.record.gpu_ratio import RatioMeasurement
from worker.record.recorder import Quota, Recorder
from worker.refusals import InvalidTargets, UserMistake
from worker.rollout.prompts import NoPassRate, PromptStream, PromptTooLong, tokenize
from worker.rollout.reward_models import LoadedRewardModel, PolicyScores, read_reward_model
from worker.rollout.rewards import Rewards, Scoring
from worker.rollout.rows import Rows, read_rows
from worker.rollout.sampler_gate import SamplerGate
from worker.rollout.samplers import Sampler, choice
from worker.rollout.samplers.fleet import BlobAdapters, FleetSampler
from worker.rollout.samplers.fleet_members import FleetConfig
from worker.rollout.samplers.placement import NO_ENGINE, ONE_ENGINE, NotPlaceable, Placement
from worker.rollout.samplers.steering import Bounds, UnsupportedTags, grammar_of
from worker.rollout.samplers.vllm import VllmSampler
from worker.rollout.served_teacher import ServedTeacher, retries_within
from worker.rollout.taught import TeacherRewards
from worker.run import Run
from worker.sharing.base import OWN_ENGINE, RunsAlone, SharedBase
from worker.types import Prompt


class TooFewGpus(Exception):
    """There are fewer GPUs than ranks; each rank needs its own."""


NO_THOUGHTS = "thinking_budget needs a model that reasons, and this model's chat template has no thoughts."
GRADER_PARAM = "method.reinforcement.grader"


@dataclass(frozen=True)
class BaseModel:
    """The job's model, known from its config alone, and the sampler for it."""

    entry: BaseModelEntry
    source: Path | str
    shape: Shape
    device: Device
    sampler: SamplerName
    sampler_version: str
    rows: bool = False  # it is known or expected to be computed in rows
    precision: str = ""  # how its quantized weights are computed with, in words
    engines: Placement = ONE_ENGINE  # of vLLM
    fleet: tuple[str, ...] = ()  # the addresses of the fleet that samples instead


@dataclass(frozen=True)
class Task:
    """The training and validation prompts of a job, and the settings it trains with."""

    settings: Resolved
    train: list[Prompt]
    valid: list[Prompt]
    workload: Workload
    held_to: str  # the schema that answers are JSON of, or ""

    def prompts(self, seed: int) -> PromptStream:
        """The training prompts in the order of their epochs.

        Raises:
            UserMistake: rows lack what they are ordered by.
        """
        settings = self.settings
        try:
            return PromptStream(
                self.train, batch_size=settings.batch_size, seed=seed, order=settings.prompt_order
            )
        except NoPassRate as cause:
            raise UserMistake("invalid_value", str(cause), "training_file") from cause


def assemble(
    attempt: Attempt,
    spec: GraderSpec | None,
    grader: Grader | None,
    settings: Settings,
    scratch: Path,
    stop_requested: Callable[[], bool],
    beat: Beat,
    world: World | None = None,
) -> Run:
    """Build the Run of a claimed job. Without a grader it has a teacher.

    Raises:
        UserMistake, Refusal: the job cannot succeed as it is, on any worker.
        ModelUnavailable: the model could not be fetched. Another attempt may succeed.
    """
    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    settings = settings.of_class(settings.gpu_class)
    job = attempt.job
    rows = read_rows(attempt)
    local = 1 if world is None else world.local_size
    if full.is_full(job):
        refuse_full(job, settings)
    base = inspect_model(job.model, settings, local, off_policy=is_off_policy(job), full=full.is_full(job))
    refuse_to_share(attempt, base)
    teacher = teacher_model(attempt, settings, beat)
    judges = reward_models(attempt, spec, settings)
    task = prepare_task(attempt, rows, base, teacher)
    prompts = task.prompts(job.seed)
    plan = plan_memory(
        job.model, base, task, settings, local, teacher, has_judges=bool(judges), shared=attempt.shared
    )
    beat()
    parent, checkpoints = Parent.of(job), Checkpoints(attempt, scratch)
    fleet = fleet_of(job.model, base, task, settings)
    policy: Policy
    if samples_while_loading(attempt, fleet, parent, checkpoints, teacher, has_judges=bool(judges)):
        policy = unloaded_policy(job.model, base.entry, base.source, task.settings)
        verdict = None
    else:
        with whole_weights(parent, checkpoints, task.settings) as weights:
            policy, verdict = load_policy(attempt, base, task, plan, settings, beat, world, weights)

    sampler_name = f"{base.sampler} {base.sampler_version}"
    quota = Quota(
        settings.rollout_bytes_per_job, settings.rollouts_per_step, settings.rollout_tokens_per_step
    )
    recorder = Recorder(attempt, settings.default_limits, quota, Speller(policy.tokenizer))
    first = job.resolved is None
    recorder.resolved(task.settings, sampler_name)
    if first:
        if verdict is not None:
            report_verdict(recorder, verdict, policy)
        if base.precision:
            recorder.inform(base.precision, {})
        # Not on creation: only here the model's template is certainly known.
        if policy.reasoning is None and (effort := effort_of(job)) != "default":
            recorder.warn(
                f"reasoning_effort '{effort}' has no effect: the model's chat template has no thoughts.", {}
            )
    if base.device == "cuda" or plan.checkpointed:
        recorder.inform(plan.described(base.shape, task.workload), {})
    if fleet is not None:
        names = ", ".join(fleet.addresses)
        recorder.inform(f"Answers are sampled by the fleet at {names}.", {"addresses": fleet.addresses})
    elif base.engines.processes > 1 or base.engines.kind == "split" or plan.sleeps:
        report_placement(recorder, base.engines, plan)
    sampler = choice.build(
        base.sampler,
        policy,
        settings,
        recorder,
        shape=base.shape,
        plan=plan,
        longest=task.workload.longest,
        store=BlobAdapters(attempt),
        engines=base.engines,
        fleet=fleet,
        continues=task.settings.continue_in_flight,
        store_coverage=partial(
            verdicts.store_coverage,
            entry=base.entry,
            model_cache=settings.model_cache,
            targets=task.settings.lora_targets,
        ),
    )

    def trainer_of(policy: Policy) -> PeftTrainer:
        return PeftTrainer(
            policy,
            task.settings,
            **_computing(task, plan),
            world=world,
            gate=SamplerGate.of(settings.max_logprob_gap, sampler=sampler_name, precision=base.entry.dtype),
            keeps_tokens=settings.rollout_tokens_per_step > 0,
        )

    def load_trainer(sampler: FleetSampler) -> Trainer:
        loaded, verdict = load_policy(attempt, base, task, plan, settings, beat, world)
        report_verdict(recorder, verdict, loaded)
        sampler.use(loaded)
        return trainer_of(loaded)

    trainer: Trainer
    if verdict is None:
        assert isinstance(sampler, FleetSampler), "others need the loaded policy"
        trainer = unloaded = LoadingTrainer(partial(load_trainer, sampler))
        sampler = SamplerMeanwhile(sampler, unloaded)
    else:
        peft_trainer = trainer_of(policy)
        if parent is not None and start_from(parent, policy, checkpoints):
            peft_trainer.start_from_policy()
        trainer = coordinated(
            peft_trainer, sampler, sleeps=plan.sleeps, continues=task.settings.continue_in_flight
        )
    rewards: Scoring
    if teacher is not None:
        rewards = taught_by(teacher, policy, task, plan, checkpoints, settings, beat)
    else:
        assert grader is not None, "a job has a grader or a teacher"
        scores = None
        if judges:
            loaded = [load_reward_model(one, policy, base, checkpoints) for one in judges]
            scores = PolicyScores(policy, loaded, plan.token_budget, beat)
        rewards = Rewards(grader, parse_json=bool(task.held_to), models=scores)
    return Run(
        settings=task.settings,
        seed=job.seed,
        spec=spec,
        train_prompts=prompts,
        valid_prompts=task.valid,
        sampler=ObservedSampler(WatchedSampler(sampler, beat)),
        rewards=rewards,
        trainer=WatchedTrainer(trainer, beat),
        recorder=recorder,
        checkpoints=checkpoints,
        stop_requested=stop_requested,
        failing_steps=settings.failing_steps,
        held_to=task.held_to,
        feeds=feeds_of(job, task.settings, settings, recorder.warn),
        gpus=gpus_of(world, settings) if base.device == "cuda" else 1,
        thresholds=settings.warnings,
        ratio=ratio_of(base.engines, world),
    )


def samples_while_loading(
    attempt: Attempt,
    fleet: FleetConfig | None,
    parent: Parent | None,
    checkpoints: Checkpoints,
    teacher: TeacherModel | None,
    *,
    has_judges: bool,
) -> bool:
    """Whether the job's first answers are sampled and scored without the loaded policy: by the base model, in a fleet.

    A job that starts from an adapter or resumes has other first answers. One that shares its base does not load it.
    """
    starts_fresh = parent is None and checkpoints.is_empty
    alone = attempt.shared is None and not scores_here(teacher, has_judges=has_judges)
    return fleet is not None and starts_fresh and alone


def report_verdict(recorder: Recorder, verdict: ForwardVerdict, policy: Policy) -> None:
    recorder.inform(verdict.described(policy.trained), verdict.as_data(policy.trained))


def coordinated(trainer: Trainer, sampler: Sampler, *, sleeps: bool, continues: bool) -> Trainer:
    """Return a trainer whose steps also have the sampler sleep before, or continue answers in flight after."""
    if not (sleeps or continues):
        return trainer
    assert isinstance(sampler, VllmSampler), (
        "only the job's own engines sleep or continue; others are refused"
    )
    if sleeps:
        trainer = HookedTrainer(trainer, before_step=sampler.sleep)
    return HookedTrainer(trainer, after_step=sampler.update_in_flight) if continues else trainer


def report_placement(recorder: Recorder, placed: Placement, plan: MemoryPlan) -> None:
    sleep = " They sleep while the job learns." if plan.sleeps else ""
    recorder.inform(
        f"Placement: {placed.kind}. Answers are sampled by {placed}.{sleep}",
        {
            "placement": placed.kind,
            "engines": placed.engines,
            "tensor_parallel": placed.tensor_parallel,
            "gpus": placed.gpus_E,
            "sleeps": plan.sleeps,
        },
    )


def teacher_model(attempt: Attempt, settings: Settings, beat: Beat) -> TeacherModel | None:
    """The teacher of a distillation job; None for other jobs. Waits for one on a server.

    Raises:
        UserMistake: there is none of this name any more, or it does not share the student's tokens.
        ModelUnavailable: its server does not answer.
    """
    job = attempt.job
    name = teacher_of(job)
    if name is None:
        return None
    registry = Registry.load(settings.models_file)
    try:
        base, parent = attempt.read(
            lambda session: start_of(session, job.project_id, name, registry, param=teachers.PARAM)
        )
    except NotFound as absent:
        server = open_backends(settings).models.get(name)
        if server is None:
            raise UserMistake("model_not_available", str(absent), teachers.PARAM) from absent
        student = registry.get(job.model)
        tokenizer = read_tokenizer(student, source_of(student, settings.model_cache))
        served = served_teacher(name, server, settings, beat)
        served.refuse_other_tokens(tokenizer)
        if (top_k := top_of(job)) is not None:
            served.refuse_top(tokenizer, top_k)
        return TeacherModel(name, None, None, server=server)
    except InvalidRequest as cause:
        raise UserMistake("model_not_available", str(cause), teachers.PARAM) from cause
    entries = {one: registry.get(one) for one in (base, job.model)}
    return teachers.inspect_teacher(name, base, parent, job.model, entries, settings.model_cache)


def served_teacher(name: str, server: JudgeModel, settings: Settings, beat: Beat) -> ServedTeacher:
    """One whose outages a run waits for as for those of database and blob store."""

    async def wait(seconds: float) -> None:
        with PROGRESS.waiting(f"teacher '{name}'"):
            await asyncio.sleep(seconds)
        beat()

    return ServedTeacher(name, server, beat, retries_within(settings.patience_seconds, wait))


def reward_models(attempt: Attempt, spec: GraderSpec | None, settings: Settings) -> list[Parent]:
    """The reward models that the grader reads.

    Raises:
        UserMistake: there is none of this name any more, or it is on another base model.
    """
    job = attempt.job
    registry = Registry.load(settings.models_file)
    found: dict[str, Parent] = {}
    for param, part in () if spec is None else reward_model_parts(spec, GRADER_PARAM):
        try:
            found[part.model] = attempt.read(
                partial(reward_model_of, registry=registry, job=job, name=part.model, param=f"{param}.model")
            )
        except (NotFound, InvalidRequest) as cause:
            raise UserMistake("model_not_available", str(cause), f"{param}.model") from cause
    return list(found.values())


def reward_model_of(session: Session, *, registry: Registry, job: Job, name: str, param: str) -> Parent:
    return grading_model(session, job.project_id, name, job.model, registry, param=param)


def load_reward_model(
    parent: Parent, policy: Policy, base: BaseModel, checkpoints: Checkpoints
) -> LoadedRewardModel:
    """Read a reward model's weights, and the chat template that it learned with.

    Raises:
        UserMistake: the weights of the base model are divided over GPUs, or its files were deleted or do not fit.
    """
    if policy.is_sharded:
        raise UserMistake(
            "not_enough_memory",
            "The model does not fit on one GPU, and a model whose weights are divided over GPUs cannot have a reward "
            "model as a grader in this version.",
            "model",
        )
    tokenizer = read_tokenizer(
        base.entry,
        base.source,
        parent.settings["chat_template"],
        parent.settings["chat_template_kwargs"],
    )
    return read_reward_model(parent, policy, tokenizer, template_of(base.source, tokenizer), checkpoints)


def taught_by(
    teacher: TeacherModel,
    policy: Policy,
    task: Task,
    plan: MemoryPlan,
    checkpoints: Checkpoints,
    settings: Settings,
    beat: Beat,
) -> TeacherRewards:
    """Load the teacher beside the policy, unless it is on a server.

    Raises:
        UserMistake: the student's weights are divided over GPUs and the teacher is not on a server, or the teacher's
            adapter is gone.
        UnsupportedModel: a second model whose forward pass is not right here.
    """
    if teacher.server is not None:
        served = served_teacher(teacher.name, teacher.server, settings, beat)
        return TeacherRewards(served, temperature=task.settings.temperature, paid=teacher.name)
    if policy.is_sharded:
        raise UserMistake(
            "not_enough_memory",
            "The model does not fit on one GPU, and a model whose weights are divided over GPUs cannot have a teacher "
            "in its memory: one on a server can teach it.",
            "model",
        )
    loaded = teachers.load_teacher(teacher, policy, task.settings, checkpoints, settings.model_cache, beat)
    own = PolicyTeacher(loaded.policy, loaded.teaching, plan.token_budget, beat)
    return TeacherRewards(own, temperature=task.settings.temperature)


def refuse_full(job: Job, settings: Settings) -> None:
    """Raises UserMistake: this worker cannot train or sample all weights of the model."""
    registry = Registry.load(settings.models_file)
    name = registry.resolve(job.model)
    problem = full.several_machines(settings) or full.problem(name, registry.get(name), settings)
    if problem:
        raise UserMistake("unsupported_parameter", problem, full.param_of(job))


def ratio_of(engines: Placement, world: World | None) -> RatioMeasurement | None:
    """None: no GPUs are split, or other machines learn too, so that the settings of one machine are not the ratio."""
    ranks = 1 if world is None else world.local_size
    if engines.kind != "split" or (world is not None and world.size > ranks):
        return None
    return RatioMeasurement(engines.processes, ranks, engines.tensor_parallel)


def gpus_of(world: World | None, settings: Settings) -> int:
    """The GPUs that the job occupies on all machines."""
    return (1 if world is None else world.size) + settings.sampling_gpus


def inspect_model(
    name: str,
    settings: Settings,
    ranks: int,
    *,
    off_policy: bool = False,
    samples: bool = True,
    full: bool = False,
) -> BaseModel:
    """Read the model's config and select its sampler. Refuse what is not supported here.

    Args:
        off_policy: whether the job samples a batch while it learns from the one before.
        samples: whether it samples at all.
        full: whether all weights are trained.

    Raises:
        UserMistake: its sampler is not installed, needs more GPUs than a job has, or cannot be divided.
        UnsupportedModel: the architecture is not computed correctly here.
        TooFewGpus: this machine has fewer GPUs than REGRAFT_RANKS and REGRAFT_SAMPLING_GPUS together.
    """
    registry = Registry.load(settings.models_file)
    entry = registry.get(name)
    fleet = settings.samplers.get(registry.resolve(name), ())
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        sampler, version = choice.choose(entry, settings, device, fleet=bool(fleet))
    except choice.SamplerMissing as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause
    if device == "cuda" and ranks + settings.sampling_gpus > torch.cuda.device_count():
        raise TooFewGpus(
            f"REGRAFT_RANKS is {ranks}, REGRAFT_SAMPLING_GPUS is {settings.sampling_gpus}, and there are "
            f"{torch.cuda.device_count()} GPUs here."
        )
    try:
        engines = NO_ENGINE
        if samples and not fleet:
            engines = choice.place(sampler, entry, settings, device, ranks, off_policy=off_policy)
    except NotPlaceable as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause
    source = source_of(entry, settings.model_cache)
    config: PretrainedConfig = read_config(source)
    support.refuse_by_config(config, entry.context)
    precision = quantized.described(config, DTYPES[entry.dtype], sampler)
    with refusing(config):
        shape = memory.shape_of(config, DTYPES[entry.dtype])
        checked = ModelChecks(settings.model_cache).latest(entry, installed_versions())
        rows = checked.forward == "rows" if checked is not None else memory.expects_rows(config)
    if full:
        full_policy.refuse(config, shape.parameters)
    if shape.heads % engines.tensor_parallel:
        raise UserMistake(
            "sampler_unavailable",
            f"`tensor_parallel = {engines.tensor_parallel}` in the model's entry does not divide its {shape.heads} "
            "attention heads.",
            "model",
        )
    return BaseModel(entry, source, shape, device, sampler, version, rows, precision, engines, fleet)


def refuse_to_share(attempt: Attempt, base: BaseModel) -> None:
    """Check whether the job can share its base model with others, if that is what it is to do.

    Raises:
        RunsAlone: it cannot. It can run alone.
        BaseLost: the process that holds the base has ended.
    """
    if attempt.shared is None:
        return
    if base.sampler == "vllm" and not base.fleet:
        raise RunsAlone(OWN_ENGINE)
    attempt.shared.refuse_other(base.entry, base.source)


def shared_by(attempt: Attempt, base: BaseModel) -> Callable[[], PreTrainedModel] | None:
    """What loads the base model from the process that holds it; None: the job loads its own."""
    if attempt.shared is None:
        return None
    if base.device == "cuda":
        # A job that needs more than its part fails by itself, and not its neighbor.
        own = attempt.shared.memory(base.shape.weight_bytes) - base.shape.weight_bytes
        torch.cuda.set_per_process_memory_fraction(own / torch.cuda.get_device_properties(0).total_memory)
    return attempt.shared.load


def fleet_of(name: str, base: BaseModel, task: Task, settings: Settings) -> FleetConfig | None:
    """The fleet that samples for the job. None: its own engines or the trainer do."""
    if not base.fleet:
        return None
    return FleetConfig(
        model=Registry.load(settings.models_file).resolve(name),
        dtype=base.entry.dtype,
        context=task.workload.longest,
        rank=task.settings.lora_rank,
        addresses=base.fleet,
        key=settings.samplers_key,
        patience=settings.patience_seconds,
    )


def prepare_task(attempt: Attempt, rows: Rows, base: BaseModel, teacher: TeacherModel | None = None) -> Task:
    """Resolve the hyperparameters and render the prompts.

    Raises:
        UserMistake: a prompt is too long, or the sampler does not do what a hyperparameter asks for.
    """
    job = attempt.job
    assert job.validation_file is not None, "the API requires one"
    asked = asked_of(job)
    named = None if asked.advanced.sampling.chat_template == "auto" else asked.advanced.sampling.chat_template
    reasoning = detect(read_tokenizer(base.entry, base.source, named))
    resolved = hyperparameters.resolve(
        asked,
        rows=len(rows.train),
        parameters=base.shape.parameters,
        context=base.entry.context,
        reasons=reasoning is not None and not reasoning.form.off,
    )
    # An adapter that teaches takes turns with the student's own, so both have one shape.
    start = Parent.of(job) or (None if teacher is None else teacher.adapter)
    resolved = continuing(with_effort(resolved, asked, reasoning), start)
    resolved = hyperparameters.kept(resolved, job.resolved)
    refuse_absent_targets(base, resolved.lora_targets, param_of(job, "lora_targets"))
    tokenizer = read_tokenizer(base.entry, base.source, resolved.chat_template, resolved.chat_template_kwargs)
    room = {"context": base.entry.context, "max_completion_tokens": resolved.max_completion_tokens}
    param = "training_file"
    try:
        train = tokenize(rows.train, partial(render, tokenizer), file=job.training_file, **room)
        param = "validation_file"
        valid = tokenize(rows.valid, partial(render, tokenizer), file=job.validation_file, **room)
    except PromptTooLong as cause:
        raise UserMistake("prompt_too_long", str(cause), param) from cause
    if resolved.off_policy_steps and base.sampler == "transformers":
        raise UserMistake(
            "invalid_value", hyperparameters.NO_SAMPLER_OF_ITS_OWN, "method.reinforcement.hyperparameters"
        )
    if resolved.continue_in_flight and base.fleet:
        raise UserMistake(
            "invalid_value", hyperparameters.NO_ENGINES_OF_ITS_OWN, param_of(job, "continue_in_flight")
        )
    schema = stored_held_to(job.body.get("response_format"))
    if base.sampler == "vllm":
        try:
            grammar_of(detect(tokenizer), Bounds(schema, resolved.thinking_budget))
        except UnsupportedTags as cause:
            raise UserMistake("invalid_value", str(cause), "model") from cause
    workload = sizing.workload(
        rank=resolved.lora_rank,
        targets=resolved.lora_targets,
        full=resolved.train == "full",
        references=resolved.reference_copies,
        copied=base.rows and base.sampler == "transformers",
        prompt=max(len(prompt.ids) for prompt in [*train, *valid]),
        completion=resolved.max_completion_tokens,
        batch=resolved.batch_size + resolved.resample_prompts,
        group=resolved.group_size,
        valid_rows=len(valid),
        eval_samples=resolved.eval_samples,
        off_policy_steps=resolved.off_policy_steps,
    )
    return Task(resolved, train, valid, workload, schema)


def refuse_absent_targets(base: BaseModel, targets: LoraTargets, path: str) -> None:
    """Check the names before the weights are loaded. `path` is that of the hyperparameter in the request.

    Raises:
        UserMistake: layers with these names do not exist, or cannot have an adapter.
    """
    if targets == "all-linear":
        return
    try:
        adapter_targets(without_weights(read_config(base.source)), targets)
    except InvalidTargets as cause:
        raise UserMistake(cause.code, str(cause), path) from cause


def takes_turns(settings: Resolved, teacher: TeacherModel | None, *, has_judges: bool) -> bool:
    """Whether nothing is sampled while the trainer's GPU computes: neither an update nor the scores of answers."""
    return not (settings.overlap or settings.off_policy_steps or scores_here(teacher, has_judges=has_judges))


def scores_here(teacher: TeacherModel | None, *, has_judges: bool) -> bool:
    """Whether the worker's own models score answers."""
    return has_judges or (teacher is not None and teacher.server is None)


def is_off_policy(job: Job) -> bool:
    return asked_of(job).advanced.schedule.type == "off_policy"


def effort_of(job: Job) -> str:
    return asked_of(job).reasoning_effort


def with_effort(resolved: Resolved, asked: Hyperparameters, reasoning: Reasoning | None) -> Resolved:
    """Translate `reasoning_effort` to arguments of the chat template and a budget, where neither is given.

    Raises:
        UserMistake: a thinking_budget without thoughts, or without room for an answer.
    """
    param = f"method.reinforcement.hyperparameters.advanced.{asked.advanced.path('thinking_budget')}"
    if reasoning is None:
        if resolved.thinking_budget is not None:
            raise UserMistake(
                "invalid_value",
                NO_THOUGHTS,
                param,
            )
        return resolved
    longest, given = resolved.max_completion_tokens, resolved.thinking_budget
    effort = plan_effort(reasoning, asked.reasoning_effort, longest)
    budget = effort.budget if given is None else given
    if budget is not None and budget + len(reasoning.closing_ids) >= longest:
        if given is not None:
            raise UserMistake(
                "invalid_value",
                f"thinking_budget {given} leaves no room for an answer in max_completion_tokens {longest}.",
                param,
            )
        budget = None
    arguments = {**effort.arguments, **resolved.chat_template_kwargs}
    return resolved.model_copy(update={"chat_template_kwargs": arguments, "thinking_budget": budget})


def plan_memory(
    name: str,
    base: BaseModel,
    task: Task,
    settings: Settings,
    ranks: int,
    teacher: TeacherModel | None = None,
    *,
    has_judges: bool = False,
    shared: SharedBase | None = None,
) -> MemoryPlan:
    """Divide the free memory, without that of the teacher's weights, between weights, KV cache and micro-batches.

    Args:
        has_judges: reward models score answers on the GPU while others are sampled.
        shared: other jobs have an equal part of what this base leaves.

    Raises:
        UserMistake: the job does not fit.
        RunsAlone: it does not fit beside others.
    """
    # Processes on a CPU share its memory; on GPUs each has its own device.
    processes = 1
    split = base.engines.kind == "split"
    if base.device == "cpu":
        sampling = base.engines.processes
        processes = ranks + sampling if split else max(ranks, sampling)
    weight_bytes = base.shape.weight_bytes
    free = memory.available(base.device) // processes if shared is None else shared.memory(weight_bytes)
    packed = base.device == "cpu" and base.entry.dtype == "float32"
    if teacher is not None:
        free = max(0, free - teacher.weight_bytes(packed=packed))
    machine = sizing.machine(
        settings,
        base.device,
        free,
        base.sampler,
        packed=packed,
        engines=base.engines.engines,
        tensor_parallel=base.engines.tensor_parallel,
        split=split,
        may_sleep=takes_turns(task.settings, teacher, has_judges=has_judges),
        main_memory=memory.available("cpu"),
    )
    try:
        return sizing.plan_sharded(name, base.shape, task.workload, machine, ranks)
    except sizing.DoesNotFit as cause:
        if shared is not None:
            raise RunsAlone(f"beside {shared.jobs - 1} others {cause}") from cause
        raise UserMistake("not_enough_memory", str(cause), "model") from cause


def load_policy(
    attempt: Attempt,
    base: BaseModel,
    task: Task,
    plan: MemoryPlan,
    settings: Settings,
    beat: Beat,
    world: World | None = None,
    weights: Path | None = None,
) -> tuple[Policy, ForwardVerdict]:
    """Load the model on all ranks, and find the forward pass whose log-probabilities are those of transformers.

    Args:
        weights: a whole model that the job trains further.

    Raises:
        UnsupportedModel: none is.
    """
    job = attempt.job
    model = Model(
        job.model,
        base.entry,
        settings.model_cache,
        task.settings,
        job.seed,
        plan.checkpointed,
        sampled=base.sampler == "transformers",
        weights=weights,
        shared=shared_by(attempt, base),
    )
    computing = _computing(task, plan)
    with loading(
        world, LoadModel(model, base.device, settings.torch_threads, **computing, degree=plan.degree)
    ):
        policy, verdict = load_checked(model, base.device, plan.degree, world, beat)
        computing["release"]()
    return policy, verdict


def _computing(task: Task, plan: MemoryPlan) -> dict[str, Any]:
    """The arguments that trainer and ranks share."""
    return {
        "token_budget": plan.token_budget,
        "held_to": task.held_to,
        # vLLM wakes in the memory that PyTorch would keep for the next step.
        "release": torch.cuda.empty_cache if plan.sleeps else keep_memory,
    }
