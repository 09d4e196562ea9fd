"""/v1/regraft/workers and /queues: what runs where and what waits, for keys with the scope `operator`."""

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.deps import OperatorProject, ReadSession, ServiceDep
from api.http.openapi import refusals
from api.http.shapes import Listing
from core.service import queues, workers
from core.service.queues import Queue
from core.service.workers import GpuUse, Seen, WorkerTask

router = APIRouter(prefix="/regraft", tags=["Operator"], responses=refusals(403))


class FindingOut(BaseModel):
    """A check of `regraft-server doctor` as it last ended on the worker's machine."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    text: str
    remedy: Annotated[str, Field(description="Empty unless it failed or warns.")]
    checked_at: int


class WorkerOut(BaseModel):
    """A worker of the service, as it last reported itself."""

    object: Literal["regraft.worker"] = "regraft.worker"
    name: Annotated[str, Field(description="Host and process id, as attempts have it.")]
    host: str
    gpu_class: str
    version: str
    machines: Annotated[int, Field(description="That share its runs, this one included.")]
    ranks: Annotated[int, Field(description="Processes of a run on each of these machines.")]
    status: Annotated[
        Literal["idle", "busy", "draining", "silent"],
        Field(description="`busy`: it runs a job. `silent`: three reports are missing."),
    ]
    started_at: int
    last_seen_at: int
    silent_seconds: Annotated[float, Field(description="Since the last report, by the database's clock.")]
    gpus: list[GpuUse]
    memory_used_bytes: Annotated[int | None, Field(description="Of the host, or of the container.")]
    memory_total_bytes: int | None
    findings: Annotated[
        list[FindingOut],
        Field(
            description="Of `regraft-server doctor`. Empty: it has not run on this machine with this data folder."
        ),
    ]
    tasks: Sequence[WorkerTask]

    @classmethod
    def of(cls, seen: Seen) -> "WorkerOut":
        worker = seen.worker
        names = ("name", "host", "gpu_class", "version", "machines", "ranks", "gpus")
        memory = ("memory_used_bytes", "memory_total_bytes")
        return cls(
            **{name: getattr(worker, name) for name in (*names, *memory)},
            status=seen.status,
            started_at=int(worker.started_at),
            last_seen_at=int(worker.seen_at),
            silent_seconds=round(seen.silent_seconds, 1),
            findings=[FindingOut(**one | {"checked_at": int(one["checked_at"])}) for one in worker.findings],
            tasks=seen.tasks,
        )


class WorkQueueOut(BaseModel):
    """A queue of the service."""

    object: Literal["regraft.queue"] = "regraft.queue"
    kind: Literal["jobs", "validations", "eval_runs"]
    gpu_class: Annotated[str | None, Field(description="null: workers of every class take from it.")]
    length: Annotated[int, Field(description="Jobs or runs that a free worker would start.")]
    oldest_seconds: Annotated[float, Field(description="Waiting time of the longest-waiting of these.")]
    held_back: Annotated[int, Field(description="Whose project runs as many as it may.")]
    backing_off: Annotated[int, Field(description="After an interruption.")]
    running: int
    workers: Annotated[int, Field(description="That take from it and are not silent.")]
    reason: Annotated[str | None, Field(description="What they wait for; null: nothing waits.")]

    @classmethod
    def of(cls, queue: Queue) -> "WorkQueueOut":
        return cls(**{name: getattr(queue, name) for name in cls.model_fields if name != "object"})


@router.get("/workers")
def list_workers(project: OperatorProject, session: ReadSession) -> Listing[WorkerOut]:
    """List the workers of the service by GPU class, with what they work on; those silent for a day are left out."""
    return Listing(data=[WorkerOut.of(seen) for seen in workers.listed(session)])


@router.get("/queues")
def list_queues(project: OperatorProject, session: ReadSession, service: ServiceDep) -> Listing[WorkQueueOut]:
    """List the queues: of the jobs of each GPU class, of validations, and of eval runs."""
    seen = workers.listed(session)
    found = queues.queues(
        session, service.settings.default_limits, seen, service.settings.hardware.pod_classes
    )
    return Listing(data=[WorkQueueOut.of(queue) for queue in found])
