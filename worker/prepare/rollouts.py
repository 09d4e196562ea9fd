"""The experience of a job that samples: its sampler, its trainer, and what scores its answers."""

from functools import partial

from graders.build import is_judged, judge_parts
from graders.spec import GraderSpec, LabelModelSpec, ScoreModelSpec, parts_of
from graders.types import Grader
from graders.weighted_sum import weights_of_parts
from worker.checks import compatibility_cache
from worker.gpu_ratio import GpuSplit, RatioMeasurement
from worker.heartbeat import HeartbeatSampler, HeartbeatTrainer
from worker.instruments import InstrumentedSampler
from worker.interfaces import Scorer, Trainer
from worker.model.architecture import has_experts
from worker.model.policy import Policy
from worker.model.sizing import MemoryPlan
from worker.model.tool_calls import CallReader
from worker.prepare.episodes import sampler_of_episodes
from worker.prepare.loaded import BackgroundPolicy, LoadedPolicy, release_of
from worker.prepare.run_memory import EngineMemory
from worker.prepare.scorers import load_reward_model, training_rewards
from worker.prepare.task import PromptTask, effort_of
from worker.prepare.training_plan import TrainingPlan
from worker.recording.recorder import JobRecorder
from worker.rollout.anchors import JudgeAnchors
from worker.rollout.experience import Rewards, RolloutExperience, grader_parts
from worker.rollout.reward_models import PolicyScores
from worker.rollout.shadow import Shadow
from worker.sampling import Sampler, choice
from worker.sampling.placement import Placement
from worker.sampling.transformers import TransformersSampler
from worker.sampling.vllm import VllmSampler
from worker.sampling.weights import BlobAdapters
from worker.training.sampler_gate import SamplerGate
from worker.training.step_hooks import HookedTrainer
from worker.training.trainer import PeftTrainer
from worker.training.world import World


def rollout_experience(
    plan: TrainingPlan,
    task: PromptTask,
    start: LoadedPolicy | BackgroundPolicy,
    recorder: JobRecorder,
    spec: GraderSpec | None,
    grader: Grader | None,
) -> RolloutExperience:
    settings, beat = plan.settings, plan.beat
    report_sampling(plan, task, start.policy, recorder)
    sampler = sampler_of(plan, task, start.policy, recorder)
    sampler, trainer = start.connect(sampler, partial(trainer_of, plan, task, recorder), recorder)
    trainer = coordinated(trainer, sampler, plan.run_memory, continues=task.settings.continue_in_flight)
    if task.episodes is not None:
        assert isinstance(sampler, TransformersSampler | VllmSampler), "they sample turns"
        sampler = sampler_of_episodes(plan, task, start.policy, sampler, recorder)
    return RolloutExperience(
        settings=task.settings,
        seed=plan.job.seed,
        graders=grader_parts(spec),
        train_prompts=task.train,
        valid_prompts=task.valid,
        sampler=InstrumentedSampler(HeartbeatSampler(sampler, beat)),
        rewards=scorer_of(plan, task, start.policy, grader),
        trainer=HeartbeatTrainer(trainer, beat),
        failing_steps=settings.failing_steps,
        response_schema=task.response_schema,
        gpus=plan.gpus,
        thresholds=settings.warnings,
        split=split_of(plan.base.engines, plan.world),
        ratio=ratio_of(plan.base.engines, plan.world),
        sampled=plan.attempt.sampled,
        shadow=shadow_of(plan, task),
        anchors=anchors_of(task, spec, grader),
    )


def report_sampling(plan: TrainingPlan, task: PromptTask, policy: Policy, recorder: JobRecorder) -> None:
    """Record how the job is sampled, and what it asks for in vain."""
    base, memory, fleet = plan.base, plan.memory, plan.fleet
    effort = effort_of(plan.job)
    # Not on creation: only here the model's template is certainly known.
    if plan.is_first and policy.reasoning is None and effort != "default":
        recorder.warn(
            f"reasoning_effort '{effort}' has no effect: the model's chat template has no thoughts.", {}
        )
    if base.device == "cuda" or memory.checkpointed:
        recorder.inform(memory.described(base.shape, task.workload), {})
    if fleet is not None:
        names = ", ".join(fleet.addresses)
        recorder.inform(f"Answers are sampled by the fleet at {names}.", {"addresses": fleet.addresses})
    elif base.engines.processes > 1 or base.engines.kind == "split" or memory.sleeps:
        report_placement(recorder, base.engines, memory)


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


