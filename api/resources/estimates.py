"""/v1/regraft/estimate: estimate a job before it is created."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from api.http.deps import ReadProject, Service, ServiceDep
from api.http.openapi import FOR_ANY_KEY, refusals
from api.resources.job_body import TAKES_JOB, JobCreate
from api.resources.job_checks import preview_of, start, usable_body, usable_model
from api.resources.job_shapes import PreviewedOut
from api.resources.validation_split import refuse_few_left
from core.asgi import until_gone
from core.database.tables import File, Preview, Project
from core.errors import InvalidRequest
from core.jobs import estimates, job_files, usage
from core.jobs.alarm_sizes import too_small
from core.jobs.budgets import Price
from core.jobs.estimates import PastJobs
from core.jobs.hyperparameters import Resolved
from core.jobs.job_files import BadFile
from core.jobs.methods import OFFLINE
from core.jobs.offline_hyperparameters import requested_hyperparameters as offline_asked
from core.jobs.offline_hyperparameters import resolve
from core.jobs.resources import Resources, resources_of, with_as_many
from core.model_templates import is_reasoning
from core.registry import BaseModelEntry
from core.results import previews
from core.storage import datasets, files
from core.storage.datasets import InvalidDataset
from core.storage.offline_rows import MAX_ROWS
from core.storage.splitting import validation_size
from core.storage.store import BlobNotFound, BlobStore
from graders.build import alarms_of, row_problems
from graders.spec import GraderSpec

router = APIRouter(prefix="/regraft/estimate", tags=["regraft"])

T = TypeVar("T")


class JobSize(BaseModel):
    """The size of the job with every "auto" resolved, and ranges of its duration and cost."""

    model: str
    gpu_class: str
    training_rows: int
    validation_rows: int
    n_epochs: int
    batch_size: int
    total_steps: int
    estimate: Annotated[dict[str, Any] | None, Field(description="In the shape of a job's estimate.")]
    reason: Annotated[str | None, Field(description="Reason for a missing estimate.")]
    warnings: Annotated[
        list[str],
        Field(
            description="Accepted parameters without effect, and alarms that cannot fire in a job of this size, as in "
            "the job's events."
        ),
    ]


class Size(JobSize):
    """The size of a reinforcement job."""

    group_size: int
    max_completion_tokens: int


class EstimateOut(JobSize):
    """The estimate of a job. Jobs that sample no answers have no `group_size` and no `max_completion_tokens`."""

    object: Literal["regraft.estimate"] = "regraft.estimate"
    preview: Annotated[PreviewedOut | None, Field(description="The newest preview of this request.")] = None
    group_size: int | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True)
class EstimateInputs:
    """A valid job, its size, and the history of its model."""

    name: str
    model: BaseModelEntry
    gpu_class: str
    resources: Resources | None
    training: File
    train_rows: int
    valid_rows: int
    settings: Resolved
    past: PastJobs | None
    price: Price
    warnings: list[str]
    preview: Preview | None

    @property
    def gpus(self) -> int:
        """All GPUs of the job; 1 if its class has no choice."""
        return 1 if self.resources is None else self.resources.total

    @property
    def no_history(self) -> str:
        return estimates.NO_HISTORY + ("" if self.resources is None else f" with {self.resources}")

    def size(self) -> dict[str, Any]:
        """The fields of Size except the estimate."""
        return {
            "model": self.name,
            "gpu_class": self.gpu_class,
            "training_rows": self.train_rows,
            "validation_rows": self.valid_rows,
            "n_epochs": self.settings.n_epochs,
            "batch_size": self.settings.batch_size,
            "group_size": self.settings.group_size,
            "max_completion_tokens": self.settings.max_completion_tokens,
            "total_steps": self.settings.total_steps,
            "warnings": self.warnings,
        }

    def estimate(self, of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Apply `of` to the history and the size, and add the cost."""
        rows = {"train_rows": self.train_rows, "valid_rows": self.valid_rows}
        return usage.with_cost(of(self.past, self.settings, **rows), 0.0, self.price)


@router.post(
    "",
    response_model=EstimateOut,
    responses=refusals(404),
    openapi_extra=FOR_ANY_KEY,
    dependencies=TAKES_JOB,
)
async def estimate_job(
    request: Request, body: JobCreate, project: ReadProject, service: ServiceDep
) -> EstimateOut | Response:
    """Estimate the job that this body would create. Nothing is created."""

    async def estimated() -> EstimateOut:
        usable = await usable_body(body, service, project)
        return await in_reader(service, project, partial(_estimate, usable, project, service))

    made = await until_gone(request.receive, estimated())
    return Response(status_code=499) if made is None else made


async def in_reader(service: Service, project: Project, read: Callable[[], T]) -> T:
    """Run `read` in the thread pool for whole files, within the project's concurrency limit."""
    return await service.admission.file_reads.in_thread(project.id, read, service.file_readers)


def _estimate(body: JobCreate, project: Project, service: Service) -> EstimateOut:
    if body.method.type in OFFLINE:
        return _offline(body, project, service)
    if body.method.distillation is not None:
        raise InvalidRequest(
            "Jobs with method 'distillation' have no estimate.",
            param="method.type",
            code="unsupported_method",
        )
    job = estimate_inputs(body, project, service)
    if job.preview is not None and job.preview.measured is not None:
        return EstimateOut(
            **job.size(),
            preview=PreviewedOut(**previews.summary(job.preview)),
            estimate=job.estimate(partial(estimates.after_preview, **job.preview.measured, gpus=job.gpus)),
            reason=None,
        )
    return EstimateOut(
        **job.size(),
        estimate=None if job.past is None else job.estimate(estimates.before_start),
        reason=job.no_history if job.past is None else None,
    )


