"""/v1/regraft/jobs: what OpenAI's API does not show. Every graded sample, and the metrics of every step."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from api.deps import CurrentProject, Parts, ReadSession
from api.wire import Listing
from core import events, jobs
from core.blobs import BlobNotFound
from core.errors import NotFound
from core.models import RolloutPage

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


@router.get("/{job_id}/rollouts")
def list_rollouts(
    job_id: str,
    project: CurrentProject,
    session: ReadSession,
    service: Parts,
    step: Annotated[int, Query(ge=0, le=2**31 - 1)],
    split: Literal["train", "valid"] = "train",
) -> Listing[dict[str, Any]]:
    """The samples of one step, each with its grade."""
    job = jobs.get(session, project.id, job_id)
    page = session.get(RolloutPage, (job.id, step, split))
    try:
        if page is None:
            raise BlobNotFound
        lines = service.blobs.read(page.blob_key).splitlines()
    except BlobNotFound:
        raise NotFound(f"Job {job.id} has no {split} rollouts of step {step}.", param="step") from None
    return Listing(data=[json.loads(line) for line in lines])


@router.get("/{job_id}/metrics")
def list_metrics(job_id: str, project: CurrentProject, session: ReadSession) -> Listing[dict[str, Any]]:
    """The metrics of every step so far; step 0 is the validation of the base model."""
    job = jobs.get(session, project.id, job_id)
    return Listing(data=[{"step": row.step, **row.data} for row in events.steps(session, job.id)])