def sampler_of(plan: TrainingPlan, task: PromptTask, policy: Policy, recorder: JobRecorder) -> Sampler:
    base = plan.base
    return choice.build(
        base.sampler,
        policy,
        plan.settings,
        recorder.warn,
        shape=base.shape,
        plan=plan.memory,
        store=BlobAdapters(plan.attempt),
        engines=base.engines,
        fleet=plan.fleet,
        continues=task.settings.continue_in_flight,
        lower=plan.run_memory.lower_engine,
        store_coverage=partial(
            compatibility_cache.store_coverage,
            entry=base.entry,
            model_cache=plan.settings.model_cache,
            targets=task.settings.lora_targets,
        ),
    )


def trainer_of(plan: TrainingPlan, task: PromptTask, recorder: JobRecorder, policy: Policy) -> PeftTrainer:
    settings, base = plan.settings, plan.base
    gate = SamplerGate.of(
        settings.max_logprob_gap,
        sampler=base.sampler_name,
        precision=base.entry.dtype,
        architecture="mixture" if has_experts(policy.causal.config) else "dense",
        quantization=base.quantization if base.quantizes_activations else "",
    )
    return PeftTrainer(
        policy,
        task.settings,
        token_budget=plan.memory.token_budget,
        response_schema=task.response_schema,
        release=release_of(plan),
        world=plan.world,
        memory=plan.run_memory,
        gate=gate,
        reports=recorder,
        keeps_tokens=settings.rollout_tokens_per_step > 0,
    )


def coordinated(trainer: Trainer, sampler: Sampler, run_memory: EngineMemory, *, continues: bool) -> Trainer:
    """Return a trainer whose steps also have the sampler sleep before, or continue answers in flight after."""
    if not isinstance(sampler, VllmSampler) or not sampler.has_own_engines:
        return trainer  # others neither sleep nor continue
    run_memory.use(sampler)
    trainer = HookedTrainer(trainer, before_step=run_memory.before_step)
    return HookedTrainer(trainer, after_step=sampler.update_in_flight) if continues else trainer


def scorer_of(plan: TrainingPlan, task: PromptTask, policy: Policy, grader: Grader | None) -> Scorer:
    """What scores the answers: the job's teacher, or its grader with the reward models that this reads."""
    if plan.teacher is not None:
        return training_rewards(
            plan.teacher,
            policy,
            task,
            plan.memory,
            plan.checkpoints,
            plan.settings,
            plan.beat,
            plan.attempt.ledger,
        )
    assert grader is not None, "a job has a grader or a teacher"
    scores = None
    if plan.judges:
        loaded = [load_reward_model(one, policy, plan.base, plan.checkpoints) for one in plan.judges]
        scores = PolicyScores(policy, loaded, plan.memory.token_budget, plan.beat)
    reader = None if task.tool_parser is None else CallReader.of(task.tool_parser, policy.tokenizer)
    return Rewards(grader, parse_json=bool(task.response_schema), models=scores, call_reader=reader)


def shadow_of(plan: TrainingPlan, task: PromptTask) -> Shadow | None:
    grader = plan.attempt.shadow_grader
    return None if grader is None else Shadow(grader, parse_json=bool(task.response_schema))


def anchors_of(task: PromptTask, spec: GraderSpec | None, grader: Grader | None) -> JudgeAnchors | None:
    """None: no judge grades, or only with scores of reward models, which are not computed again."""
    if spec is None or grader is None or not is_judged(spec):
        return None
    looks, parse_json = task.settings.validations, bool(task.response_schema)
    return JudgeAnchors(grader, looks, judged_range(spec), parse_json=parse_json)


def judged_range(spec: GraderSpec) -> float:
    """By how much the judges can move a score: the sum of their ranges times their weights, at least 1.

    In a formula that is no weighted sum each judge has the weight 1.
    """
    weights, parts = weights_of_parts(spec), parts_of(spec)
    if not weights:
        return max(1.0, sum(_width(part) for _, part in judge_parts(spec)))
    return max(
        1.0,
        sum(
            abs(weight) * _width(part)
            for key, weight in weights.items()
            for _, part in judge_parts(parts[key])
        ),
    )


def _width(part: ScoreModelSpec | LabelModelSpec) -> float:
    low, high = part.bounds if isinstance(part, ScoreModelSpec) else (0.0, 1.0)
    return high - low


def split_of(engines: Placement, world: World | None) -> GpuSplit | None:
    """None: the same GPUs sample and learn."""
    if engines.kind != "split":
        return None
    return GpuSplit(engines.processes, 1 if world is None else world.size)


def ratio_of(engines: Placement, world: World | None) -> RatioMeasurement | None:
    """None: no GPUs are split, or other machines learn too, so that the settings of one machine are not the ratio."""
    ranks = 1 if world is None else world.local_size
    if engines.kind != "split" or (world is not None and world.size > ranks):
        return None
    return RatioMeasurement(engines.processes, ranks, engines.tensor_parallel)
