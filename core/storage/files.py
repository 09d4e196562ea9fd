"""Rows of uploaded files and results; their content is in the blob store under `blob_key`."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Database, Work
from core.database.ids import new_id
from core.database.pages import Page
from core.database.states import EVAL_RUN, JOB
from core.database.tables import EvalRun, File, Job, now
from core.errors import FileNotFound, InvalidRequest
from core.storage import datasets
from core.storage.datasets import Example, InvalidDataset, RowForm
from core.storage.foreign_files import EMPTY, container_of, for_rows_of
from core.storage.store import (
    CHUNK_BYTES,
    BlobCorrupt,
    BlobInfo,
    BlobNotFound,
    BlobStore,
    check_not_empty,
    is_bad_sector,
)

LAST_SECONDS = 3600  # a file that expires sooner does not share its blob
FINE_TUNE, RESULTS = "fine-tune", "fine-tune-results"
EMPTY_FILE = "The file is empty."
JSONL_PURPOSES = frozenset({FINE_TUNE, "evals", "batch"})  # of uploads whose lines are JSON objects


def get(session: Session, project_id: str, file_id: str) -> File:
    """Return the project's file, or raise FileNotFound, also for deleted, expired and other projects' files."""
    file = session.scalar(select(File).where(File.id == file_id, _readable(project_id)))
    if file is None:
        raise FileNotFound(file_id)
    return file


def get_dataset(session: Session, project_id: str, file_id: str, *, param: str) -> File:
    """Return the file that `param` names if it is training data; otherwise raise InvalidRequest."""
    try:
        file = get(session, project_id, file_id)
    except FileNotFound as missing:
        # 400, not 404: the URL was valid, a field of the body was not.
        raise InvalidRequest(missing.message, param=param) from None
    if file.purpose != FINE_TUNE:
        message = f"The file {file_id} has purpose '{file.purpose}', but must have '{FINE_TUNE}'."
        raise InvalidRequest(message, param=param)
    return file


def refuse_foreign(purpose: str, filename: str, head: bytes) -> None:
    """Reject a file of rows or requests that no job, eval or batch could read.

    Args:
        head: the first bytes of the file, at least foreign_files.HEAD_BYTES of a longer one.

    Raises:
        InvalidRequest: the file is empty or not JSONL; the message names its format and what to do.
    """
    foreign = container_of(head, filename) if purpose in JSONL_PURPOSES else None
    if foreign is EMPTY:
        raise InvalidRequest(EMPTY_FILE, param="file")
    if foreign is not None:
        rows = purpose == FINE_TUNE
        message = (
            f"{filename} is not a dataset: {for_rows_of(foreign, head, filename).sentence()}"
            if rows
            else f"{filename} is not JSONL: {foreign.seen}; {foreign.remedy}."
        )
        raise InvalidRequest(message, param="file", code="invalid_file_format")


MISSING, DAMAGED = "are missing", "are damaged"
USE_ANOTHER = "Upload the file again and create the job with the new one."
RESTORE = "Upload the file again, or ask the operator of the service to restore it from a backup."
RESTORE_RESULTS = "Ask the operator of the service to restore it from a backup."


class FileDamaged(Exception):
    """The content of a file is missing or does not match its hash. The message is for users."""

    def __init__(self, file: File, problem: str, remedy: str = USE_ANOTHER) -> None:
        """`problem` is MISSING or DAMAGED, `remedy` a sentence with the user's options."""
        super().__init__(
            f"The contents of the file {file.id} ({file.filename}) {problem} in the service's store. {remedy}"
        )


def read_rows(
    blobs: BlobStore,
    file: File,
    *,
    form: RowForm | None = None,
    check: Callable[[Example], Iterable[str]] | None = None,
    max_rows: int | None = None,
) -> list[Example]:
    """Read the rows of a file and verify its hash; the other arguments are those of `datasets.read_examples`.

    Raises:
        FileDamaged: the content is missing or does not match its hash.
        StoreEmpty: the content is missing, and the whole store is empty.
        InvalidDataset: the content is intact, but its rows are invalid.
    """
    try:
        meter = hashlib.sha256()
        try:
            rows = datasets.read_examples(
                _metered(blobs.open(file.blob_key), meter), form=form, check=check, max_rows=max_rows
            )
        except InvalidDataset:
            # Damage may look like an invalid row, which ends the reading early.
            meter = hashlib.sha256()
            for _ in _metered(blobs.open(file.blob_key), meter):
                pass
            if meter.hexdigest() == file.sha256:
                raise
    except BlobNotFound:
        check_not_empty(blobs)
        raise FileDamaged(file, MISSING) from None
    except BlobCorrupt:
        raise FileDamaged(file, DAMAGED) from None
    if meter.hexdigest() != file.sha256:
        raise FileDamaged(file, DAMAGED)
    return rows


def _metered(chunks: Iterator[bytes], meter: Any) -> Iterator[bytes]:
    for chunk in chunks:
        meter.update(chunk)
        yield chunk


def read_content(blobs: BlobStore, file: File) -> Iterator[bytes]:
    """Read the content of a file for a download, in chunks, and verify its size and hash on the way.

    The last chunk is yielded only if both match, so a damaged file is never read to its end. A file of at most
    CHUNK_BYTES is one chunk.

    Raises:
        BlobNotFound: with this call, if the blob is missing.
        FileDamaged: with next(); for a file of one chunk with the first one.
    """
    return _verified(file, blobs.open(file.blob_key))


