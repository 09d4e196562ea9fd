"""Blobs without a row: leftovers of attempts that lost their job, and of killed processes.

A blob is always written before its row, so a crash leaves an unused blob and never a row without one. The sweep deletes
blobs that are too old to still get a row.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.engine import Database
from core.database.states import JOB
from core.database.tables import Attempt, Checkpoint, EvalPage, File, Job, RolloutPage, UploadPart
from core.storage.store import BlobEntry, BlobStore, batched

ROOT = "projects/"
BATCH_SIZE = 500

_OF_FILE = re.compile(r"projects/[^/]+/files/(?P<id>[^/]+)")
_OF_PART = re.compile(r"projects/[^/]+/uploads/[^/]+/(?P<id>[^/]+)")
_OF_LOG = re.compile(r"projects/[^/]+/jobs/(?P<job>[^/]+)/attempts/(?P<epoch>\d+)/log\.txt")
_OF_ATTEMPT = re.compile(r"projects/[^/]+/jobs/(?P<attempt>(?P<job>[^/]+)/attempts/\d+)/")


def find(
    database: Database, blobs: BlobStore, *, older_than: float, batch_size: int = BATCH_SIZE
) -> Iterator[list[BlobEntry]]:
    """Yield batches (possibly empty) of the orphans last written before this Unix time.

    `batch_size`: blobs per comparison with the rows.

    Rows are read after the listing of the blobs, so a blob whose row was added in between is excluded. So is the
    attempt that now holds its job, regardless of age: its rows may still be written.
    """
    old = (entry for entry in blobs.entries(ROOT) if entry.modified < older_than)
    for batch in batched(old, batch_size):
        yield _without_row(database, batch)


def _without_row(database: Database, batch: Sequence[BlobEntry]) -> list[BlobEntry]:
    with database.read() as session:
        explained = _explained(session, [entry.key for entry in batch])
        left = [entry for entry in batch if entry.key not in explained]
        # These columns have no index, so only blobs that the ids do not explain are compared with them. Still required:
        # a
        # blob with a row is never an orphan, whatever its key.
        names = {name for entry in left for name in _names(entry.key)}
        columns = (
            File.blob_key,
            UploadPart.blob_key,
            RolloutPage.blob_key,
            Checkpoint.blob_prefix,
            EvalPage.blob_key,
        )
        named = {key for column in columns if names for key in session.scalars(_among(column, names))}
    return [entry for entry in left if not _names(entry.key) & named]


def _explained(session: Session, keys: Sequence[str]) -> set[str]:
    """The keys whose row, found by the id in the key, exists or may still be written."""
    files = {match["id"] for key in keys if (match := _OF_FILE.fullmatch(key))}
    parts = {match["id"] for key in keys if (match := _OF_PART.fullmatch(key))}
    attempts = {key: match for key in keys if (match := _OF_ATTEMPT.match(key))}
    jobs = {match["job"] for match in attempts.values()}
    turns = session.execute(select(Attempt.job_id, Attempt.epoch).where(Attempt.job_id.in_(jobs))).all()
    ended = {(job_id, str(epoch)) for job_id, epoch in turns}
    held = session.execute(select(Job.id, Job.epoch).where(Job.id.in_(jobs), Job.status.in_(JOB.leased)))
    at_work = {f"{job_id}/attempts/{epoch}" for job_id, epoch in held}
    known = {
        *session.scalars(select(File.blob_key).where(File.id.in_(files))),
        *session.scalars(select(UploadPart.blob_key).where(UploadPart.id.in_(parts))),
        *session.scalars(_among(RolloutPage.blob_key, keys).where(RolloutPage.job_id.in_(jobs))),
        *session.scalars(select(Checkpoint.blob_prefix).where(Checkpoint.job_id.in_(jobs))),
    }
    busy = {key for key, match in attempts.items() if match["attempt"] in at_work}
    busy |= {
        key for key in keys if (match := _OF_LOG.fullmatch(key)) and (match["job"], match["epoch"]) in ended
    }
    return busy | {key for key in keys if _names(key) & known}


def _among(column: InstrumentedAttribute[str], names: Collection[str]) -> Select[str]:
    return select(column).where(column.in_(names))


def _names(key: str) -> set[str]:
    """The values by which a row may refer to this blob: its key, or one of its folders."""
    segments = key.split("/")
    return {"/".join(segments[:count]) for count in range(1, len(segments) + 1)}
