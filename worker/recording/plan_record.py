"""The memory plan of a job in the database, and what out-of-memory errors lowered.

`jobs.memory` has the plan of the newest attempt and the lowered sizes, with which the next attempt begins on the same
kind of device. `memory_limits` has those of a model, with which its next jobs of the same kind begin for a week. What
was lowered while other processes used the device is in neither: they may be gone by then. While they may have used it,
it is only of the job.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from sqlalchemy.orm import Session

from core.database.tables import Job, MemoryLimit, now
from core.jobs import events
from core.jobs.memory_limits import is_valid
from core.outages import TemporarilyUnavailable
from core.units import GIB
from worker.attempt import Attempt
from worker.model.lowering import (
    NOTHING_LOWERED,
    PlanSizes,
    SizeBounds,
    SizeLimits,
    described,
    event_data,
    lowered,
    refusal,
)
from worker.model.memory import UNEXPLAINED_BYTES, DeviceMemory
from worker.out_of_memory import OutOfMainMemory, Shortage, is_out_of_memory, lacking
from worker.refusals import LoweredForNextAttempt, MemoryTaken, NotEnoughMemory, Refusal, UserMistake
from worker.sharing.base import RunsAlone

ASLEEP_BYTES = 2 * GIB  # of an engine: its context, and what it allocates outside of its cache and weights
KEY = ("model", "device", "workload")  # of MemoryLimit
# Answers to an out-of-memory error, from which they may be raised.
ANSWERED = (Refusal, UserMistake, TemporarilyUnavailable, RunsAlone, LoweredForNextAttempt, OutOfMainMemory)


@dataclass(frozen=True)
class PlanRecord:
    """The value of `jobs.memory`."""

    device: str  # cpu | cuda
    name: str  # of the device
    workload: str  # what of the job its memory depends on
    sizes: PlanSizes  # of the attempt, as they are now
    bounds: SizeBounds
    engine_bytes: int = 0  # of the job's own engine on the device of the trainer, awake
    devices: int = 1  # of the job; only that of rank 0 is looked at
    lowered: SizeLimits = NOTHING_LOWERED  # of this job and, when it began, of its model
    # Of the update, once the engines have started: what it needs by the estimate, and what is free. None: not measured.
    needed_bytes: int | None = None
    measured_bytes: int | None = None

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        return cls(
            **row
            | {
                "sizes": PlanSizes(**row["sizes"]),
                "bounds": SizeBounds(**row["bounds"]),
                "lowered": SizeLimits.of_row(row["lowered"]),
            }
        )

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def others(self, shortage: Shortage, memory: DeviceMemory) -> int:
        """Bytes of the device that neither this process nor the job's engine uses; 0 if these may be ours."""
        taken = memory.used_by_others(self.device) - self._of_engine(shortage)
        return taken if taken > UNEXPLAINED_BYTES else 0

    def _of_engine(self, shortage: Shortage) -> int:
        """Bytes of the device that the job's engine still has, at most."""
        if shortage.place == "sampler" and self.devices == 1:
            return 0  # it has ended
        return min(self.engine_bytes, ASLEEP_BYTES) if self.sizes.sleeps else self.engine_bytes

    def is_certain(self, shortage: Shortage) -> bool:
        """Whether `others` has all other processes: it may miss some beside an engine that has not started, and on
        other devices of the job."""
        has_started = not self.engine_bytes or self.measured_bytes is not None or shortage.place == "sampler"
        return self.devices == 1 and has_started

    def __post_init__(self) -> None:
        assert len(self.workload) <= 128, "the width of its column"


def limits_of(attempt: Attempt, name: str, workload: str) -> SizeLimits:
    """The limits within which the attempt begins on this device: of its job, else of its model."""
    row = attempt.job.memory
    if row is not None:
        record = PlanRecord.of_row(row)
        if record.lowered != NOTHING_LOWERED and (record.name, record.workload) == (name, workload):
            return record.lowered
    return attempt.read(lambda session: _of_model(session, attempt.job.model, name, workload))


def _of_model(session: Session, *key: str) -> SizeLimits:
    """What jobs found lately about a model, by the columns of its key."""
    found = session.get(MemoryLimit, key)
    return SizeLimits.of_row(found.sizes) if found is not None and is_valid(found) else NOTHING_LOWERED


def begin(attempt: Attempt, record: PlanRecord) -> None:
    """Store the plan of an attempt."""

    def write(session: Session, job: Job) -> None:
        job.memory = record.to_row()

    attempt.write(write)


