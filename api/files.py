"""/v1/files: uploads, streamed to the blob store while they arrive, and downloads."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from api.deps import CurrentProject, Parts, ReadSession, Service, Uow
from api.explain import explain
from api.idempotency import OnceOnly, OnceStreamed
from api.multipart import FormPart, at_most, form_of
from api.wire import After, Deleted, EndedListing, Part, ends
from core import files, tenants
from core.blobs import BlobInfo, BlobNotFound
from core.db import Work
from core.errors import FileNotFound, InvalidRequest
from core.ids import new_id
from core.limits import Limits
from core.models import File, Project, now

router = APIRouter(prefix="/files", tags=["Files"])


# The other fields of the form, the lines between them and the headers of each: no more than this by any client.
MOST_AROUND_A_FILE = 64 << 10


class ExpiresAfter(Part):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)  # an hour to thirty days


class FormExpiresAfter(ExpiresAfter, strict=False):
    """As fields of a form, which are text."""


# OpenAI's list. Jobs read "fine-tune" only; files of the others are kept for their owner.
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
FileName = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]


class FileCreate(Part):
    """The fields of the form; `file` is the name of the file."""

    purpose: Purpose
    file: FileName
    expires_after: FormExpiresAfter | None = None


class FileOut(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    # Nothing happens to a file after its upload: its content is validated by the job that names it.
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: File) -> "FileOut":
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,
        )


FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


@router.post(
    "",
    response_model=FileOut,
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": FORM}}, "required": True}},
)
async def create_file(
    request: Request, project: CurrentProject, service: Parts, once: OnceStreamed
) -> FileOut | JSONResponse:
    """Upload a file."""
    declared = int(request.headers.get("content-length", "0"))
    upload = partial(_upload, service, project, once, declared, form_of(request))
    return await to_thread.run_sync(upload, limiter=service.upload_threads)


@router.get("")
def list_files(
    project: CurrentProject,
    session: ReadSession,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    order: Literal["asc", "desc"] = "desc",
    after: After = None,
) -> EndedListing[FileOut]:
    """List the project's files."""
    newest_first = order == "desc"
    page = files.page(
        session, project.id, purpose=purpose, newest_first=newest_first, after=after, limit=limit
    )
    data = [FileOut.of(file) for file in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.get("/{file_id}")
def retrieve_file(file_id: str, project: CurrentProject, session: ReadSession) -> FileOut:
    """Describe a file."""
    return FileOut.of(files.get(session, project.id, file_id))


@router.delete("/{file_id}")
def delete_file(file_id: str, project: CurrentProject, uow: Uow) -> Deleted:
    """Delete a file. A job that is already using it goes on."""
    with uow() as work:
        files.delete(work, project.id, file_id)
    return Deleted(id=file_id, object="file")


@router.get("/{file_id}/content", response_class=StreamingResponse)
def download_file(file_id: str, project: CurrentProject, service: Parts) -> StreamingResponse:
    """The bytes of a file."""
    with service.database.read() as session:  # closed before the blob store is asked, which may take its time
        file = files.get(session, project.id, file_id)
    try:
        chunks = service.blobs.open(file.blob_key)
    except BlobNotFound:  # removed in between
        raise FileNotFound(file_id) from None
    media_type = "text/csv" if file.purpose == files.RESULTS else "application/octet-stream"
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    return StreamingResponse(chunks, media_type=media_type, headers=headers)


def _upload(
    service: Service, project: Project, once: OnceOnly, declared: int, form: Iterator[FormPart]
) -> FileOut | JSONResponse:
    """Store the file first: fields may come after it. If then anything is wrong, remove it again.

    `declared` is the length of the whole body, 0 if the client has not said.
    """
    limits = tenants.limits(project, service.settings.default_limits)
    with service.database.read() as session:  # before any of it is stored
        needed = max(1, declared - MOST_AROUND_A_FILE)
        room = partial(
            _room, service, project, limits, tenants.free_storage(session, project.id, limits, needed=needed)
        )
    file_id = new_id("file-", 22)
    blob_key = f"projects/{project.id}/files/{file_id}"
    try:
        sent, stored = _read(service, blob_key, room, form)
        asked = _checked(sent)
        if stored is None or stored.size == 0:
            raise InvalidRequest("The file is empty.", param="file")
        created_at = now()
        file = File(
            id=file_id,
            project_id=project.id,
            filename=asked.file,
            purpose=asked.purpose,
            bytes=stored.size,
            sha256=stored.sha256,
            blob_key=blob_key,
            created_at=created_at,
            expires_at=created_at + asked.expires_after.seconds if asked.expires_after else None,
        )

        def create(work: Work) -> FileOut:
            tenants.refuse_file_beyond(work.session, project.id, limits, file.bytes)
            files.add(work, file)
            return FileOut.of(file)

        answer = once.about(sent | {"sha256": stored.sha256})(create)
    except BaseException:
        service.blobs.delete(blob_key)
        raise
    if isinstance(answer, JSONResponse):  # the first upload is the file; this one was only needed to compare
        service.blobs.delete(blob_key)
    return answer


def _read(
    service: Service,
    blob_key: str,
    room: Callable[[Iterator[bytes]], Iterator[bytes]],
    form: Iterator[FormPart],
) -> tuple[dict[str, Any], BlobInfo | None]:
    """The fields as one object, and what was stored of the file."""
    sent: dict[str, Any] = {}
    stored = None
    for part in form:
        if part.name != "file":
            _set(sent, part.name, part.text())
        elif stored is not None:
            raise InvalidRequest("Send one file at a time.", param="file")
        else:
            sent["file"] = last_segment(part.filename or "") or "upload"
            most = service.settings.max_upload_bytes
            stored = service.blobs.put_stream(blob_key, room(at_most(most, part)))
    return sent, stored


def last_segment(path: str) -> str:
    """Of a file's name only this is kept: browsers and scripts send whole paths, of either kind."""
    return re.split(r"[/\\]", path)[-1]


def _set(sent: dict[str, Any], name: str, value: str) -> None:
    """`expires_after[seconds]` is how a form spells {"expires_after": {"seconds": …}}."""
    if len(sent) > 16:
        raise InvalidRequest("The form has too many fields.")
    if nested := re.fullmatch(r"(\w+)\[(\w+)\]", name):
        inner = sent.setdefault(nested[1], {})
        if isinstance(inner, dict):
            inner[nested[2]] = value
    else:
        sent[name] = value


def _checked(sent: dict[str, Any]) -> FileCreate:
    try:
        return FileCreate.model_validate(sent)
    except ValidationError as invalid:
        complaints = [error | {"loc": ("body", *error["loc"])} for error in invalid.errors()]
        raise explain(complaints, sent) from None


def _room(
    service: Service, project: Project, limits: Limits, free: int | None, chunks: Iterator[bytes]
) -> Iterator[bytes]:
    """The chunks, for as long as the project may store them; `free` bytes may be, for all we know."""
    received = 0
    for chunk in chunks:
        received += len(chunk)
        if free is not None and received > free:
            with service.database.read() as session:
                free = tenants.free_storage(session, project.id, limits, needed=received)
        yield chunk
