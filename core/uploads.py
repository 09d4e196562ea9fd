"""Files that arrive in parts, as OpenAI's Uploads API has them.

    pending ──> completed     its parts are one file now
            ├─> cancelled
            └─> expired       nobody completed it in time

A part is a blob of its own. Completing streams them into the file's blob, and makes the file visible in the same
transaction that completes the upload. Parts of an upload that is no longer pending serve nobody: they are deleted
after the commit, and by the reconciler if the process dies before that.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.orm import Session

from core import files, tenants
from core.audit import OPERATOR, Actor
from core.blobs import BlobCorrupt, BlobNotFound, BlobStore
from core.db import Database, Work
from core.errors import InvalidRequest, PayloadTooLarge, UploadNotFound
from core.ids import new_id
from core.limits import NO_LIMITS, Limits
from core.models import File, Upload, UploadPart, now

LIFETIME = 3600
# Completing a large upload takes a while; it does not expire under the hands of who completes it.
COMPLETION_SECONDS = 1800
MOST_PART_BYTES = 64 << 20
MOST_PARTS = 10_000
MOST_PENDING = 100  # of one project


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
    most_pending: int = MOST_PENDING,
) -> Upload:
    """A pending upload that will have `size` bytes in all; its file lives for `file_expires_after` seconds.

    Raises:
        QuotaExceeded: there would be no room for it, or the project has `most_pending` of them already.
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
    """The project's upload, or UploadNotFound; another project's does not exist either."""
    return _found(session.scalar(_the(project_id, upload_id)), upload_id)


class PartWriter:
    """One part on its way, stored as it arrives. Any number may arrive at the same time.

    Raises:
        UploadNotFound: the project has no such upload.
        InvalidRequest: the upload takes no more.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        project_id: str,
        upload_id: str,
        *,
        limits: Limits = NO_LIMITS,
    ) -> None:
        with database.read() as session:  # before 64 MB arrive for nothing
            upload = get(session, project_id, upload_id)
            check_open(upload)
        self._database, self._blobs, self._limits = database, blobs, limits
        self._project_id, self._upload_id, self._announced = project_id, upload_id, upload.bytes
        self._id = new_id("part_")
        self._blob_key = f"projects/{project_id}/uploads/{upload_id}/{self._id}"
        self._writer = blobs.writer(self._blob_key)
        self._received = 0
        self._kept = False

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            PayloadTooLarge: a part has no more than MOST_PART_BYTES.
            InvalidRequest: it is larger than the whole upload was announced to be.
        """
        self._received += len(data)
        if self._received > MOST_PART_BYTES:
            message = f"The data is larger than the maximum of {MOST_PART_BYTES} bytes."
            raise PayloadTooLarge(message, param="data")
        if self._received > self._announced:
            message = f"The upload was announced with {self._announced} bytes, and this part has more."
            raise InvalidRequest(message, param="data")
        self._writer.write(data)

    def commit(self) -> UploadPart:
        """The part, which belongs to the upload from now on.

        Raises:
            InvalidRequest: it is empty, or the upload takes no more.
            QuotaExceeded: the upload has received more than it announced, for which there is no room.
        """
        if self._received == 0:
            raise InvalidRequest("The part is empty.", param="data")
        size = self._writer.commit().size
        with self._database.write() as session:
            # It may have ended while the part arrived.
            upload = _locked(session, self._project_id, self._upload_id)
            check_open(upload)
            beyond = _beyond_announced(session, upload, size)
            if beyond:
                tenants.refuse_file_beyond(session, self._project_id, self._limits, beyond)
            part = UploadPart(id=self._id, upload_id=upload.id, bytes=size, blob_key=self._blob_key)
            session.add(part)
        self._kept = True
        return part

    def abort(self) -> None:
        """Leave nothing behind; after `commit` without effect."""
        if not self._kept:
            self._writer.abort()
            self._blobs.delete(self._blob_key)