def measured(attempt: Attempt, planned: PlanSizes, record: PlanRecord) -> None:
    """Store the sizes that the measured memory allows, with an event."""
    assert record.measured_bytes is not None and record.needed_bytes is not None
    free, needed = record.measured_bytes / GIB, record.needed_bytes / GIB
    message = (
        f"{free:.1f} GiB are free for the update, which needs {needed:.1f} GiB with micro-batches of "
        f"{record.sizes.token_budget} tokens; {planned.token_budget} were planned."
    )
    data = {
        "free_bytes": record.measured_bytes,
        "needed_bytes": record.needed_bytes,
        "token_budget": record.sizes.token_budget,
        "planned_token_budget": planned.token_budget,
    }

    def write(session: Session, job: Job) -> None:
        job.memory = record.to_row()
        events.append(session, job.id, message, data={"memory": data})

    attempt.write(write)


def lower(
    attempt: Attempt, record: PlanRecord, shortage: Shortage, memory: DeviceMemory = DeviceMemory()
) -> PlanRecord:
    """Lower the sizes by one, and record it with an event.

    Raises:
        NotEnoughMemory: nothing is left to lower, and no other process uses the device.
        MemoryTaken: nothing is left to lower beside the memory that other processes use.
        RunsAlone: the same beside other jobs of the worker.
    """
    others = record.others(shortage, memory)
    smaller = lowered(record.sizes, shortage, record.bounds)
    if smaller is None:
        if attempt.shared is not None:
            raise RunsAlone(f"beside others {shortage.reason}")
        raise MemoryTaken(record.device) if others else NotEnoughMemory(refusal(record.sizes, shortage))
    message, data = described(record.sizes, smaller, shortage), event_data(record.sizes, smaller, shortage)
    if others:
        data["out_of_memory"]["others_bytes"] = others
        message += (
            f" Other processes use {others / GIB:.1f} GiB of the device, so only this attempt is smaller."
        )
    is_lasting = not others and attempt.shared is None
    limits = record.lowered.with_lowered(record.sizes, smaller)
    is_of_model = is_lasting and record.is_certain(shortage)
    changed = replace(record, sizes=smaller, lowered=limits if is_lasting else record.lowered)

    def write(session: Session, job: Job) -> None:
        job.memory = changed.to_row()
        if is_of_model:
            key = (job.model, record.name, record.workload)
            known = _of_model(session, *key).with_lowered(record.sizes, smaller)
            session.merge(
                MemoryLimit(**dict(zip(KEY, key, strict=True)), sizes=known.to_row(), updated_at=now())
            )
        events.append(session, job.id, message, level="warn", data=data)

    attempt.write(write)
    return changed


def ending(attempt: Attempt, before: PlanRecord, after: PlanRecord, shortage: Shortage) -> Exception:
    """What an attempt raises that cannot continue with the sizes that were just lowered.

    If these are only of this attempt, the next one would begin as this one did, and end the same way: it waits until
    the others have left the device.
    """
    if after.lowered != before.lowered:
        return LoweredForNextAttempt(shortage.reason)
    if attempt.shared is not None:
        return RunsAlone(f"beside others {shortage.reason}")
    return MemoryTaken(after.device)


@contextmanager
def lowering_for_next_attempt(attempt: Attempt, memory: DeviceMemory = DeviceMemory()) -> Iterator[None]:
    """Answer an out-of-memory error of the device that ends this attempt: once, whichever thread has it first.

    Raises:
        LoweredForNextAttempt: the next attempt begins with lower sizes.
        MemoryTaken, RunsAlone: the next one begins with the same sizes, without others on the device.
        NotEnoughMemory: as `lower`.
        OutOfMainMemory: the error is of main memory, and the plan is of a GPU or the error is not of torch.
    """
    try:
        yield
    except Exception as cause:
        if isinstance(cause, ANSWERED) or not is_out_of_memory(cause):
            raise
        row = attempt.read(lambda session: session.get_one(Job, attempt.job.seq).memory)
        assert row is not None, "each attempt stores its plan before it loads the model"
        before = PlanRecord.of_row(row)
        if isinstance(cause, MemoryError) or lacking(cause, before.device) != before.device:
            raise OutOfMainMemory(cause, memory.available("cpu"), before.device) from cause
        attempt.first_answer.take()
        shortage = Shortage.of(cause, "trainer")
        raise ending(attempt, before, lower(attempt, before, shortage, memory), shortage) from cause
