"""The sizes of a run while it runs: an out-of-memory error lowers them, and the run continues if it can."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from core.settings import Settings
from worker.attempt import Attempt
from worker.model import memory, sizing
from worker.model.engine_sizes import EngineShare, EngineSizes
from worker.model.lowering import PlanSizes, SizeBounds, Update, allowed, fitted, limited
from worker.model.memory import UNEXPLAINED_BYTES, DeviceMemory
from worker.model.sizing import MemoryPlan, Workload
from worker.out_of_memory import Shortage
from worker.prepare.model import BaseModel
from worker.recording import plan_record
from worker.recording.plan_record import PlanRecord
from worker.sharing.memory_request import MemoryRequest


class Resizable(Protocol):
    """A sampler with its own engines."""

    def resize(self, share: EngineShare, *, sleeps: bool) -> None:
        """End the engines. Those that the next sampling starts have these sizes."""
        ...

    def sleep(self) -> None: ...


class EngineMemory(Protocol):
    """RunMemory, for the engines."""

    def use(self, sampler: Resizable) -> None:
        """The job's engines, whose sizes are lowered too."""
        ...

    def before_step(self) -> None:
        """Have the engines sleep, if the plan says so."""
        ...


class RunMemory:
    """Answers the out-of-memory errors of one attempt. In any thread."""

    def __init__(
        self,
        attempt: Attempt,
        record: PlanRecord,
        *,
        engines_rest: bool,
        update: Update,
        engine: EngineSizes | None = None,
        ask: Callable[[], None] = lambda: None,
        device: DeviceMemory = DeviceMemory(),
    ) -> None:
        """Before anything is loaded.

        Args:
            engines_rest: nothing is sampled while the job learns.
            update: the estimate of what the update needs.
            engine: the planned sizes of each of the job's engines. None: it has none.
            ask: asks idle models for their memory.
        """
        self._update, self._ask = update, ask
        self._engine = engine
        self._others = device.used_by_others(record.device)
        self._attempt, self._record, self._device = attempt, record, device
        self._engines_rest = engines_rest
        self._sampler: Resizable | None = None
        self._lock = threading.Lock()
        plan_record.begin(attempt, record)

    @property
    def sizes(self) -> PlanSizes:
        return self._record.sizes

    def use(self, sampler: Resizable) -> None:
        """The job's engines, whose sizes are lowered too."""
        self._sampler = sampler

    def before_step(self) -> None:
        """Have the engines sleep, if the plan says so."""
        if self._sampler is not None and self.sizes.sleeps:
            self._sampler.sleep()

    def fit(self, free: int) -> PlanSizes | None:
        """Plan the update with what is free beside the weights and the started engines, and record both numbers."""
        before = self._record
        if before.device != "cuda":
            return None  # main memory is shared with all of the machine, so that what is free says little
        # Another process that has started meanwhile is none of the engine's.
        grown = self._device.used_by_others(before.device) - self._others
        needed, sizes = fitted(before.sizes, self._update, free, self._device.capacity(before.device))
        self._record = replace(
            before,
            sizes=sizes,
            needed_bytes=needed,
            measured_bytes=free,
            engine_bytes=max(before.engine_bytes, min(grown, before.engine_bytes + UNEXPLAINED_BYTES)),
        )
        plan_record.measured(self._attempt, before.sizes, self._record)
        return sizes

    def lower(self, shortage: Shortage) -> PlanSizes:
        """The trainer ran out of memory: return the sizes with which it repeats its work.

        Raises:
            LoweredForNextAttempt, MemoryTaken, RunsAlone: the engines are sampling, and end with it (`ending`).
            NotEnoughMemory, MemoryTaken, RunsAlone: as `plan_record.lower`.
        """
        was, now = self._lowered(shortage)
        before, after = was.sizes, now.sizes
        if after.engine != before.engine:
            if self._sampler is None or not self._engines_rest:
                raise plan_record.ending(self._attempt, was, now, shortage)
            self._sampler.resize(self._share(after), sleeps=after.sleeps)
        return after

    def lower_engine(self, shortage: Shortage) -> EngineShare:
        """An engine ran out of memory: return the memory with which it is started again.

        Raises: as `lower`.
        """
        was, now = self._lowered(shortage)
        share = self._share(now.sizes)
        if share == self._share(was.sizes):
            # It is something of the trainer, which computes on other threads.
            raise plan_record.ending(self._attempt, was, now, shortage)
        memory.release_unused(now.device)  # what the trainer keeps for its next step
        return share

    def _share(self, sizes: PlanSizes) -> EngineShare:
        assert self._engine is not None, "an engine ran out of memory"
        engine = self._engine.smallest if sizes.has_smallest_engine else self._engine
        return EngineShare(sizes.cache_bytes, engine.within(sizes.cache_bytes))

    def _lowered(self, shortage: Shortage) -> tuple[PlanRecord, PlanRecord]:
        with self._lock:
            before = self._record
            if before.others(shortage, self._device):
                self._ask()
            self._record = plan_record.lower(self._attempt, before, shortage, self._device)
            return before, self._record


