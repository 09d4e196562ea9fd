"""/v1/files: uploads, streamed to the blob store as they arrive, and downloads."""

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import OnceOnly, OnceStreamed
from api.http.json_responses import JSON
from api.http.multipart import FormPart, TextField, receive
from api.http.openapi import refusals
from api.http.ranges import ranged_response, requested_part
from api.http.shapes import After, Deleted, EndedListing, ends
from api.http.validation_errors import explain
from core.database.engine import Work
from core.database.ids import new_id
from core.database.tables import File, Project, now
from core.errors import ContentDamaged, InvalidRequest, PayloadTooLarge, ServiceError, Unavailable
from core.storage import files
from core.storage.foreign_files import HEAD_BYTES
from core.storage.store import BlobInfo, BlobNotFound, BlobWriter, StoreEmpty, check_not_empty
from core.storage.uncommitted import Uncommitted
from core.strict import StrictModel
from core.tenancy import idempotency, tenants

log = logging.getLogger(__name__)

router = APIRouter(prefix="/files", tags=["Files"])


# OpenAI's contract allows a limit of 10,000, and its clients continue while `has_more` is true, whatever the limit.
# A page of 10,000 is 2 MB and took a second to build.
MAX_FILES_A_PAGE = 1000
# Upper bound of the other form fields, boundaries and part headers of any client.
MAX_FORM_OVERHEAD = 64 << 10


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)  # an hour to thirty days


class FormExpiresAfter(ExpiresAfter, strict=False):
    """`expires_after` as form fields, which are text."""


# OpenAI's list. Jobs read "fine-tune" only; the other purposes are stored without use.
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
FileName = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]


class FileCreate(StrictModel):
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
    # Uploads are never processed: the job that uses a file validates it.
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
    request: Request, project: CurrentProject, service: ServiceDep, once: OnceStreamed
) -> FileOut | JSONResponse:
    """Upload a file."""
    arriving = ArrivingFile(service, project, int(request.headers.get("content-length", "0")))
    async with service.admission.uploads.admitted(project.id):
        await to_thread.run_sync(arriving.open, once, limiter=service.upload_threads)
        return await receive(request, arriving, partial(arriving.finish, once), service.upload_threads)


@router.get("", response_model=EndedListing[FileOut])
def list_files(
    project: CurrentProject,
    session: ReadSession,
    purpose: str | None = None,
    limit: Annotated[int, Query(le=10000)] = MAX_FILES_A_PAGE,
    order: Literal["asc", "desc"] = "desc",
    after: After = None,
) -> Response:
    """List the project's files, at most 1000 per page; with `has_more`, continue `after` the last id."""
    newest_first = order == "desc"
    most = max(1, min(limit, MAX_FILES_A_PAGE))
    page = files.page(
        session, project.id, purpose=purpose, newest_first=newest_first, after=after, limit=most
    )
    data = [FileOut.of(file) for file in page.items]
    listing = EndedListing[FileOut](data=data, has_more=page.has_more, **ends(page))
    # Serialized here, in a thread: FastAPI would do it in the event loop.
    return JSON(listing)


@router.get("/{file_id}")
def retrieve_file(file_id: str, project: CurrentProject, session: ReadSession) -> FileOut:
    """Retrieve a file."""
    return FileOut.of(files.get(session, project.id, file_id))


@router.delete("/{file_id}")
def delete_file(file_id: str, project: CurrentProject, uow: UnitOfWork) -> Deleted:
    """Delete a file. A job that already uses it continues."""
    with uow() as work:
        files.delete(work, project.id, file_id)
    return Deleted(id=file_id, object="file")


@router.get("/{file_id}/content", response_class=StreamingResponse, responses=refusals(410, 416, 503))
def download_file(
    file_id: str, request: Request, project: CurrentProject, service: ServiceDep
) -> StreamingResponse:
    """Download a file. The connection is aborted before the last byte if the content does not match its hash.

    `Range` requests a part of it. A part is verified only if it includes the last byte.
    """
    file = _row(service, project, file_id)
    etag, asked = f'"{file.sha256}"', request.headers
    part = requested_part(asked.get("range"), file.bytes, if_range=asked.get("if-range"), etag=etag)
    try:
        content = _logged(file, files.read_content(service.blobs, file))
        first = next(content)  # all of a small file, so that damage can still be reported with a status
    except BlobNotFound:
        raise refuse_missing(service, project, file_id) from None
    except files.FileDamaged as damage:
        raise ContentDamaged(str(damage)) from None
    media_type = "text/csv" if file.purpose == files.RESULTS else "application/octet-stream"
    return ranged_response(
        chain([first], content),
        part,
        size=file.bytes,
        etag=etag,
        media_type=media_type,
        disposition=f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    )


def _row(service: Service, project: Project, file_id: str) -> File:
    """Read the row in a session that closes before the blob store is read."""
    with service.database.read() as session:
        return files.get(session, project.id, file_id)


def refuse_missing(service: Service, project: Project, file_id: str) -> ServiceError:
    """The error for a missing blob: 410, or 503 if the whole store is empty.

    Raises:
        FileNotFound: the file was deleted after its row was read.
    """
    file = _row(service, project, file_id)
    try:
        check_not_empty(service.blobs)
    except StoreEmpty as empty:
        return _store_is_lost(empty)
    log.error("%s of %s is missing; a download has found it", file.blob_key, file.id)
    return ContentDamaged(str(files.content_damaged(file, files.MISSING)))


