"""/v1/regraft/jobs/{id}/attempts and /logs: the attempts of a job and their logs."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.http.deps import CurrentProject, ReadSession, ServiceDep
from api.http.ranges import NO_RANGES
from api.http.shapes import Listing
from core.database.tables import Attempt
from core.jobs import lifecycle, run_logs

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


class AttemptOut(BaseModel):
    number: int
    kind: str
    started_at: float
    ended_at: float | None
    outcome: str | None  # null: still running
    reason: str | None
    resumed_from_step: (
        int | None
    )  # null: the attempt ended before it looked for a checkpoint; 0: it started from the beginning

    @classmethod
    def of(cls, number: int, attempt: Attempt) -> "AttemptOut":
        return cls(
            number=number,
            kind=attempt.kind,
            started_at=attempt.started_at,
            ended_at=attempt.ended_at,
            outcome=attempt.outcome,
            reason=attempt.reason,
            resumed_from_step=attempt.resumed_from,
        )


@router.get("/{job_id}/attempts")
def list_attempts(job_id: str, project: CurrentProject, session: ReadSession) -> Listing[AttemptOut]:
    """List the attempts of a job, oldest first: when, from which checkpoint, and with which outcome."""
    job = lifecycle.get(session, project.id, job_id)
    turns = lifecycle.attempts(session, job.id)
    return Listing(data=[AttemptOut.of(number, attempt) for number, attempt in enumerate(turns, start=1)])


LOGS: dict[int | str, dict[str, Any]] = {200: {"description": "Plain text.", "content": {"text/plain": {}}}}


@router.get("/{job_id}/logs", response_class=StreamingResponse, responses=LOGS)
def read_logs(
    job_id: str, project: CurrentProject, session: ReadSession, service: ServiceDep
) -> StreamingResponse:
    """Return the logs of the job's runs as text, oldest first: the last 256 KiB of each attempt."""
    job = lifecycle.get(session, project.id, job_id)
    content = run_logs.read(service.blobs, project.id, lifecycle.attempts(session, job.id))
    return StreamingResponse(content, media_type="text/plain; charset=utf-8", headers=NO_RANGES)
