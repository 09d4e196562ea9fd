"""/v1/regraft/jobs/{id}/request: the request that creates the same job again."""

from typing import Any

from fastapi import APIRouter

from api.http.deps import CurrentProject, ReadSession
from api.resources.job_body import STORED_GRADER
from core.jobs import integrations, lifecycle
from core.masking import hide_in_method
from core.results.lineage import Parent

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])


@router.get("/{job_id}/request")
def show_request(job_id: str, project: CurrentProject, session: ReadSession) -> dict[str, Any]:
    """Return the body that recreates this job, with its "auto" values; values of grader headers are masked.

    A stored grader is returned as the specification that the job has, which may be deleted under its name.
    """
    job = lifecycle.get(session, project.id, job_id)
    method = {
        name: value
        for name, value in integrations.of_method(job).items()
        if value is not None and name != STORED_GRADER
    }
    parent = Parent.of(job)
    request = {
        "model": job.model if parent is None else parent.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "metadata": job.metadata_,
        "integrations": integrations.requested_integrations(job) or None,
        "method": {"type": job.method, job.method: hide_in_method(method)},
        "budget": {"gpu_seconds": job.budget["gpu_seconds"]} if job.budget else None,
    }
    return {name: value for name, value in request.items() if value is not None}