def _offline(body: JobCreate, project: Project, service: Service) -> EstimateOut:
    """Count and check the rows of a job that learns from the answers in its file."""
    method = body.method.type
    name, _ = start(body, service, project)
    model = usable_model(body, name, service)
    if body.budget:
        body.budget.to_row(Price.of(service.settings))
    with service.database.read() as session:
        find = partial(files.get_dataset, session, project.id)
        training = find(body.training_file, param="training_file")
        validation = find(body.validation_file, param="validation_file") if body.validation_file else None
    given = body.method_body()["hyperparameters"]
    try:
        rows = job_files.count_rows(service.blobs, training, method, "training_file")
        job_files.refuse_few_rows(rows.number)
        train_rows, valid_rows, kinds = rows.number, 0, rows.kinds
        if validation is not None:
            others = job_files.count_rows(service.blobs, validation, method, "validation_file")
            valid_rows, kinds = others.number, (*kinds, *others.kinds)
        job_files.refuse_other_kinds(kinds, given)
    except BadFile as bad:
        raise InvalidRequest(bad.message, param=bad.param, code=bad.code) from None
    if body.validation_split is not None:
        valid_rows = validation_size(train_rows, body.validation_split, MAX_ROWS)
        refuse_few_left(train_rows - valid_rows, train_rows, method)
        train_rows -= valid_rows
    # The number of parameters decides only the learning rate.
    resolved = resolve(method, offline_asked(method, given), rows=train_rows, parameters=1)
    return EstimateOut(
        model=name,
        gpu_class=model.gpu_class or service.settings.gpu_class,
        training_rows=train_rows,
        validation_rows=valid_rows,
        n_epochs=resolved.n_epochs,
        batch_size=resolved.batch_size,
        total_steps=resolved.total_steps,
        estimate=None,
        reason=f"the time of {method} jobs is not estimated before they start",
        warnings=body.warnings,
    )


def estimate_inputs(body: JobCreate, project: Project, service: Service) -> EstimateInputs:
    """Read the inputs of the job, with the validation of job creation that follows `usable_body`."""
    reinforcement = body.reinforcement("A preview")
    name, _ = start(body, service, project)
    model = usable_model(body, name, service)
    price = Price.of(service.settings)
    if body.budget:
        body.budget.to_row(price)  # validated here as on creation
    gpu_class, chosen = model.gpu_class or service.settings.gpu_class, body.resources
    resources = resources_of(service.settings, gpu_class, chosen.gpus, chosen.nodes)
    with service.database.read() as session:
        find = partial(files.get_dataset, session, project.id)
        training = find(body.training_file, param="training_file")
        validation = find(body.validation_file, param="validation_file") if body.validation_file else None
        as_many = with_as_many(service.settings, gpu_class, resources)
        past = estimates.history(session, model=name, gpu_class=gpu_class, where=as_many)
    # No connection is held while reading files, which may be large.
    spec = reinforcement.grader
    train_rows = _rows(service.blobs, training, "training_file", spec, datasets.MAX_TRAINING_ROWS)
    if validation is not None:
        valid_rows = _rows(service.blobs, validation, "validation_file", spec, datasets.MAX_VALIDATION_ROWS)
    else:
        assert body.validation_split is not None, "reinforcement jobs have one of both"
        valid_rows = validation_size(train_rows, body.validation_split, datasets.MAX_VALIDATION_ROWS)
        train_rows -= valid_rows
    hyperparameters = reinforcement.hyperparameters
    template = hyperparameters.advanced.sampling.chat_template
    reasons = is_reasoning(model, service.settings.model_cache, template)
    settings = estimates.sizes(hyperparameters, rows=train_rows, context=model.context, reasons=reasons)
    alarms = alarms_of(spec, has_shadow=reinforcement.shadow_grader is not None)
    return EstimateInputs(
        name=name,
        model=model,
        gpu_class=gpu_class,
        resources=resources,
        training=training,
        train_rows=train_rows,
        valid_rows=valid_rows,
        settings=settings,
        past=past,
        price=price,
        warnings=[
            *hyperparameters.warnings,
            *too_small(settings, service.settings.warnings, alarms, valid_rows),
        ],
        preview=preview_of(body, model, project, service),
    )


def _rows(blobs: BlobStore, file: File, param: str, spec: GraderSpec, most: int) -> int:
    """Count the rows of a file by the validation rules of the job. Holds one row at a time.

    Raises:
        InvalidRequest: the job would reject the file, with the same message.
    """
    try:
        return datasets.count_examples(
            blobs.open(file.blob_key), check=lambda row: row_problems(spec, row.item), max_rows=most
        )
    except InvalidDataset as invalid:
        message = job_files.in_words(invalid, blobs, file, "reinforcement", param)
        raise InvalidRequest(message, param=param, code=f"invalid_{param}") from None
    except BlobNotFound:
        raise InvalidRequest(f"The contents of {file.id} are missing in the store.", param=param) from None
