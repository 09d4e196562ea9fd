"""/v1/regraft/jobs/validate: validate a job without creating it."""

from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationError

from api.http.deps import ReadProject, Service, ServiceDep
from api.http.openapi import FOR_ANY_KEY, refusals
from api.http.shapes import Body
from api.http.stored_graders import ResolvesGraders
from api.http.validation_errors import explain
from api.resources.job_body import GRADER_PATHS, JobCreate
from api.resources.job_checks import accept, audit_of, usable_body
from core.asgi import until_gone
from core.database.tables import Project
from core.masking import hide_in_method
from core.storage import files

router = APIRouter(prefix="/regraft/jobs/validate", tags=["regraft"])

FileField = Literal["training_file", "validation_file"]


class JobValidate(Body):
    """`job` is the body of POST /fine_tuning/jobs. `local_files` names those of its files that are not uploaded yet."""

    job: dict[str, Any]
    local_files: Annotated[list[FileField], Field(max_length=2)] = []


class JobValidation(BaseModel):
    """The job as it would be created."""

    object: Literal["regraft.job_validation"] = "regraft.job_validation"
    model: str
    method: dict[str, Any]
    warnings: list[str]


@router.post(
    "",
    response_model=JobValidation,
    responses=refusals(404),
    openapi_extra=FOR_ANY_KEY,
    dependencies=[Depends(ResolvesGraders(*(("job", *path) for path in GRADER_PATHS), keep=True))],
)
async def validate_job(
    request: Request, body: JobValidate, project: ReadProject, service: ServiceDep
) -> JobValidation | Response:
    """Validate a job as on creation. Nothing is created, and no file is read."""
    # A local file has no id yet; any two distinct ids stand for the two files.
    sent = body.job | {field: f"file-local-{field}" for field in body.local_files}
    try:
        job = JobCreate.model_validate(sent)
    except ValidationError as invalid:
        complaints = [error | {"loc": ("body", *error["loc"])} for error in invalid.errors()]
        raise explain(complaints, sent, JobCreate.model_fields) from None
    usable = await until_gone(request.receive, usable_body(job, service, project))
    if usable is None:
        return Response(status_code=499)
    return await to_thread.run_sync(_validated, usable, body.local_files, project, service)


def _validated(
    job: JobCreate, local_files: Collection[str], project: Project, service: Service
) -> JobValidation:
    accepted = accept(job, service, project)
    with service.database.read() as session:
        find = partial(files.get_dataset, session, project.id)
        if "training_file" not in local_files:
            find(job.training_file, param="training_file")
        if job.validation_file is not None and "validation_file" not in local_files:
            find(job.validation_file, param="validation_file")
    if "training_file" not in local_files:  # only a stored file has audits
        audit_of(job, project, service)
    shown = hide_in_method(job.method_body())
    return JobValidation(
        model=accepted.base_model,
        method={"type": job.method.type, job.method.type: shown},
        warnings=job.warnings,
    )
