"""The states of a project's unfinished jobs, pipelines and eval runs, and the end of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, defer
from sqlalchemy.orm.interfaces import ORMOption

from core.database.states import EVAL_RUN, JOB
from core.database.tables import EvalRun, Job, Pipeline, now
from core.evals import batches, imported, summary
from core.jobs import lifecycle as jobs

Kind = Literal["job", "pipeline", "eval_run"]
# A process may commit an end a little later than its time says.
SKEW_SECONDS = 5
# How far back a client that reconnects learns of ends: any id is accepted, and a project may have years of them.
MAX_PAST_SECONDS = 86400
_TABLES: tuple[tuple[Kind, type[Job] | type[Pipeline] | type[EvalRun], frozenset[str]], ...] = (
    ("job", Job, JOB.unfinished),
    ("pipeline", Pipeline, frozenset({"running", "paused"})),
    ("eval_run", EvalRun, EVAL_RUN.unfinished),
)


@dataclass(frozen=True)
class State:
    """The state of one of them. `data` is shown to users and is equal as long as nothing changes."""

    kind: Kind
    id: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The states at one time, and what the next snapshot needs to miss no end.

    `unfinished` has ids and `newest` the last row by kind.
    """

    at: int
    states: Sequence[State]
    unfinished: Mapping[Kind, frozenset[str]] = field(default_factory=dict)
    newest: Mapping[Kind, int] = field(default_factory=dict)


def first(session: Session, project_id: str, *, since: int | None) -> Snapshot:
    """All unfinished ones, and those that ended at the time `since` or later, at most MAX_PAST_SECONDS ago."""
    return _read(session, project_id, since, None)


def following(session: Session, project_id: str, before: Snapshot) -> Snapshot:
    """All unfinished ones, those of `before` that have ended, and those that were created and ended since."""
    return _read(session, project_id, None, before)


def _read(session: Session, project_id: str, since: int | None, before: Snapshot | None) -> Snapshot:
    at = now()
    states: list[State] = []
    unfinished: dict[Kind, frozenset[str]] = {}
    newest: dict[Kind, int] = {}
    for kind, table, underway in _TABLES:
        # One query for each, because none of them reads more than its rows from an index.
        wanted: list[ColumnElement[bool]] = [table.status.in_(underway)]
        if since is not None:
            wanted.append(table.finished_at >= max(since, at - MAX_PAST_SECONDS) - SKEW_SECONDS)
        if before is not None:
            wanted += [table.id.in_(before.unfinished[kind]), table.seq > before.newest[kind]]
        mine = [table.project_id == project_id]
        if table is EvalRun:
            mine.append(EvalRun.eval_id != batches.owner(project_id))
        newest[kind] = session.scalar(select(func.max(table.seq))) or 0
        rows: dict[int, Any] = {}
        for condition in wanted:
            found: Sequence[Any] = session.scalars(
                select(table).where(*mine, condition).options(*_without_request(table))
            ).all()
            rows |= {row.seq: row for row in found}
        states += [State(kind, imported.public_id(row.id), _data(row)) for _, row in sorted(rows.items())]
        unfinished[kind] = frozenset(row.id for row in rows.values() if row.status in underway)
    return Snapshot(at, states, unfinished, newest)


def _without_request(table: type[Job] | type[Pipeline] | type[EvalRun]) -> list[ORMOption]:
    """Does not load the request: it may have megabytes, and every poll of a stream reads the rows of all of them."""
    requests: dict[Any, Any] = {Job: Job.body, EvalRun: EvalRun.data_source}
    return [defer(requests[table], raiseload=True)] if table in requests else []


def _data(row: Job | Pipeline | EvalRun) -> dict[str, Any]:
    shown: dict[str, Any] = {"status": row.status, "finished_at": row.finished_at}
    match row:
        case Job():
            return shown | {
                "model": row.model,
                "method": row.method,
                "trained_tokens": row.trained_tokens,
                "gpu_seconds": row.gpu_seconds,
                "estimated_finish": row.estimated_finish,
                "fine_tuned_model": row.fine_tuned_model,
                "progress": jobs.progress_of(row),
            }
        case Pipeline():
            return shown | {"stages": {stage["name"]: stage["status"] for stage in row.stages}}
        case EvalRun():
            return shown | {
                "eval_id": imported.public_id(row.eval_id),
                "progress": {"finished": summary.finished(row.summary), "total": row.total},
            }
