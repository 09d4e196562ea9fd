"""Pages of rollouts as workers store them, of samples that name only what a test is about."""

from collections.abc import Sequence
from typing import Any

from core.database.tables import RolloutPage
from core.results import rollouts
from core.results.rollouts import Row
from core.storage.store import BlobStore


def sample(group: int, member: int, **fields: Any) -> Row:
    """A sample of a group; most columns that are not named are null."""
    known = {"group": group, "member": member, "sub_scores": {}, "has_tokens": False}
    return dict.fromkeys(rollouts.SCHEMA.names) | known | fields


def store_page(
    blobs: BlobStore, job_id: str, step: int, split: str, samples: Sequence[Row], total: int | None = None
) -> RolloutPage:
    """Store the samples, and return the page for the database. `total`: as if there had been more."""
    rows = [dict(one) | {"step": step, "split": split} for one in samples]
    data = rollouts.encode(rows, total or len(rows))
    info = blobs.put_bytes(f"projects/p/jobs/{job_id}/{split}-{step:06d}.parquet", data)
    return RolloutPage(
        job_id=job_id,
        step=step,
        split=split,
        epoch=1,
        blob_key=info.key,
        samples=len(rows),
        total=total or len(rows),
        bytes=info.size,
    )
