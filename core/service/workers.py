"""The worker processes, as they report themselves: what runs where, and which of them went silent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.database.engine import db_now
from core.database.states import JOB
from core.database.tables import EvalRun, Job, Worker
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle
from core.telemetry.silence import SILENT_SECONDS

# The row of a worker that was killed is kept, so that an operator sees which one went silent.
FORGOTTEN_SECONDS = 86400.0


@dataclass(frozen=True)
class GpuUse:
    """A GPU by nvidia-smi. null: the driver does not say, as for a MIG slice."""

    index: str
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: Annotated[float | None, Field(description="Of the last sample period, from 0 to 1.")]


@dataclass(frozen=True)
class Report:
    """A report of a worker about itself."""

    name: str
    host: str
    gpu_class: str
    version: str
    machines: int
    ranks: int
    gpus: Sequence[GpuUse]
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    draining: bool
    findings: Sequence[
        Mapping[str, Any]
    ]  # of `regraft-server doctor` on its machine (core/telemetry/checkup.py)


@dataclass(frozen=True)
class WorkerTask:
    """A job or an eval run that a worker works on: it holds the lease."""

    kind: Literal["run", "validation", "eval_run"]
    id: str
    project_id: str
    model: str | None
    progress: Annotated[
        Mapping[str, Any] | None, Field(description="Of a run, as the job has it; null: not known.")
    ]


@dataclass(frozen=True)
class Seen:
    """A worker as it last reported itself, and what it works on."""

    worker: Worker
    status: str  # idle, busy, draining or silent
    silent_seconds: float
    tasks: Sequence[WorkerTask]


def report(session: Session, worker: Report) -> None:
    """Store the report of a worker, at the time of the database."""
    values = asdict(worker)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    new = insert(Worker).values(values | {"started_at": db_now(), "seen_at": db_now()})
    session.execute(new.on_conflict_do_update(index_elements=["name"], set_=values | {"seen_at": db_now()}))


def begin(session: Session, worker: Report) -> None:
    """Store the first report of a process. An earlier one may have had the same host and process id."""
    end(session, worker.name)
    report(session, worker)


def end(session: Session, name: str) -> None:
    """Remove a worker that stops."""
    session.execute(delete(Worker).where(Worker.name == name))


def forget(session: Session) -> None:
    """Remove workers that have been silent for a day."""
    session.execute(delete(Worker).where(Worker.seen_at < db_now() - FORGOTTEN_SECONDS))


def listed(session: Session) -> list[Seen]:
    """All workers by GPU class and name."""
    now = session.scalars(select(db_now())).one()
    workers = session.scalars(select(Worker).order_by(Worker.gpu_class, Worker.name)).all()
    tasks = _tasks(session)
    found = []
    for worker in workers:
        silent = max(0.0, now - worker.seen_at)
        mine = tasks.get(worker.name, [])
        status = "silent" if silent > SILENT_SECONDS else "draining" if worker.draining else ""
        runs = any(task.kind == "run" for task in mine)
        found.append(Seen(worker, status or ("busy" if runs else "idle"), silent, mine))
    return found


def _tasks(session: Session) -> dict[str, list[WorkerTask]]:
    found: dict[str, list[WorkerTask]] = {}
    jobs = select(Job).where(Job.lease_owner.is_not(None), Job.status.in_(JOB.leased))
    for job in session.scalars(jobs.order_by(Job.seq)):
        kind: Literal["validation", "run"] = "validation" if job.status == "validating_files" else "run"
        task = WorkerTask(kind, job.id, job.project_id, job.model, lifecycle.progress_of(job))
        found.setdefault(str(job.lease_owner), []).append(task)
    runs = select(EvalRun).where(EvalRun.lease_owner.is_not(None), EvalRun.status == eval_runs.RUNNING)
    for run in session.scalars(runs.order_by(EvalRun.seq)):
        task = WorkerTask("eval_run", run.id, run.project_id, run.model, None)
        found.setdefault(str(run.lease_owner), []).append(task)
    return found
