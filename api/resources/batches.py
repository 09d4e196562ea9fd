"""/v1/batches: the requests of a file, answered in the background (docs/howto/batches.md)."""

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import Once
from api.http.openapi import refusals
from api.http.shapes import After, Body, EndedListing, Limit, clamped, ends
from api.resources.estimates import in_reader
from api.resources.eval_requests import Metadata
from api.resources.files import ExpiresAfter
from core.database.engine import Work
from core.database.tables import EvalRun, File, Project
from core.errors import (
    AliasTargetNotFound,
    ContentDamaged,
    FileNotFound,
    InvalidRequest,
    ModelNotFound,
    ServiceError,
)
from core.evals import batches, lifecycle, targets
from core.evals.batches import Checked, Endpoint, Status
from core.inference import not_served
from core.results import model_aliases
from core.storage import files
from core.storage.store import BlobNotFound
from core.tenancy import tenants

router = APIRouter(prefix="/batches", tags=["Batches"])


class BatchCreate(Body):
    """`completion_window` is OpenAI's only one."""

    input_file_id: str
    endpoint: Annotated[Endpoint, BeforeValidator(batches.full_path)]
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrorOut(BaseModel):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrorsOut(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorOut]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchOut(BaseModel):
    """openai.types.Batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None
    errors: BatchErrorsOut | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: EvalRun) -> "BatchOut":
        source, counts, status = batch.data_source, batch.summary["counts"], batches.status(batch)
        ended_at, written_at = batch.finished_at, source.get("files_written_at", batch.finished_at)
        is_invalid = (batch.error or {}).get("code") == batches.INVALID_INPUT
        is_cancelled = status in ("cancelling", "cancelled")
        return cls(
            id=batch.id,
            endpoint=source["endpoint"],
            model=batch.model,
            errors=_errors(batch.error),
            input_file_id=source["input_file_id"],
            completion_window=source["completion_window"],
            status=status,
            output_file_id=source.get("output_file_id"),
            error_file_id=source.get("error_file_id"),
            created_at=batch.created_at,
            in_progress_at=batch.started_at,
            expires_at=batch.created_at + batches.WINDOW_SECONDS,
            finalizing_at=None if is_cancelled or is_invalid else ended_at,
            completed_at=written_at if status == "completed" else None,
            failed_at=written_at if status == "failed" else None,
            expired_at=written_at if status == "expired" else None,
            cancelling_at=ended_at if is_cancelled else None,
            cancelled_at=written_at if status == "cancelled" else None,
            request_counts=RequestCounts(total=batch.total, completed=counts["pass"], failed=counts["error"]),
            metadata=batch.metadata_,
        )


def _errors(error: dict[str, Any] | None) -> BatchErrorsOut | None:
    if error is None:
        return None
    found = error.get("data") or [{"code": error["code"], "message": error["message"]}]
    nothing: dict[str, Any] = {"line": None, "param": None}
    return BatchErrorsOut(data=[BatchErrorOut(**nothing | one) for one in found])


@router.post("", response_model=BatchOut, responses=refusals(410))
async def create_batch(
    body: BatchCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> BatchOut | JSONResponse:
    """Create a batch. A batch whose input file is invalid has the status failed and lists the wrong lines."""

    def check() -> tuple[File, Checked]:
        file = _input_file(body, service, project)
        checked = _checked(file, body.endpoint, service)
        if not checked.errors:
            _resolve(checked, service, project)
        return file, checked

    file, checked = await in_reader(service, project, check)

    def create(work: Work) -> BatchOut:
        files.get(work.session, project.id, file.id)  # it may have been deleted meanwhile
        expires = body.output_expires_after
        batch = batches.new(
            project.id,
            checked,
            metadata=body.metadata,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            output_expires_after=None if expires is None else expires.seconds,
        )
        lifecycle.create(work, batch)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_eval_run_beyond(work.session, project.id, limits)
        return BatchOut.of(batch)

    return await to_thread.run_sync(once, create)


def _input_file(body: BatchCreate, service: Service, project: Project) -> File:
    """Raises InvalidRequest if there is none, or one of another purpose."""
    with service.database.read() as session:
        try:
            file = files.get(session, project.id, body.input_file_id)
        except FileNotFound as missing:
            raise InvalidRequest(missing.message, param="input_file_id") from None
    if file.purpose != batches.PURPOSE:
        message = f"The file {file.id} has purpose '{file.purpose}', but must have '{batches.PURPOSE}'."
        raise InvalidRequest(message, param="input_file_id")
    return file


def _checked(file: File, endpoint: Endpoint, service: Service) -> Checked:
    try:
        return batches.check(batches.requests(files.read_content(service.blobs, file), endpoint))
    except BlobNotFound:
        raise ContentDamaged(str(files.content_damaged(file, files.MISSING))) from None
    except files.FileDamaged as damage:
        raise ContentDamaged(str(damage)) from None


def _resolve(checked: Checked, service: Service, project: Project) -> None:
    """Replace the name of the model by that of its weights. A model that cannot answer is an error of the batch."""
    try:
        with service.database.read() as session:
            name = model_aliases.resolve(session, project.id, service.registry.resolve(checked.model))
            name = service.registry.resolve(name)
            served = targets.served(session, service.blobs, service.registry, project.id, name)
            if served is None:
                if name != checked.model:
                    raise AliasTargetNotFound(checked.model, name)
                names = model_aliases.callable_names(session, project.id, service.registry)
                raise ModelNotFound(checked.model, names)
        if not service.settings.inference_address(served.base_model):
            raise not_served(served.base_model)
        checked.model = name
    except ServiceError as refused:
        checked.refuse(refused.code or "invalid_model", refused.message, param="body.model")


@router.get("")
def list_batches(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> EndedListing[BatchOut]:
    """List the project's batches, newest first."""
    page = batches.page(session, project.id, after=after, limit=clamped(limit))
    data = [BatchOut.of(batch) for batch in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.get("/{batch_id}", responses=refusals(404))
def retrieve_batch(batch_id: str, project: CurrentProject, session: ReadSession) -> BatchOut:
    """Retrieve a batch."""
    return BatchOut.of(batches.get(session, project.id, batch_id))


@router.post("/{batch_id}/cancel", responses=refusals(400, 404))
def cancel_batch(batch_id: str, project: CurrentProject, uow: UnitOfWork) -> BatchOut:
    """Cancel a batch. The answers so far are in its files once its status is cancelled."""
    with uow() as work:
        batch = batches.get(work.session, project.id, batch_id)
        lifecycle.cancel(work, batch)
        return BatchOut.of(batch)