def refuse_lost_store(service: Service) -> None:
    """Raise Unavailable if there are files and the store has no blobs: it is not the one that they were stored in."""
    with service.database.read() as session:
        try:
            files.refuse_lost_store(session, service.blobs)
        except StoreEmpty as empty:
            raise _store_is_lost(empty) from empty


def _store_is_lost(empty: StoreEmpty) -> Unavailable:
    log.error("%s", empty)
    return Unavailable("The service cannot find its stored files. Try again later, or contact the operator.")


def _logged(file: File, content: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from content
    except files.FileDamaged:
        log.error("%s of %s is damaged; a download has found it", file.blob_key, file.id)
        raise


class ArrivingFile:
    """An incoming file. It is stored first, since fields may follow it, and removed if validation then fails.

    The methods block; any thread may call them.

    Args:
        declared: Length of the whole body in bytes; 0 if unknown.
    """

    def __init__(self, service: Service, project: Project, declared: int) -> None:
        self._service, self._project = service, project
        self._limits = tenants.limits(project, service.settings.default_limits)
        self._declared = declared
        self._id = new_id("file-", 22)
        self._blob_key = f"projects/{project.id}/files/{self._id}"
        self._sent: dict[str, Any] = {}
        self._stored: _Stored | None = None
        self._repeats: tuple[str, int] | None = None  # the used key, and the bytes of its file
        self._uncommitted = Uncommitted(service.blobs, self._blob_key)

    def open(self, once: OnceOnly) -> None:
        """Check the store and the storage quota before anything is stored.

        A repeated request adds nothing to the quota. One with more bytes than the first is not a repetition.
        """
        refuse_lost_store(self._service)
        self._free = None
        first = once.first_answer()
        if first is not None and first.get("object") == "file":
            self._repeats = (str(once.key), first["bytes"])
        else:
            self._free = self._free_bytes(max(1, self._declared - MAX_FORM_OVERHEAD))

    def begin(self, name: str, filename: str | None) -> FormPart:
        if name != "file":
            if name in self._sent:
                raise InvalidRequest(f"The form has '{name}' twice.", param=name, code="invalid_value")
            return TextField(name, partial(_set, self._sent, name))
        if self._stored is not None:
            raise InvalidRequest("Send one file at a time.", param="file")
        self._sent["file"] = last_segment(filename or "") or "upload"
        self._stored = _Stored(self._service.blobs.writer(self._blob_key), self._refuse_beyond)
        return self._stored

    def finish(self, once: OnceOnly) -> FileOut | JSONResponse:
        """Create the file, or return the first response for this Idempotency-Key."""
        fields = _checked(self._sent)
        info = None if self._stored is None else self._stored.info
        if self._stored is None or info is None or info.size == 0:
            raise InvalidRequest(files.EMPTY_FILE, param="file")
        files.refuse_foreign(fields.purpose, fields.file, self._stored.head)
        created_at = now()
        file = File(
            id=self._id,
            project_id=self._project.id,
            filename=fields.file,
            purpose=fields.purpose,
            bytes=info.size,
            sha256=info.sha256,
            blob_key=self._blob_key,
            created_at=created_at,
            expires_at=created_at + fields.expires_after.seconds if fields.expires_after else None,
        )

        twin = files.intact_twin(self._service.database, self._service.blobs, self._project.id, info)

        def create(work: Work) -> FileOut:
            tenants.refuse_file_beyond(work.session, self._project.id, self._limits, file.bytes)
            files.share(work.session, file, twin)
            files.add(work, file)
            made = FileOut.of(file)
            self._uncommitted.keep(file.blob_key)
            return made

        # A repeated request only served for comparison, and a file with known content has the earlier blob.
        return once.about(self._sent | {"sha256": info.sha256})(create)

    def abort(self) -> None:
        if self._stored is not None:
            self._stored.abort()
            self._uncommitted.close()

    def _refuse_beyond(self, received: int) -> None:
        most = self._service.settings.max_upload_bytes
        if received > most:
            raise PayloadTooLarge(f"The file is larger than the maximum of {most} bytes.", param="file")
        if self._repeats is not None and received > self._repeats[1]:
            raise idempotency.reused(self._repeats[0])
        if self._free is not None and received > self._free:
            self._free = self._free_bytes(received)

    def _free_bytes(self, needed: int) -> int | None:
        with self._service.database.read() as session:
            return tenants.free_storage(session, self._project.id, self._limits, needed=needed)


class _Stored:
    """The field that holds the file's bytes. `check` receives the size so far before more is stored."""

    def __init__(self, writer: BlobWriter, check: Callable[[int], None]) -> None:
        self._writer, self._check = writer, check
        self._received = 0
        self.info: BlobInfo | None = None
        self.head = b""  # the first HEAD_BYTES

    def write(self, data: bytes) -> None:
        self._received += len(data)
        self._check(self._received)
        self.head += data[: HEAD_BYTES - len(self.head)]
        self._writer.write(data)

    def end(self) -> None:
        self.info = self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()


def last_segment(path: str) -> str:
    """The base name of a file: browsers and scripts send whole paths of either kind."""
    return re.split(r"[/\\]", path)[-1]


def _set(sent: dict[str, Any], name: str, value: str) -> None:
    """Set a field; `expires_after[seconds]` is the form encoding of {"expires_after": {"seconds": …}}."""
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
        raise explain(complaints, sent, FileCreate.model_fields) from None
