"""Multipart uploads, as in OpenAI's Uploads API.

    pending ──> completed     its parts are joined to one file
            ├─> cancelled
            └─> expired       it was not completed in time

A part is a blob. Completion streams the parts into the file's blob, and adds the file in the transaction that completes
the upload. Parts of an upload that has ended are deleted after the commit, or by the reconciler if the process dies
before that.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.orm import Session

from core.database.audit import OPERATOR, Actor
from core.database.engine import Database, Work, earliest_now
from core.database.ids import new_id
from core.database.tables import File, Upload, UploadPart, now
from core.errors import InvalidRequest, PayloadTooLarge, UploadNotFound
from core.storage import files
from core.storage.foreign_files import HEAD_BYTES
from core.storage.store import BlobCorrupt, BlobInfo, BlobNotFound, BlobStore, NotDeleted
from core.storage.uncommitted import Uncommitted
from core.tenancy import tenants
from core.tenancy.limits import NO_LIMITS, Limits

LIFETIME = 3600
# Completing a large upload takes a while; it must not expire meanwhile.
COMPLETION_SECONDS = 1800
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000
MAX_PENDING = 100  # per project


def create(
    work: Work,
    project_id: str,
    *,
    filename: str,
    purpose: str,
    mime_type: str,
    size: int,
    file_expires_after: int | None,
    limits: Limits = NO_LIMITS,
    most_pending: int = MAX_PENDING,
) -> Upload:
    """Create a pending upload of `size` bytes; its file expires after `file_expires_after` seconds.

    Raises:
        QuotaExceeded: the storage limit is too low, or the project has `most_pending` pending uploads.
    """
    tenants.refuse_upload_beyond(work.session, project_id, most_pending)
    tenants.refuse_file_beyond(work.session, project_id, limits, size)
    created_at = now()
    upload = Upload(
        project_id=project_id,
        filename=filename,
        purpose=purpose,
        mime_type=mime_type,
        bytes=size,
        created_at=created_at,
        expires_at=created_at + LIFETIME,
        file_expires_after=file_expires_after,
    )
    work.session.add(upload)
    work.session.flush()
    work.record("upload.created", upload.id, {"filename": filename, "bytes": size})
    return upload


def get(session: Session, project_id: str, upload_id: str) -> Upload:
    """Return the project's upload; raise UploadNotFound also for another project's."""
    return _found(session.scalar(_the(project_id, upload_id)), upload_id)


class PartWriter:
    """Stores a part as it arrives. Any number may arrive concurrently.

    Raises:
        UploadNotFound: the project has no such upload.
        InvalidRequest: the upload has ended.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        project_id: str,
        upload_id: str,
        *,
        limits: Limits = NO_LIMITS,
        most_bytes: int = MAX_PART_BYTES,
        most_parts: int = MAX_PARTS,
    ) -> None:
        with database.read() as session:  # before receiving up to 64 MB
            upload = get(session, project_id, upload_id)
            check_open(upload)
        self._database, self._blobs, self._limits = database, blobs, limits
        self._most_bytes, self._most_parts = most_bytes, most_parts
        self._project_id, self._upload_id, self._announced = project_id, upload_id, upload.bytes
        self._id = new_id("part_")
        self._blob_key = f"projects/{project_id}/uploads/{upload_id}/{self._id}"
        self._writer = blobs.writer(self._blob_key)
        self._received = 0
        self._uncommitted = Uncommitted(blobs, self._blob_key)

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            PayloadTooLarge: the part exceeds `most_bytes`.
            InvalidRequest: the part exceeds the announced size of the upload.
        """
        self._received += len(data)
        if self._received > self._most_bytes:
            message = f"The data is larger than the maximum of {self._most_bytes} bytes."
            raise PayloadTooLarge(message, param="data")
        if self._received > self._announced:
            message = f"The upload was announced with {self._announced} bytes, and this part has more."
            raise InvalidRequest(message, param="data")
        self._writer.write(data)

    def commit(self) -> UploadPart:
        """Add the part to the upload.

        Raises:
            InvalidRequest: the part is empty, or the upload has ended.
            QuotaExceeded: the received bytes exceed the announced size, and the storage limit.
        """
        if self._received == 0:
            raise InvalidRequest("The part is empty.", param="data")
        size = self._writer.commit().size
        with self._database.write() as session:
            # The upload may have ended meanwhile.
            upload = _locked(session, self._project_id, self._upload_id)
            check_open(upload)
            beyond = _beyond_announced(session, upload, size, self._most_parts)
            if beyond:
                tenants.refuse_file_beyond(session, self._project_id, self._limits, beyond)
            part = UploadPart(id=self._id, upload_id=upload.id, bytes=size, blob_key=self._blob_key)
            session.add(part)
            session.flush()
            self._uncommitted.keep_all()
        return part

    def abort(self) -> None:
        """Discard the part; without effect after `commit`."""
        self._writer.abort()
        self._uncommitted.close()


def check_open(upload: Upload) -> None:
    """Raise InvalidRequest unless the upload accepts parts and can be completed."""
    if upload.status == "pending" and upload.expires_at > now():
        return
    became = "expired" if upload.status == "pending" else upload.status
    verb = "has expired" if became == "expired" else f"was already {became}"
    raise InvalidRequest(
        f"Upload {upload.id} {verb}. Create a new one.", param="upload_id", code="invalid_upload_state"
    )


def complete(
    database: Database,
    blobs: BlobStore,
    project_id: str,
    upload_id: str,
    *,
    part_ids: Sequence[str],
    md5: str | None = None,
    actor: Actor = OPERATOR,
    limits: Limits = NO_LIMITS,
) -> tuple[Upload, File | None]:
    """Join the parts in this order. Idempotent, also for concurrent calls.

    The file is None only if it was deleted since.

    Raises:
        UploadNotFound: the project has no such upload.
        InvalidRequest: the upload has ended, the parts do not match, or training data is not JSONL. It is unchanged.
        QuotaExceeded: the project's limit was lowered since the upload was created. It is unchanged.
    """
    with database.write() as session:
        upload = _locked(session, project_id, upload_id)
        if upload.status == "completed":
            return upload, _file(session, upload)
        check_open(upload)
        parts = _chosen(session, upload, part_ids)
        upload.expires_at = max(upload.expires_at, now() + COMPLETION_SECONDS)
    file_id = new_id("file-", 22)
    blob_key = f"projects/{project_id}/files/{file_id}"
    try:
        with Uncommitted(blobs, blob_key) as uncommitted:
            files.refuse_foreign(upload.purpose, upload.filename, _head(blobs, parts))
            stored = blobs.put_stream(blob_key, _joined(blobs, upload, parts, md5))
            twin = files.intact_twin(database, blobs, project_id, stored)
            with database.write() as session:
                upload = _locked(session, project_id, upload_id)
                if upload.status != "pending":
                    if upload.status != "completed":
                        check_open(upload)
                    return upload, _file(session, upload)  # completed by a concurrent call
                file = _file_of(upload, file_id, blob_key, stored)
                upload.status, upload.file_id = "completed", file_id
                session.flush()  # replaces the announced size by the stored bytes
                tenants.refuse_file_beyond(session, project_id, limits, file.bytes)
                files.share(session, file, twin)
                files.add(Work(session, actor), file)
                uncommitted.keep(file.blob_key)
        return upload, file
    except BlobNotFound:
        # The parts were deleted while being read: the upload was completed or cancelled meanwhile.
        with database.read() as session:
            upload = get(session, project_id, upload_id)
            if upload.status == "completed":
                return upload, _file(session, upload)
        check_open(upload)
        raise


def _file_of(upload: Upload, file_id: str, blob_key: str, stored: BlobInfo) -> File:
    created_at, lifetime = now(), upload.file_expires_after
    return File(
        id=file_id,
        project_id=upload.project_id,
        filename=upload.filename,
        purpose=upload.purpose,
        bytes=stored.size,
        sha256=stored.sha256,
        blob_key=blob_key,
        created_at=created_at,
        expires_at=None if lifetime is None else created_at + lifetime,
    )


def cancel(work: Work, project_id: str, upload_id: str) -> Upload:
    """Cancel an upload. Idempotent."""
    upload = _locked(work.session, project_id, upload_id)
    if upload.status != "cancelled":
        check_open(upload)
        upload.status = "cancelled"
        work.record("upload.cancelled", upload.id)
    return upload


def expire(session: Session) -> int:
    """Expire the uploads that were not completed in time, and return their number."""
    late = (
        update(Upload)
        .where(Upload.status == "pending", Upload.expires_at <= earliest_now(session))
        .values(status="expired")
        .returning(Upload.seq)
        .execution_options(synchronize_session=False)
    )
    return len(session.scalars(late).all())


def discard_parts(
    database: Database, blobs: BlobStore, *, upload_id: str | None = None, skip: Collection[str] = ()
) -> int:
    """Delete parts of ended uploads, of one or of all: contents first, because the rows are needed to find them.

    Returns the number, at most 1000.

    Args:
        skip: Keys of blobs to leave.

    Raises:
        NotDeleted: some cannot be deleted; all others are.
    """
    ended = (
        select(UploadPart).join(Upload, Upload.id == UploadPart.upload_id).where(Upload.status != "pending")
    )
    if upload_id is not None:
        ended = ended.where(UploadPart.upload_id == upload_id)
    with database.read() as session:
        parts = session.scalars(ended.where(UploadPart.blob_key.not_in(skip)).limit(1000)).all()
    if not parts:
        return 0
    left: NotDeleted | None = None
    try:
        blobs.delete_many([part.blob_key for part in parts])
    except NotDeleted as some:
        left = some
    gone = [part.seq for part in parts if left is None or part.blob_key not in left.causes]
    with database.write() as session:
        session.execute(delete(UploadPart).where(UploadPart.seq.in_(gone)))
    if left is not None:
        raise left
    return len(parts)


def _the(project_id: str, upload_id: str) -> Select[Upload]:
    return select(Upload).where(Upload.id == upload_id, Upload.project_id == project_id)


def _locked(session: Session, project_id: str, upload_id: str) -> Upload:
    """Locked until the commit, so that it ends once and accepts no part afterwards."""
    return _found(session.scalar(_the(project_id, upload_id).with_for_update()), upload_id)


def _found(upload: Upload | None, upload_id: str) -> Upload:
    if upload is None:
        raise UploadNotFound(upload_id)
    return upload


def _file(session: Session, upload: Upload) -> File | None:
    return session.scalar(select(File).where(File.id == upload.file_id, File.deleted_at.is_(None)))


def _beyond_announced(session: Session, upload: Upload, size: int, most_parts: int) -> int:
    """Bytes by which a part increases the excess over the announced size.

    A part that is sent again after a lost response is stored twice, so up to twice the announced size is accepted.
    """
    sums = select(func.count(), func.coalesce(func.sum(UploadPart.bytes), 0))
    count, total = session.execute(sums.where(UploadPart.upload_id == upload.id)).one()
    if count >= most_parts:
        raise InvalidRequest(f"The upload already has {most_parts} parts. Use larger ones.", param="data")
    total = int(total)
    if total + size > 2 * upload.bytes:
        raise InvalidRequest(
            f"The upload was announced with {upload.bytes} bytes, and has received {total} already.",
            param="data",
        )
    return max(0, total + size - max(upload.bytes, total))


def _chosen(session: Session, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
    """The parts in the requested order; their total size is the announced one."""
    twice = [part_id for part_id, count in Counter(part_ids).items() if count > 1]
    if twice:
        raise InvalidRequest(f"The part '{twice[0]}' is listed twice.", param="part_ids")
    theirs = session.scalars(select(UploadPart).where(UploadPart.upload_id == upload.id))
    known = {part.id: part for part in theirs}
    missing = next((one for one in part_ids if one not in known), None)
    if missing is not None:
        raise InvalidRequest(f"Upload {upload.id} has no part '{missing}'.", param="part_ids")
    parts = [known[one] for one in part_ids]
    total = sum(part.bytes for part in parts)
    if total != upload.bytes:
        raise InvalidRequest(
            f"The parts have {total} bytes, but the upload was announced with {upload.bytes}.",
            param="part_ids",
        )
    return parts


def _head(blobs: BlobStore, parts: Sequence[UploadPart]) -> bytes:
    """The first bytes of all parts, by which the format of the file is recognized."""
    head = bytearray()
    for part in parts:
        for chunk in blobs.open(part.blob_key):
            head += chunk
            if len(head) >= HEAD_BYTES:
                return bytes(head[:HEAD_BYTES])
    return bytes(head)


def _joined(
    blobs: BlobStore, upload: Upload, parts: Sequence[UploadPart], md5: str | None
) -> Iterator[bytes]:
    """The bytes of all parts. Errors are raised after the last one, so that nothing is stored."""
    meter = hashlib.md5(usedforsecurity=False)
    size = 0
    for part in parts:
        for chunk in blobs.open(part.blob_key):
            meter.update(chunk)
            size += len(chunk)
            yield chunk
    if size != upload.bytes:
        raise BlobCorrupt(f"The parts of {upload.id} have {size} bytes in the store, expected {upload.bytes}")
    if md5 is not None and md5.lower() != meter.hexdigest():
        raise InvalidRequest(
            f"The MD5 of the parts in this order is {meter.hexdigest()}, not {md5}.", param="md5"
        )