def check_open(upload: Upload) -> None:
    """InvalidRequest unless the upload still takes parts and can be completed."""
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
    """Put the parts together, in this order. Completing once more, even at the same time, gives the same answer.

    The file is None only if it was deleted since.

    Raises:
        UploadNotFound: the project has no such upload.
        InvalidRequest: the upload cannot be completed, or not with these parts. It stays as it was.
        QuotaExceeded: the project's limit was lowered since the upload was announced. It stays, too.
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
        stored = blobs.put_stream(blob_key, _joined(blobs, upload, parts, md5))
        with database.write() as session:
            upload = _locked(session, project_id, upload_id)
            if upload.status == "pending":
                created_at = now()
                lifetime = upload.file_expires_after
                file = File(
                    id=file_id,
                    project_id=project_id,
                    filename=upload.filename,
                    purpose=upload.purpose,
                    bytes=stored.size,
                    sha256=stored.sha256,
                    blob_key=blob_key,
                    created_at=created_at,
                    expires_at=None if lifetime is None else created_at + lifetime,
                )
                upload.status, upload.file_id = "completed", file_id
                session.flush()  # what was announced counts no more, and what has come counts instead
                tenants.refuse_file_beyond(session, project_id, limits, file.bytes)
                files.add(Work(session, actor), file)
                return upload, file
            if upload.status != "completed":
                check_open(upload)
            first = _file(session, upload)  # somebody else was faster
    except BlobNotFound:
        # Its parts went while they were read: it was completed or cancelled meanwhile.
        with database.read() as session:
            upload = get(session, project_id, upload_id)
            if upload.status == "completed":
                return upload, _file(session, upload)
        check_open(upload)
        raise
    except BaseException:
        blobs.delete(blob_key)
        raise
    blobs.delete(blob_key)
    return upload, first


def cancel(work: Work, project_id: str, upload_id: str) -> Upload:
    """No file will come of it. A second cancel changes nothing."""
    upload = _locked(work.session, project_id, upload_id)
    if upload.status != "cancelled":
        check_open(upload)
        upload.status = "cancelled"
        work.record("upload.cancelled", upload.id)
    return upload


def expire(session: Session) -> int:
    """Close the uploads that nobody completed in time. Returns how many there were."""
    late = (
        update(Upload)
        .where(Upload.status == "pending", Upload.expires_at <= now())
        .values(status="expired")
        .returning(Upload.seq)
        .execution_options(synchronize_session=False)
    )
    return len(session.scalars(late).all())


def discard_parts(database: Database, blobs: BlobStore, *, upload_id: str | None = None) -> int:
    """Delete parts of uploads that ended, of one or of all: contents first, for the rows are how they are found.

    Returns how many, 1000 at most.
    """
    ended = (
        select(UploadPart).join(Upload, Upload.id == UploadPart.upload_id).where(Upload.status != "pending")
    )
    if upload_id is not None:
        ended = ended.where(UploadPart.upload_id == upload_id)
    with database.read() as session:
        parts = session.scalars(ended.limit(1000)).all()
    if parts:
        blobs.delete_many([part.blob_key for part in parts])
        with database.write() as session:
            session.execute(delete(UploadPart).where(UploadPart.seq.in_([part.seq for part in parts])))
    return len(parts)


def _the(project_id: str, upload_id: str) -> Select[Upload]:
    return select(Upload).where(Upload.id == upload_id, Upload.project_id == project_id)


def _locked(session: Session, project_id: str, upload_id: str) -> Upload:
    """Held until the commit, so that it ends once, and takes no part after that."""
    return _found(session.scalar(_the(project_id, upload_id).with_for_update()), upload_id)


def _found(upload: Upload | None, upload_id: str) -> Upload:
    if upload is None:
        raise UploadNotFound(upload_id)
    return upload


def _file(session: Session, upload: Upload) -> File | None:
    return session.scalar(select(File).where(File.id == upload.file_id, File.deleted_at.is_(None)))


def _beyond_announced(session: Session, upload: Upload, size: int) -> int:
    """By how many bytes one more part takes the upload further beyond what it announced.

    A part that is sent again after a lost answer is there twice, so all of them may be: but no more than that.
    """
    sums = select(func.count(), func.coalesce(func.sum(UploadPart.bytes), 0))
    count, total = session.execute(sums.where(UploadPart.upload_id == upload.id)).one()
    if count >= MOST_PARTS:
        raise InvalidRequest(f"The upload has {MOST_PARTS} parts already. Use larger ones.", param="data")
    total = int(total)
    if total + size > 2 * upload.bytes:
        raise InvalidRequest(
            f"The upload was announced with {upload.bytes} bytes, and has received {total} already.",
            param="data",
        )
    return max(0, total + size - max(upload.bytes, total))


def _chosen(session: Session, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
    """The parts in the order asked for; together they have the size that was announced."""
    twice = [part_id for part_id, count in Counter(part_ids).items() if count > 1]
    if twice:
        raise InvalidRequest(f"The part '{twice[0]}' is named twice.", param="part_ids")
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


def _joined(
    blobs: BlobStore, upload: Upload, parts: Sequence[UploadPart], md5: str | None
) -> Iterator[bytes]:
    """The bytes of all parts. What is wrong with them is raised behind the last, so that nothing is stored."""
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
