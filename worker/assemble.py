"""From a claimed job to its Run, in five parts: data, base model, task, memory plan, policy.

What can be refused is refused before the weights are loaded, which may take minutes (worker/prepare/). Importing this
module imports torch, peft and transformers, which takes seconds: worker/child.py does it before it waits for its job.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.jobs import full
from core.registry import Registry
from core.results.lineage import Parent
from core.settings import Settings
from graders.spec import GraderSpec
from graders.types import Grader
from worker.attempt import Attempt
from worker.heartbeat import Beat, WatchedSampler, WatchedTrainer
from worker.instruments import ObservedSampler
from worker.interfaces import Scorer, Trainer
from worker.learn.distributed import LoadModel, load_checked, loading
from worker.learn.gradient import keep_memory
from worker.learn.loading import LoadingTrainer, SamplerMeanwhile
from worker.learn.rank_model import Model
from worker.learn.step_hooks import HookedTrainer
from worker.learn.trainer import PeftTrainer
from worker.learn.world import World
from worker.model import verdicts
from worker.model.parent import start_from, whole_weights
from worker.model.policy import Policy
from worker.model.sizing import MemoryPlan
from worker.model.spelling import Speller
from worker.model.support import ForwardVerdict
from worker.model.teachers import TeacherModel
from worker.model.unloaded import unloaded_policy
from worker.prepare.memory_plan import plan_memory
from worker.prepare.model import BaseModel, inspect_model, refuse_full, refuse_to_share, shared_by
from worker.prepare.scorers import load_reward_model, reward_models, scores_here, taught_by, teacher_model
from worker.prepare.task import Task, effort_of, is_off_policy, prepare_task
from worker.prepare.template_report import report_template
from worker.record.checkpoints import JobCheckpoints
from worker.record.exporters.choice import exporters_of
from worker.record.gpu_ratio import RatioMeasurement
from worker.record.recorder import JobRecorder, Quota
from worker.rollout.grader_parts import grader_parts
from worker.rollout.reward_models import PolicyScores
from worker.rollout.rewards import Rewards
from worker.rollout.rows import read_rows
from worker.rollout.sampler_gate import SamplerGate
from worker.rollout.samplers import Sampler, choice
from worker.rollout.samplers.fleet import BlobAdapters, FleetSampler
from worker.rollout.samplers.fleet_members import FleetConfig
from worker.rollout.samplers.placement import Placement
from worker.rollout.samplers.vllm import VllmSampler
from worker.run import Run


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
    parent, checkpoints = Parent.of(job), JobCheckpoints(attempt, scratch)
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
    recorder = JobRecorder(attempt, settings.default_limits, quota, Speller(policy.tokenizer))
    first = job.resolved is None
    recorder.resolved(task.settings, sampler_name)
    if first:
        if warning := choice.missing_vllm(base.entry, settings, base.device, base.sampler):
            recorder.warn(warning, {"sampler": base.sampler})
        if verdict is not None:
            report_verdict(recorder, verdict, policy)
        report_template(
            recorder, policy, {job.training_file: rows.train, job.validation_file or "": rows.valid}
        )
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
    rewards: Scorer
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
        graders=grader_parts(spec),
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
        exporters=exporters_of(job, task.settings, settings, recorder.warn),
        gpus=gpus_of(world, settings) if base.device == "cuda" else 1,
        thresholds=settings.warnings,
        ratio=ratio_of(base.engines, world),
    )


def samples_while_loading(
    attempt: Attempt,
    fleet: FleetConfig | None,
    parent: Parent | None,
    checkpoints: JobCheckpoints,
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


def report_verdict(recorder: JobRecorder, verdict: ForwardVerdict, policy: Policy) -> None:
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


def report_placement(recorder: JobRecorder, placed: Placement, plan: MemoryPlan) -> None:
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


def ratio_of(engines: Placement, world: World | None) -> RatioMeasurement | None:
    """None: no GPUs are split, or other machines learn too, so that the settings of one machine are not the ratio."""
    ranks = 1 if world is None else world.local_size
    if engines.kind != "split" or (world is not None and world.size > ranks):
        return None
    return RatioMeasurement(engines.processes, ranks, engines.tensor_parallel)


def gpus_of(world: World | None, settings: Settings) -> int:
    """The GPUs that the job occupies on all machines."""
    return (1 if world is None else world.size) + settings.sampling_gpus


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