def room_to_sleep(base: BaseModel, work: Workload, main_memory: int) -> bool:
    """Whether the weights of engines that sleep fit into these bytes."""
    engines = base.engines
    return sizing.pinned_bytes(base.shape, work, engines.engines, engines.tensor_parallel) <= main_memory


def with_limits(
    attempt: Attempt,
    base: BaseModel,
    work: Workload,
    planned: MemoryPlan,
    settings: Settings,
    *,
    rests: bool,
    resumes: bool,
    ranks: int,
) -> tuple[MemoryPlan, RunMemory]:
    """The plan of an attempt within what out-of-memory errors lowered before, and its answer to further ones.

    Args:
        rests: whether nothing is sampled while the job learns.
        ranks: processes that learn, on all machines.
        resumes: whether the optimizer's state is loaded from a checkpoint.
    """
    name = memory.device_name(base.device)
    trained = "all weights" if work.full else f"rank {work.rank}"
    engines = base.engines
    place = f"{engines.kind} x {engines.tensor_parallel}"
    workload = f"{base.sampler}, {trained}, {sizing.bucket(work.longest)} tokens, {place}"
    has_engine = base.sampler == "vllm" and engines.processes > 0
    is_beside = has_engine and engines.kind != "split"
    main_memory = memory.available("cpu")
    context = work.longest if planned.engine is None else planned.engine.context
    least_cache, context_cache = (
        sizing.smallest_cache(base.shape, tokens, base.sampler, engines.tensor_parallel)
        for tokens in (work.longest, context)
    )
    bounds = SizeBounds(
        least_cache=least_cache,
        context_cache=context_cache,
        is_beside=is_beside,
        may_sleep=is_beside and rests and base.device == "cuda" and room_to_sleep(base, work, main_memory),
    )
    known = plan_record.limits_of(attempt, name, workload)
    limits = allowed(known, bounds)
    plan = limited(planned, limits)
    record = PlanRecord(
        base.device,
        name,
        workload,
        PlanSizes.of(plan),
        bounds,
        engine_bytes=plan.estimate.engine + plan.cache_bytes + plan.estimate.margin if is_beside else 0,
        lowered=known,
        devices=1
        if base.device == "cpu"
        else ranks + (engines.processes if has_engine and not is_beside else 0),
    )
    budget = settings.train_token_budget
    most = max(plan.token_budget, sizing.GPU_TOKEN_BUDGETS[1] if budget == "auto" else 0)
    most = most if limits.token_budget is None else min(most, limits.token_budget)
    update = Update.of(plan, most, has_moments=resumes)
    return plan, RunMemory(
        attempt,
        record,
        engines_rest=rests,
        update=update,
        engine=planned.engine,
        ask=MemoryRequest.of(settings).make,
    )
