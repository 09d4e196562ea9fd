"""/v1/regraft/estimate: what a job would take, before there is one."""

from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from api.deps import Parts, ReadProject
from api.document import FOR_ANY_KEY, refusals
from api.jobs import JobCreate, usable_model
from core import datasets, estimates, files, usage
from core.blobs import BlobNotFound, BlobStore
from core.budgets import Price
from core.errors import InvalidRequest
from core.models import File

router = APIRouter(prefix="/regraft/estimate", tags=["regraft"])


class EstimateOut(BaseModel):
    """The size of the job with every "auto" replaced, and ranges of what it will take."""

    object: Literal["regraft.estimate"] = "regraft.estimate"
    model: str
    gpu_class: str
    training_rows: int
    validation_rows: int
    n_epochs: int
    batch_size: int
    group_size: int
    max_completion_tokens: int
    total_steps: int
    estimate: dict[str, Any] | None  # as a job shows it
    reason: str | None  # why there is no estimate


@router.post("", responses=refusals(404), openapi_extra=FOR_ANY_KEY)
def estimate_job(body: JobCreate, project: ReadProject, service: Parts) -> EstimateOut:
    """Estimate the job that this body would create. Nothing is created."""
    model = usable_model(body, service)
    price = Price.of(service.settings)
    if body.budget:
        body.budget.stored(price)  # refused here as it would be there
    gpu_class = model.gpu_class or service.settings.gpu_class
    with service.database.read() as session:
        find = partial(files.get_dataset, session, project.id)
        training = find(body.training_file, param="training_file")
        validation = find(body.validation_file, param="validation_file")
        past = estimates.history(session, model=body.model, gpu_class=gpu_class)
    # The files are read without holding a connection: they may be large.
    train_rows = _rows(service.blobs, training, "training_file")
    valid_rows = _rows(service.blobs, validation, "validation_file")
    asked = body.method.reinforcement.hyperparameters
    sizes = estimates.sizes(asked, rows=train_rows, context=model.context)
    estimate: dict[str, Any] | None = None
    if past is not None:
        ahead = estimates.before_start(past, sizes, train_rows=train_rows, valid_rows=valid_rows)
        estimate = usage.with_cost(ahead, 0.0, price)
    return EstimateOut(
        model=body.model,
        gpu_class=gpu_class,
        training_rows=train_rows,
        validation_rows=valid_rows,
        n_epochs=sizes.n_epochs,
        batch_size=sizes.batch_size,
        group_size=sizes.group_size,
        max_completion_tokens=sizes.max_completion_tokens,
        total_steps=sizes.total_steps,
        estimate=estimate,
        reason=None if past else estimates.NO_HISTORY,
    )


def _rows(blobs: BlobStore, file: File, param: str) -> int:
    try:
        rows = datasets.count_rows(blobs.open(file.blob_key))
    except BlobNotFound:
        raise InvalidRequest(f"The contents of {file.id} are gone from the store.", param=param) from None
    if rows == 0:
        raise InvalidRequest(f"The file {file.id} is empty.", param=param)
    return rows
