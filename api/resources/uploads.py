"""/v1/uploads: multipart uploads of large files, whose parts may arrive in parallel."""

import logging
from functools import partial
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from api.http.deps import CurrentActor, CurrentProject, Service, ServiceDep, UnitOfWork
from api.http.idempotency import Once
from api.http.multipart import FormPart, receive
from api.http.openapi import refusals
from api.http.shapes import Body
from api.resources.files import (
    ExpiresAfter,
    FileName,
    FileOut,
    Purpose,
    last_segment,
    refuse_lost_store,
)
from core.database.audit import Actor
from core.database.engine import Work
from core.database.tables import File, Project, Upload, UploadPart
from core.errors import InvalidRequest
from core.storage import uploads
from core.tenancy import tenants

log = logging.getLogger(__name__)

router = APIRouter(prefix="/uploads", tags=["Uploads"])


class UploadCreate(Body):
    bytes: int = Field(ge=1)
    filename: FileName
    mime_type: str = Field(max_length=128, pattern=r"^[^\x00]*$")
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class UploadComplete(Body):
    part_ids: Annotated[list[str], Field(min_length=1, max_length=uploads.MAX_PARTS)]
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


class UploadOut(BaseModel):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileOut | None

    @classmethod
    def of(cls, upload: Upload, file: File | None = None) -> "UploadOut":
        return cls(
            id=upload.id,
            bytes=upload.bytes,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
            filename=upload.filename,
            purpose=upload.purpose,
            status=upload.status,
            file=FileOut.of(file) if file else None,
        )


class PartOut(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str

    @classmethod
    def of(cls, part: UploadPart) -> "PartOut":
        return cls(id=part.id, created_at=part.created_at, upload_id=part.upload_id)


FORM = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "format": "binary"}},
}


@router.post("", response_model=UploadOut)
def create_upload(
    body: UploadCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> UploadOut | JSONResponse:
    """Create an upload. It expires after an hour."""
    most = service.settings.max_multipart_bytes
    if body.bytes > most:
        message = f"The upload has {body.bytes} bytes, but the maximum is {most}."
        raise InvalidRequest(message, param="bytes", code="integer_above_max_value")

    def create(work: Work) -> UploadOut:
        upload = uploads.create(
            work,
            project.id,
            filename=last_segment(body.filename) or "upload",
            purpose=body.purpose,
            mime_type=body.mime_type,
            size=body.bytes,
            file_expires_after=body.expires_after.seconds if body.expires_after else None,
            limits=tenants.limits(project, service.settings.default_limits),
            most_pending=service.settings.pending_uploads_per_project,
        )
        work.session.flush()  # assigns the id and the timestamps
        return UploadOut.of(upload)

    return once(create)


@router.post(
    "/{upload_id}/parts",
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": FORM}}, "required": True}},
)
async def add_upload_part(
    upload_id: str, request: Request, project: CurrentProject, service: ServiceDep
) -> PartOut:
    """Add a part of at most 64 MB. Parts may be sent in any order and concurrently."""
    limits = tenants.limits(project, service.settings.default_limits)

    def open_part() -> uploads.PartWriter:
        refuse_lost_store(service)
        return uploads.PartWriter(service.database, service.blobs, project.id, upload_id, limits=limits)

    async with service.admission.uploads.admitted(project.id):
        arriving = ArrivingPart(await to_thread.run_sync(open_part, limiter=service.upload_threads))
        return await receive(request, arriving, arriving.finish, service.upload_threads)


class ArrivingPart:
    """A form with only `data`, the part."""

    def __init__(self, part: uploads.PartWriter) -> None:
        self._part = part
        self._begun = False

    def begin(self, name: str, filename: str | None) -> FormPart:
        if name != "data":
            raise InvalidRequest(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
        if self._begun:
            raise InvalidRequest("Send one part at a time.", param="data")
        self._begun = True
        return self

    def write(self, data: bytes) -> None:
        self._part.write(data)

    def end(self) -> None:
        pass

    def finish(self) -> PartOut:
        if not self._begun:
            raise InvalidRequest(
                "Missing required parameter: 'data'.", param="data", code="missing_required_parameter"
            )
        return PartOut.of(self._part.commit())

    def abort(self) -> None:
        self._part.abort()


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: UploadComplete, project: CurrentProject, actor: CurrentActor, service: ServiceDep
) -> UploadOut:
    """Complete an upload: join the parts in the order of `part_ids` into a file."""
    complete = partial(_complete, service, project, actor, upload_id, body)
    async with service.admission.uploads.admitted(project.id):
        return await to_thread.run_sync(complete, limiter=service.upload_threads)


@router.post("/{upload_id}/cancel", responses=refusals(400))
def cancel_upload(upload_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> UploadOut:
    """Cancel an upload and delete its parts."""
    with uow() as work:
        upload = uploads.cancel(work, project.id, upload_id)
    _discard_parts(service, upload_id)
    return UploadOut.of(upload)


def _complete(
    service: Service, project: Project, actor: Actor, upload_id: str, body: UploadComplete
) -> UploadOut:
    upload, file = uploads.complete(
        service.database,
        service.blobs,
        project.id,
        upload_id,
        part_ids=body.part_ids,
        md5=body.md5,
        actor=actor,
        limits=tenants.limits(project, service.settings.default_limits),
    )
    _discard_parts(service, upload_id)
    return UploadOut.of(upload, file)


def _discard_parts(service: Service, upload_id: str) -> None:
    try:
        while uploads.discard_parts(service.database, service.blobs, upload_id=upload_id):
            pass
    except Exception:  # the upload is complete regardless; the reconciler retries
        log.exception("the parts of %s could not be deleted yet", upload_id)
