"""Verifies every blob with a row against its hash, and lists the blobs without a row."""

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import or_, select

from core.database.engine import Database
from core.database.tables import Checkpoint, EvalPage, File, RolloutPage, UploadPart, now
from core.storage import manifests, orphans
from core.storage.manifests import Damaged
from core.storage.store import BlobCorrupt, BlobNotFound, BlobStore, check_not_empty, is_bad_sector

Problem = Literal["missing", "damaged", "orphaned"]


@dataclass(frozen=True)
class StorageProblem:
    """`owner` is the id of the file, checkpoint or upload part, or the job or eval run of a page; "" for an orphan."""

    problem: Problem
    owner: str
    key: str


@dataclass(frozen=True)
class _Expected:
    """The expected size and hash of a blob. Without a hash only the size is compared."""

    owner: str
    key: str
    size: int
    sha256: str | None = None


def check(database: Database, blobs: BlobStore, *, orphans_older_than: float) -> Iterator[StorageProblem]:
    """Yield every finding after reading all blobs. Safe while the service runs: rows deleted meanwhile are ignored.

    Args:
        orphans_older_than: Unix time; younger blobs may still get a row.
    """
    yield from damaged(database, blobs)
    for batch in orphans.find(database, blobs, older_than=orphans_older_than):
        for entry in batch:
            yield StorageProblem("orphaned", "", entry.key)


def damaged(database: Database, blobs: BlobStore) -> Iterator[StorageProblem]:
    """Yield the blobs of rows that are missing or do not match their hash.

    Raises:
        StoreEmpty: the store has no blobs at all, so it is the wrong store rather than a damaged one.
    """
    with database.read() as session:
        checkpoints = session.scalars(select(Checkpoint).order_by(Checkpoint.seq)).all()
    of_rows = [(row, problem) for row in _of_rows(database) if (problem := _last(_compare(blobs, row)))]
    of_checkpoints = [(one.seq, found) for one in checkpoints for found in of_checkpoint(blobs, one) if found]
    if any(problem == "missing" for _, problem in of_rows) or any(
        found.problem == "missing" for _, found in of_checkpoints
    ):
        check_not_empty(blobs)
    # Rows are read again after all blobs, to ignore those deleted meanwhile.
    if of_rows:
        still = set(_of_rows(database))
        yield from (StorageProblem(problem, row.owner, row.key) for row, problem in of_rows if row in still)
    if of_checkpoints:
        with database.read() as session:
            present = set(session.scalars(select(Checkpoint.seq)))
        yield from (found for seq, found in of_checkpoints if seq in present)


def of_file(blobs: BlobStore, file: File) -> Iterator[StorageProblem | None]:
    """Verify the content of a file. Yields None after each chunk, so that the caller can pause."""
    problem = yield from _compare(blobs, _contents(file))
    if problem is not None:
        yield StorageProblem(problem, file.id, file.blob_key)


def of_checkpoint(blobs: BlobStore, checkpoint: Checkpoint) -> Iterator[StorageProblem | None]:
    """Verify the objects of a checkpoint. Yields None after each chunk, so that the caller can pause."""
    prefix = checkpoint.blob_prefix
    try:
        manifest = manifests.read(blobs, prefix)
    except Damaged as damage:
        yield StorageProblem(
            "missing" if damage.problem == "missing" else "damaged", checkpoint.id, f"{prefix}/{damage.file}"
        )
        return
    for file in manifest.files:
        expected = _Expected(checkpoint.id, f"{prefix}/{file.name}", file.bytes, file.sha256)
        problem = yield from _compare(blobs, expected)
        if problem is not None:
            yield StorageProblem(problem, checkpoint.id, expected.key)


def _of_rows(database: Database) -> list[_Expected]:
    with database.read() as session:
        # Skip expired files: the reconciler deletes their content first.
        valid = or_(File.expires_at.is_(None), File.expires_at > now())
        files = session.scalars(select(File).where(File.deleted_at.is_(None), valid).order_by(File.seq))
        expected = [_contents(one) for one in files]
        parts = session.scalars(select(UploadPart).order_by(UploadPart.seq))
        expected += [_Expected(one.id, one.blob_key, one.bytes) for one in parts]
        for page in session.scalars(select(RolloutPage)):
            owner = f"{page.job_id} step {page.step} {page.split}"
            expected.append(_Expected(owner, page.blob_key, page.bytes))
        for part in session.scalars(select(EvalPage)):
            owner = f"{part.run_id} page {part.number}"
            expected.append(_Expected(owner, part.blob_key, part.bytes, part.sha256))
    return expected


def _contents(file: File) -> _Expected:
    return _Expected(file.id, file.blob_key, file.bytes, file.sha256)


def _compare(blobs: BlobStore, expected: _Expected) -> Generator[None, None, Problem | None]:
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in blobs.open(expected.key):
            digest.update(chunk)
            size += len(chunk)
            yield
    except BlobNotFound:
        return "missing"
    except (BlobCorrupt, ValueError):
        return "damaged"
    except OSError as cause:
        if not is_bad_sector(cause):
            raise
        return "damaged"
    if expected.sha256 is not None:
        return None if digest.hexdigest() == expected.sha256 else "damaged"
    return None if expected.size == size else "damaged"


def _last(comparison: Generator[None, None, Problem | None]) -> Problem | None:
    while True:
        try:
            next(comparison)
        except StopIteration as end:
            problem: Problem | None = end.value
            return problem
