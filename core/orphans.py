"""Blobs that no row refers to: what attempts that lost their job, and processes that died, have left behind.

A blob is always written before its row, so every crash leaves litter and never a row without its blob. The other
side of that is the sweep, which deletes what is old enough that no row will come any more.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.blobs import BlobEntry, BlobStore, batched
from core.db import Database
from core.jobs import HELD
from core.models import Attempt, Checkpoint, File, Job, RolloutPage, UploadPart

ROOT = "projects/"
# Blobs that are compared with the rows at a time.
BATCH = 500

_OF_FILE = re.compile(r"projects/[^/]+/files/(?P<id>[^/]+)")
_OF_PART = re.compile(r"projects/[^/]+/uploads/[^/]+/(?P<id>[^/]+)")
_OF_LOG = re.compile(r"projects/[^/]+/jobs/(?P<job>[^/]+)/attempts/(?P<epoch>\d+)/log\.txt")
_OF_ATTEMPT = re.compile(r"projects/[^/]+/jobs/(?P<attempt>(?P<job>[^/]+)/attempts/\d+)/")


def find(database: Database, blobs: BlobStore, *, older_than: float) -> Iterator[list[BlobEntry]]:
    """The orphans that were last written before this Unix time, some of them (or none) at a time.

    Rows are read after the blobs were listed: what got its row in between is not among them. Nor is what lies under
    the attempt that now holds its job, however old: its row may still come.
    """
    old = (entry for entry in blobs.entries(ROOT) if entry.modified < older_than)
    for batch in batched(old, BATCH):
        yield _without_row(database, batch)


def _without_row(database: Database, batch: Sequence[BlobEntry]) -> list[BlobEntry]:
    with database.read() as session:
        explained = _explained(session, [entry.key for entry in batch])
        left = [entry for entry in batch if entry.key not in explained]
        # There is no index on these columns. So only what the ids do not explain is looked for like this; but without
        # it nothing is an orphan, whatever its key looks like.
        names = {name for entry in left for name in _names(entry.key)}
        columns = (File.blob_key, UploadPart.blob_key, RolloutPage.blob_key, Checkpoint.blob_prefix)
        named = {key for column in columns if names for key in session.scalars(_among(column, names))}
    return [entry for entry in left if not _names(entry.key) & named]


def _explained(session: Session, keys: Sequence[str]) -> set[str]:
    """Those of the keys whose row, found by the id that the key holds, is there or may still come."""
    files = {found["id"] for key in keys if (found := _OF_FILE.fullmatch(key))}
    parts = {found["id"] for key in keys if (found := _OF_PART.fullmatch(key))}
    attempts = {key: found for key in keys if (found := _OF_ATTEMPT.match(key))}
    jobs = {found["job"] for found in attempts.values()}
    turns = session.execute(select(Attempt.job_id, Attempt.epoch).where(Attempt.job_id.in_(jobs))).all()
    ended = {(job_id, str(epoch)) for job_id, epoch in turns}
    held = session.execute(select(Job.id, Job.epoch).where(Job.id.in_(jobs), Job.status.in_(HELD)))
    at_work = {f"{job_id}/attempts/{epoch}" for job_id, epoch in held}
    known = {
        *session.scalars(select(File.blob_key).where(File.id.in_(files))),
        *session.scalars(select(UploadPart.blob_key).where(UploadPart.id.in_(parts))),
        *session.scalars(_among(RolloutPage.blob_key, keys).where(RolloutPage.job_id.in_(jobs))),
        *session.scalars(select(Checkpoint.blob_prefix).where(Checkpoint.job_id.in_(jobs))),
    }
    busy = {key for key, found in attempts.items() if found["attempt"] in at_work}
    busy |= {
        key for key in keys if (found := _OF_LOG.fullmatch(key)) and (found["job"], found["epoch"]) in ended
    }
    return busy | {key for key in keys if _names(key) & known}


def _among(column: InstrumentedAttribute[str], names: Collection[str]) -> Select[str]:
    return select(column).where(column.in_(names))


def _names(key: str) -> set[str]:
    """What a row may call this blob: its key, or a folder that it lies in."""
    segments = key.split("/")
    return {"/".join(segments[:count]) for count in range(1, len(segments) + 1)}
