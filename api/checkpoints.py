"""/v1/regraft/jobs/{id}/checkpoints: what training has made, to take home."""

import json
import tarfile
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from api.deps import CurrentProject, Parts, ReadSession
from core import jobs, tuned
from core.blobs import BlobNotFound, BlobStore
from core.errors import CheckpointNotFound

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

MANIFEST = "manifest.json"
# Optimizer and random state: of use to a run that goes on, twice as large as the adapter, and nobody else's business.
NOT_TAKEN_HOME = frozenset({"trainer.pt"})
BLOCK = tarfile.BLOCKSIZE


@router.get("/{job_id}/checkpoints/{checkpoint_id}/download", response_class=StreamingResponse)
def download_checkpoint(
    job_id: str, checkpoint_id: str, project: CurrentProject, session: ReadSession, service: Parts
) -> StreamingResponse:
    """The adapter in PEFT's format as a tar, its manifest with every file's sha256 first."""
    job = jobs.get(session, project.id, job_id)
    checkpoint = tuned.checkpoint(session, job, checkpoint_id)
    try:
        manifest = json.loads(service.blobs.read(f"{checkpoint.blob_prefix}/{MANIFEST}"))
    except BlobNotFound:  # replaced by a better one since the row was read
        raise CheckpointNotFound(job.id, checkpoint.id) from None
    manifest["files"] = [file for file in manifest["files"] if file["name"] not in NOT_TAKEN_HOME]
    headers = {
        "content-length": str(_tar_bytes(manifest)),
        "content-disposition": f'attachment; filename="{job.id}-step-{checkpoint.step}.tar"',
    }
    chunks = _tar(service.blobs, checkpoint.blob_prefix, manifest)
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)


def _tar(blobs: BlobStore, prefix: str, manifest: dict[str, Any]) -> Iterator[bytes]:
    """As `tar` makes it, never more than a chunk in memory. A blob that goes meanwhile cuts the connection."""
    shown = _shown(manifest)
    yield _header(MANIFEST, len(shown)) + shown + _padding(len(shown))
    for file in manifest["files"]:
        yield _header(file["name"], file["bytes"])
        yield from blobs.open(f"{prefix}/{file['name']}")
        yield _padding(file["bytes"])
    yield bytes(2 * BLOCK)


def _tar_bytes(manifest: dict[str, Any]) -> int:
    sizes = {MANIFEST: len(_shown(manifest))} | {file["name"]: file["bytes"] for file in manifest["files"]}
    length: int = sum(len(_header(name, size)) + size + len(_padding(size)) for name, size in sizes.items())
    return length + 2 * BLOCK


def _shown(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2).encode()


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)
