"""The memory plan of a job on this machine."""

from core.jobs.hyperparameters import Resolved
from core.settings import Settings
from worker.model import memory, sizing
from worker.model.sizing import MemoryPlan
from worker.model.teachers import TeacherModel
from worker.prepare.model import BaseModel
from worker.prepare.scorers import scores_here
from worker.prepare.task import Task
from worker.refusals import UserMistake
from worker.sharing.base import RunsAlone, SharedBase


def takes_turns(settings: Resolved, teacher: TeacherModel | None, *, has_judges: bool) -> bool:
    """Whether nothing is sampled while the trainer's GPU computes: neither an update nor the scores of answers."""
    return not (settings.overlap or settings.off_policy_steps or scores_here(teacher, has_judges=has_judges))


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
