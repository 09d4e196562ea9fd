"""From a claimed job that samples nothing to its run. What can be refused is refused before the weights are loaded."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.jobs import full, methods, offline_hyperparameters
from core.results.lineage import Parent, start_name
from core.settings import Settings
from core.storage.offline_rows import FORMS, reward_kind
from worker.assemble import gpus_of
from worker.attempt import Attempt
from worker.heartbeat import Beat
from worker.learn.distributed import LoadModel, RankTeacher, load_checked, loading
from worker.learn.offline import OfflineTrainer, RewardTrainer, SoftTargetTrainer
from worker.learn.rank_model import Model
from worker.learn.teacher import TeacherPolicy
from worker.learn.world import World
from worker.model import sizing, teachers
from worker.model.memory import DeviceMemory
from worker.model.parent import continuing, start_from, whole_weights
from worker.model.policy import read_tokenizer, set_arguments
from worker.model.reward_head import RewardHead, Scale
from worker.model.sizing import MemoryPlan
from worker.model.teachers import TeacherModel
from worker.model.template import with_fixed_clock
from worker.offline.rows import TokenizedRow, tokenize
from worker.offline.run import OfflineRun
from worker.offline.stream import RowStream, sample
from worker.offline.templates import template_of
from worker.prepare.memory_plan import plan_beside, plan_within
from worker.prepare.model import BaseModel, inspect_model, refuse_to_share, shared_by
from worker.prepare.scorers import served_teacher, teacher_model
from worker.prepare.task import refuse_absent_targets
from worker.prepare.template_report import report_template
from worker.record.checkpoints import JobCheckpoints
from worker.record.exporters.choice import exporters_of
from worker.record.recorder import JobRecorder, Quota
from worker.refusals import UserMistake
from worker.rollout.rows import read_file
from worker.rollout.served_teacher import ServedTeacher
from worker.sharing.base import SharedBase
from worker.types import Pack

# Rows whose answers tell the scale of a reward model's rewards.
SCALED_ROWS = 256


def assemble(
    attempt: Attempt,
    settings: Settings,
    scratch: Path,
    stop_requested: Callable[[], bool],
    beat: Beat,
    world: World | None = None,
) -> OfflineRun:
    """Build the run of a claimed job.

    Raises:
        UserMistake, Refusal: the job cannot succeed as it is, on any worker.
        ModelUnavailable: the model could not be fetched. Another attempt may succeed.
    """
    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    # Nothing is sampled, so the trainer's own weights are the only ones in memory.
    alone = {"sampler": "transformers", "samplers": {}, "sampling_gpus": 0}
    settings = settings.of_class(settings.gpu_class).model_copy(update=alone)
    job = attempt.job
    kind = methods.variant(job.method, job.body)
    form = FORMS[kind]
    train = read_file(attempt, "training_file", job.training_file, form)
    valid = (
        []
        if job.validation_file is None
        else read_file(attempt, "validation_file", job.validation_file, form)
    )
    local = 1 if world is None else world.local_size
    if full.is_full(job) and (problem := full.several_machines(settings)):
        raise UserMistake("unsupported_parameter", problem, full.param_of(job))
    base = inspect_model(job.model, settings, local, samples=False, full=full.is_full(job))
    refuse_to_share(attempt, base)
    asked = offline_hyperparameters.asked(kind, job.body["hyperparameters"])
    rewards = reward_kind(train[0].item)
    resolved = offline_hyperparameters.resolve(
        kind, asked, rows=len(train), parameters=base.shape.parameters, reward_kind=rewards
    )
    parent, teacher = Parent.of(job), teacher_model(attempt, settings, beat)
    # An adapter that teaches takes turns with the student's own, so both have one shape.
    start = parent or (None if teacher is None else teacher.adapter)
    resolved = offline_hyperparameters.kept(continuing(resolved, start), job.resolved)
    refuse_absent_targets(
        base, resolved.lora_targets, f"method.{job.method}.hyperparameters.advanced.lora.targets"
    )
    tokenizer = read_tokenizer(base.entry, base.source, resolved.chat_template)
    resolved = with_fixed_clock(resolved, tokenizer, job.created_at)
    set_arguments(tokenizer, resolved.chat_template_kwargs)
    template = template_of(base.source, tokenizer)
    tokens = partial(tokenize, kind, template=template, context=base.entry.context, beat=beat)
    train_rows = tokens(train, file=job.training_file, field="training_file")
    valid_rows = tokens(valid, file=job.validation_file or "", field="validation_file")
    scale = Scale.of_steps() if rewards == "steps" else None
    if resolved.reward_kind == "scores":
        scale, [train_rows, valid_rows] = standardized([train_rows, valid_rows])
    rows = [*train_rows, *valid_rows]
    plan = plan_memory(job.model, base, resolved, rows, settings, local, teacher, attempt.shared)
    beat()
    checkpoints = JobCheckpoints(attempt, scratch)
    teaching: TeacherPolicy | ServedTeacher | None = None
    with whole_weights(parent, checkpoints, resolved) as weights:
        model = Model(
            job.model,
            base.entry,
            settings.model_cache,
            resolved,
            job.seed,
            plan.checkpointed,
            sampled=False,
            weights=weights,
            shared=shared_by(attempt, base),
        )
        order = LoadModel(
            model,
            base.device,
            settings.torch_threads,
            plan.token_budget,
            held_to="",
            degree=plan.degree,
            teacher=on_ranks(teacher, resolved, settings),
        )
        with loading(world, order):
            policy, verdict = load_checked(model, base.device, plan.degree, world, beat)
            if teacher is not None and teacher.server is None:
                teaching = teachers.load_teacher(
                    teacher, policy, resolved, checkpoints, settings.model_cache, beat
                )
    if teacher is not None and teacher.server is not None:
        teaching = served_teacher(teacher.name, teacher.server, settings, beat)

    recorder = JobRecorder(
        attempt,
        settings.default_limits,
        Quota(settings.rollout_bytes_per_job, settings.rollouts_per_step),
    )
    computing: dict[str, Any] = {"token_budget": plan.token_budget, "beat": beat, "world": world}
    trainer = OfflineTrainer(policy, resolved, **computing)
    if teaching is not None:
        trainer = SoftTargetTrainer(policy, teaching, resolved, **computing)
    also: list[Callable[[Path], None]] = []
    if resolved.reward_kind is not None:
        head = RewardHead(policy.hidden_size, policy.device)
        trainer = RewardTrainer(
            policy,
            head,
            resolved,
            scale=scale,
            measured=sample(train_rows, SCALED_ROWS, seed=job.seed, step=0),
            **computing,
        )
        if parent is not None and parent.is_reward_model:
            also.append(trainer.start_from_head)
    if parent is not None and start_from(parent, policy, checkpoints, *also):
        trainer.start_from_policy()
    first = job.resolved is None
    recorder.resolved(resolved)
    if first:
        recorder.inform(verdict.described(policy.trained), verdict.as_data(policy.trained))
        report_template(recorder, policy, {job.training_file: train, job.validation_file or "": valid})
        if base.precision:
            recorder.inform(base.precision, {})
        if divided := sum(len(row.packs) > 1 for row in train_rows):
            recorder.inform(
                f"{divided} conversations are learned answer by answer: the chat template renders their earlier "
                "answers differently once others follow.",
                {"divided_rows": divided},
            )
    return OfflineRun(
        settings=resolved,
        seed=job.seed,
        train_rows=RowStream(
            train_rows,
            batch_size=resolved.batch_size,
            steps_per_epoch=resolved.steps_per_epoch,
            seed=job.seed,
        ),
        valid_rows=valid_rows,
        trainer=trainer,
        recorder=recorder,
        checkpoints=checkpoints,
        stop_requested=stop_requested,
        exporters=exporters_of(job, resolved, settings, recorder.warn),
        start=start_name(parent),
        gpus=gpus_of(world, settings) if base.device == "cuda" else 1,
        teacher=None if teacher is None else teacher.name,
    )


def on_ranks(
    teacher: TeacherModel | None, resolved: offline_hyperparameters.ResolvedOffline, settings: Settings
) -> RankTeacher | None:
    """The teacher as the ranks above 0 load it. None: there is none, or only rank 0 calls its server."""
    if teacher is None or teacher.server is not None:
        return None
    second = teachers.second_model(teacher, resolved, settings.model_cache)
    return RankTeacher(second, has_adapter=teacher.adapter is not None)


def standardized(files: Sequence[Sequence[TokenizedRow]]) -> tuple[Scale, list[list[TokenizedRow]]]:
    """The rows of both files with scores whose mean over the first is 0 and whose standard deviation is 1.

    Raises:
        UserMistake: all scores of the first file are equal.
    """
    scores = [
        score for row in files[0] for pack in row.packs for one in pack.sequences for score in one.scores
    ]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    if std == 0.0:
        same = "All answers have the same score: there is nothing to learn."
        raise UserMistake("invalid_value", same, "training_file")

    def changed(pack: Pack) -> Pack:
        return replace(
            pack,
            sequences=tuple(
                replace(one, scores=tuple((score - mean) / std for score in one.scores))
                for one in pack.sequences
            ),
        )

    return Scale.undoing(mean, std), [
        [replace(row, packs=tuple(map(changed, row.packs))) for row in rows] for rows in files
    ]


def plan_memory(
    name: str,
    base: BaseModel,
    settings_of_job: offline_hyperparameters.ResolvedOffline,
    rows: list[TokenizedRow],
    settings: Settings,
    ranks: int,
    teacher: TeacherModel | None = None,
    shared: SharedBase | None = None,
) -> sizing.MemoryPlan:
    """Divide the free memory, without that of a teacher's weights, between weights and micro-batches.

    Args:
        ranks: of this machine. On a CPU they share its memory.

    Raises:
        UserMistake: the job does not fit.
        RunsAlone: it does not fit beside others.
    """
    work = sizing.workload(
        rank=settings_of_job.lora_rank,
        targets=settings_of_job.lora_targets,
        full=settings_of_job.train == "full",
        references=settings_of_job.reference_copies,
        prompt=max(row.longest for row in rows),
        completion=1,
        batch=1,
        group=1,
        valid_rows=0,
        eval_samples=1,
    )
    packed = base.device == "cpu" and base.entry.dtype == "float32"

    def plan(free: int) -> MemoryPlan:
        if teacher is not None:
            free = max(0, free - teacher.weight_bytes(packed=packed))
        # Without an engine and without a sampler that uses the trainer's weights, so that these can be sharded.
        machine = sizing.machine(settings, base.device, free, "vllm", packed=packed, engines=0)
        return sizing.plan_sharded(name, base.shape, work, machine, ranks)

    if shared is not None:
        return plan_beside(shared, lambda: plan(shared.memory(base.shape.weight_bytes)))
    processes = ranks if base.device == "cpu" else 1
    return plan_within(
        lambda bytes_of: plan(bytes_of(base.device) // processes),
        base.device,
        DeviceMemory(),
        patience_seconds=settings.patience_seconds,
    )
