"""The memory plan of a job on this machine."""

import logging
import time
from collections.abc import Callable

from core.jobs.hyperparameters import Resolved
from core.retry import RetryPolicy
from core.settings import Settings
from worker.model import sizing
from worker.model.memory import DeviceMemory
from worker.model.sizing import MemoryPlan, Workload
from worker.prepare.model import BaseModel
from worker.prepare.scorers import scores_here
from worker.prepare.teachers import TeacherModel
from worker.progress import PROGRESS
from worker.refusals import MemoryTaken, UserMistake
from worker.sharing.base import RunsAlone, SharedBase
from worker.sharing.memory_request import MemoryRequest

log = logging.getLogger(__name__)

# An engine of a killed attempt needs some seconds to release its memory. Longer, and the worker may run another job.
ENDING_SECONDS = 30.0


def takes_turns(settings: Resolved, teacher: TeacherModel | None, *, has_judges: bool) -> bool:
    """Whether nothing is sampled while the trainer's GPU computes: neither an update nor the scores of answers."""
    return not (settings.overlap or settings.off_policy_steps or scores_here(teacher, has_judges=has_judges))


def plan_memory(
    name: str,
    base: BaseModel,
    workload: Workload,
    settings: Settings,
    ranks: int,
    teacher: TeacherModel | None = None,
    *,
    samples: bool = True,
    may_sleep: bool = False,
    shared: SharedBase | None = None,
    memory: DeviceMemory = DeviceMemory(),
) -> MemoryPlan:
    """Divide the free memory, without that of the teacher's weights, between weights, KV cache and micro-batches.

    Args:
        samples: whether the job samples at all.
        may_sleep: whether its engines may release their memory while it learns (`takes_turns`).
        shared: other jobs have an equal part of what this base leaves.

    Raises:
        UserMistake: the job does not fit, not even if no other process uses the device.
        MemoryTaken: it does not fit beside the memory of other processes.
        RunsAlone: it does not fit beside other jobs on its base.
    """
    # Processes on a CPU share its memory; on GPUs each has its own device.
    processes = 1
    split = base.engines.kind == "split"
    if base.device == "cpu":
        sampling = base.engines.processes
        processes = ranks + sampling if split else max(ranks, sampling)
    weight_bytes = base.shape.weight_bytes
    reordered = base.device == "cpu" and base.entry.dtype == "float32"

    def plan(free: int, main_memory: int) -> MemoryPlan:
        machine = sizing.machine(
            settings,
            base.device,
            free,
            # Without a sampler that uses the trainer's weights these can be sharded.
            base.sampler if samples else "vllm",
            reordered=reordered,
            engines=base.engines.engines,
            tensor_parallel=base.engines.tensor_parallel,
            split=split,
            may_sleep=may_sleep,
            main_memory=main_memory,
            teacher_bytes=0 if teacher is None else teacher.weight_bytes(reordered=reordered),
        )
        return sizing.plan_sharded(name, base.shape, workload, machine, ranks)

    if shared is not None:
        return plan_beside(shared, lambda: plan(shared.memory(weight_bytes), memory.available("cpu")))
    return plan_within(
        lambda bytes_of: plan(bytes_of(base.device) // processes, bytes_of("cpu")),
        base.device,
        memory,
        patience_seconds=settings.patience_seconds,
        ask=MemoryRequest.of(settings).make,
    )


def plan_beside(shared: SharedBase, plan: Callable[[], MemoryPlan]) -> MemoryPlan:
    """The plan of a job that shares its base model. Raises RunsAlone if it does not fit beside the others."""
    try:
        return plan()
    except sizing.DoesNotFit as cause:
        raise RunsAlone(f"beside {shared.jobs - 1} others {cause}") from cause


def plan_within(
    plan: Callable[[Callable[[str], int]], MemoryPlan],
    device: str,
    memory: DeviceMemory,
    *,
    patience_seconds: float,
    ask: Callable[[], None] = lambda: None,
    wait: Callable[[float], None] = time.sleep,
) -> MemoryPlan:
    """The plan within the free memory, once a process that is ending or an idle model has released its own.

    Args:
        ask: asks idle models for their memory.
        plan: takes the function that returns the bytes of a device, by its name.

    Raises:
        UserMistake: the job does not fit, not even if no other process uses the device.
        MemoryTaken: it does not fit beside the memory of other processes.
    """

    def once() -> MemoryPlan:
        try:
            return plan(memory.available)
        except sizing.DoesNotFit as taken:
            try:
                plan(lambda name: max(memory.available(name), memory.capacity(name)))
            except sizing.DoesNotFit as never:
                raise UserMistake("not_enough_memory", str(never), "model") from never
            log.warning("other processes use memory that the job needs: %s", taken)
            ask()
            raise MemoryTaken(device) from taken

    patience = min(patience_seconds, ENDING_SECONDS)
    return RetryPolicy(patience, log.info, wait=wait, during=PROGRESS.waiting)(once)
