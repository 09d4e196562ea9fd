"""A job before its weights are loaded: its rows, base model, hyperparameters, memory, teacher and reward models.

Jobs that cannot succeed are refused here, because loading weights may take minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.database.tables import Job
from core.jobs import full, methods
from core.registry import Registry
from core.results.lineage import Parent
from core.settings import Settings
from graders.spec import GraderSpec
from worker.attempt import Attempt
from worker.heartbeat import Beat
from worker.model.sizing import MemoryPlan, Workload
from worker.prepare.memory_plan import plan_memory, takes_turns
from worker.prepare.model import BaseModel, inspect_model, refuse_full, refuse_to_share
from worker.prepare.row_task import RowTask, prepare_rows
from worker.prepare.run_memory import RunMemory, with_limits
from worker.prepare.scorers import reward_models, teacher_model
from worker.prepare.task import PromptTask, is_off_policy, prepare_task
from worker.prepare.teachers import TeacherModel
from worker.recording.checkpoints import JobCheckpoints
from worker.rollout.rows import Rows, read_rows
from worker.sampling.fleet import FleetConfig
from worker.training.world import World


@dataclass(frozen=True)
class TrainingPlan:
    """The facts about a job that are known before its weights are loaded."""

    attempt: Attempt
    settings: Settings  # of this worker, for its GPU class and for the job's method
    checkpoints: JobCheckpoints
    parent: Parent | None  # the tuned model that the job trains further
    beat: Beat
    world: World | None  # None: one process learns
    rows: Rows
    base: BaseModel
    task: PromptTask | RowTask
    memory: MemoryPlan
    run_memory: RunMemory  # answers out-of-memory errors
    teacher: TeacherModel | None
    judges: Sequence[Parent]  # reward models that the grader reads
    fleet: FleetConfig | None  # that samples for the job; None: its own engines or the trainer do

    @property
    def job(self) -> Job:
        return self.attempt.job

    @property
    def is_first(self) -> bool:
        """Whether no earlier attempt has come as far as resolving the job's hyperparameters."""
        return self.job.resolved is None

    @property
    def gpus(self) -> int:
        """The GPUs that the job occupies on all machines; 1 for a job on a CPU."""
        if self.base.device != "cuda":
            return 1
        return occupied_gpus(self.world, self.settings.sampling_gpus)


def occupied_gpus(world: World | None, sampling_gpus: int) -> int:
    """The GPUs of all machines of a run. Each machine has those that only sample, although only the first uses them.

    Args:
        sampling_gpus: of each machine, beside its ranks.
    """
    if world is None:
        return 1 + sampling_gpus
    return world.size + sampling_gpus * (world.size // world.local_size)


def plan_training(
    attempt: Attempt,
    spec: GraderSpec | None,
    settings: Settings,
    scratch: Path,
    beat: Beat,
    world: World | None = None,
) -> TrainingPlan:
    """Inspect a job.

    Raises:
        UserMistake, Refusal: it cannot succeed as it is, on any worker.
        RunsAlone, MemoryTaken: it cannot run beside the other users of this device.
    """
    job = attempt.job
    samples = methods.variant(job.method, job.body) not in methods.OFFLINE
    settings = settings_of_run(settings, samples=samples)
    ranks = 1 if world is None else world.local_size
    rows = read_rows(attempt)
    base = inspect_base(job, settings, ranks, samples=samples)
    refuse_to_share(attempt, base)
    teacher = teacher_model(attempt, settings, beat)
    judges = reward_models(attempt, spec, settings)
    task = (
        prepare_task(attempt, rows, base, teacher)
        if samples
        else prepare_rows(attempt, rows, base, teacher, beat)
    )
    may_sleep = isinstance(task, PromptTask) and takes_turns(task.settings, teacher, has_judges=bool(judges))
    checkpoints = JobCheckpoints(attempt, scratch)
    memory, run_memory = _plan_memory(
        attempt,
        base,
        task.workload,
        settings,
        world,
        teacher,
        samples=samples,
        rests=may_sleep,
        resumes=not checkpoints.is_empty,
    )
    return TrainingPlan(
        attempt=attempt,
        settings=settings,
        checkpoints=checkpoints,
        parent=Parent.of(job),
        beat=beat,
        world=world,
        rows=rows,
        base=base,
        task=task,
        memory=memory,
        run_memory=run_memory,
        teacher=teacher,
        judges=judges,
        fleet=fleet_of(job, settings, base, task),
    )


def _plan_memory(
    attempt: Attempt,
    base: BaseModel,
    workload: Workload,
    settings: Settings,
    world: World | None,
    teacher: TeacherModel | None,
    *,
    samples: bool,
    rests: bool,
    resumes: bool,
) -> tuple[MemoryPlan, RunMemory]:
    """The plan of the memory of one rank, and the limits within which the run may lower it.

    Args:
        rests: the engines sleep while the trainer works, if that pays.
        resumes: the job has a checkpoint.
    """
    ranks, all_ranks = (1, 1) if world is None else (world.local_size, world.size)
    planned = plan_memory(
        attempt.job.model,
        base,
        workload,
        settings,
        ranks,
        teacher,
        samples=samples,
        may_sleep=rests,
        shared=None if attempt.shared is None else attempt.shared.base,
    )
    return with_limits(
        attempt, base, workload, planned, settings, rests=rests, resumes=resumes, ranks=all_ranks
    )


def settings_of_run(settings: Settings, *, samples: bool) -> Settings:
    """The settings of the worker's GPU class, as the job reads them."""
    # The ranks of this machine: the job may have chosen other GPUs than its class has.
    settings = settings.of_class(settings.gpu_class).model_copy(update={"ranks": settings.ranks})
    if samples:
        return settings
    # The trainer's own weights are the only ones in memory.
    return settings.model_copy(update={"sampler": "transformers", "samplers": {}, "sampling_gpus": 0})


def inspect_base(job: Job, settings: Settings, ranks: int, *, samples: bool) -> BaseModel:
    """The job's base model. Raises as `inspect_model`, and UserMistake if not all of its weights can be trained."""
    is_full = full.is_full(job)
    if is_full:
        refuse_full(job, settings)
    off_policy = samples and is_off_policy(job)
    return inspect_model(job.model, settings, ranks, off_policy=off_policy, samples=samples, full=is_full)


def fleet_of(job: Job, settings: Settings, base: BaseModel, task: PromptTask | RowTask) -> FleetConfig | None:
    if not base.fleet:
        return None
    return FleetConfig(
        model=Registry.load(settings.models_file).resolve(job.model),
        dtype=base.entry.dtype,
        context=task.workload.longest,
        rank=task.settings.lora_rank,
        addresses=base.fleet,
        key=settings.samplers_key,
        patience=settings.patience_seconds,
    )