def content_damaged(file: File, problem: str) -> FileDamaged:
    """The error for a download; `problem` is MISSING or DAMAGED."""
    return FileDamaged(file, problem, RESTORE_RESULTS if file.purpose == RESULTS else RESTORE)


def _verified(file: File, chunks: Iterator[bytes]) -> Iterator[bytes]:
    meter, size, held = hashlib.sha256(), 0, b""
    try:
        for chunk in chunks:
            meter.update(chunk)
            size += len(chunk)
            if size > file.bytes:
                break
            if size <= CHUNK_BYTES:
                held += chunk  # a store may yield less than a whole chunk at a time
            else:
                yield held
                held = chunk
    except BlobCorrupt:
        raise content_damaged(file, DAMAGED) from None
    except OSError as cause:
        if not is_bad_sector(cause):
            raise
        raise content_damaged(file, DAMAGED) from cause
    if (size, meter.hexdigest()) != (file.bytes, file.sha256):
        raise content_damaged(file, DAMAGED)
    yield held


def refuse_lost_store(session: Session, blobs: BlobStore) -> None:
    """Refuse to write into a store that has lost its blobs: a folder that is not mounted, or another bucket.

    Its first new blob would make all others look deleted.

    Raises:
        StoreEmpty: there are files, and the store has no blobs.
    """
    valid = or_(File.expires_at.is_(None), File.expires_at > now())
    if session.scalar(select(File.seq).where(File.deleted_at.is_(None), valid).limit(1)) is not None:
        check_not_empty(blobs)


def page(
    session: Session,
    project_id: str,
    *,
    purpose: str | None = None,
    newest_first: bool = True,
    after: str | None = None,
    limit: int,
) -> Page[File]:
    statement = select(File).where(_readable(project_id))
    if purpose is not None:
        statement = statement.where(File.purpose == purpose)
    read = pages.newest_first if newest_first else pages.oldest_first
    # Deleted and expired files stay valid cursors.
    cursors = select(File).where(File.project_id == project_id)
    return read(session, statement, File, after=after, limit=limit, cursors=cursors, owner=project_id)


def put(
    blobs: BlobStore,
    project_id: str,
    filename: str,
    lines: Iterable[bytes],
    *,
    purpose: str = FINE_TUNE,
    expires_at: int | None = None,
) -> File:
    """Store the content of a file that the service makes, and return its row for `add`."""
    file_id = new_id("file-", 22)
    key = f"projects/{project_id}/files/{file_id}"
    info = blobs.put_stream(key, lines)
    return File(
        id=file_id,
        project_id=project_id,
        filename=filename[-512:],
        purpose=purpose,
        bytes=info.size,
        sha256=info.sha256,
        blob_key=key,
        expires_at=expires_at,
    )


def intact_twin(database: Database, blobs: BlobStore, project_id: str, content: BlobInfo) -> File | None:
    """A file of the project with the same content, whose blob is whole. Reads the blob."""
    same = (File.project_id == project_id) & (File.sha256 == content.sha256) & (File.bytes == content.size)
    with database.read() as session:
        twin = session.scalar(select(File).where(same, _lasting()).order_by(File.seq).limit(1))
    if twin is None:
        return None
    try:
        for _ in read_content(blobs, twin):
            pass
    except (BlobNotFound, FileDamaged):
        return None  # the new content replaces it
    return twin


def share(session: Session, file: File, twin: File | None) -> bool:
    """Let a new file have the blob of `twin`, in the transaction that adds it. Returns False if there is none by now.

    The lock makes a deletion of the twin wait, after which the reconciler finds the new row and keeps the blob.
    """
    if twin is None:
        return False
    row = session.scalar(select(File).where(File.seq == twin.seq, _lasting()).with_for_update())
    if row is None:
        return False
    file.blob_key = row.blob_key
    return True


def is_shared(session: Session, file: File) -> bool:
    """Whether another row has the blob of this file, deleted ones included."""
    same = (File.project_id == file.project_id) & (File.sha256 == file.sha256)
    other = select(File.seq).where(same, File.blob_key == file.blob_key, File.seq != file.seq)
    return session.scalar(other.limit(1)) is not None


def _lasting() -> ColumnElement[bool]:
    """True for files that are not deleted, and do not expire while another one is being added."""
    return File.deleted_at.is_(None) & or_(File.expires_at.is_(None), File.expires_at > now() + LAST_SECONDS)


def add(work: Work, file: File) -> None:
    """Add a file whose content is stored, after all files in the project's list."""
    pages.keep_order(work.session, file.project_id)
    work.session.add(file)
    work.session.flush()
    work.record("file.created", file.id, {"filename": file.filename, "bytes": file.bytes})


def delete(work: Work, project_id: str, file_id: str) -> None:
    """Hide the file at once; the reconciler deletes row and blob when no unfinished job needs them."""
    get(work.session, project_id, file_id).deleted_at = now()
    work.record("file.deleted", file_id)


def in_use() -> ColumnElement[bool]:
    """True for a row of `files` that an unfinished job or eval run reads."""
    reads = (Job.training_file == File.id) | (Job.validation_file == File.id)
    by_job = select(Job.seq).where(Job.status.in_(JOB.unfinished), reads).exists()
    of_run = EvalRun.file_id == File.id
    return by_job | select(EvalRun.seq).where(EvalRun.status.in_(EVAL_RUN.unfinished), of_run).exists()


def _readable(project_id: str) -> ColumnElement[bool]:
    fresh = or_(File.expires_at.is_(None), File.expires_at > now())
    return (File.project_id == project_id) & File.deleted_at.is_(None) & fresh
