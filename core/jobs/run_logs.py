"""Logs of a job's runs (their standard error), stored beside the other blobs of an attempt."""

from collections.abc import Iterator, Sequence

from core.database.tables import Attempt
from core.storage.store import BlobNotFound, BlobStore

# Per attempt; the end is kept, which has the cause of a failure.
MAX_BYTES = 256 * 1024
# Interval between uploads of the log of a running attempt, if it has grown.
EVERY_SECONDS = 30.0
# Per job, in one response.
MAX_ATTEMPTS = 50


def key(project_id: str, job_id: str, epoch: int) -> str:
    """Key of the log of an attempt, also while it is running. The only row is the `Attempt`."""
    return f"projects/{project_id}/jobs/{job_id}/attempts/{epoch}/log.txt"


def read(blobs: BlobStore, project_id: str, attempts: Sequence[Attempt]) -> Iterator[bytes]:
    """Yield the logs of a job's runs, oldest first, each after a line that names the attempt."""
    runs = [(number, one) for number, one in enumerate(attempts, start=1) if one.kind == "run"]
    for number, attempt in runs[-MAX_ATTEMPTS:]:
        ended = attempt.outcome or f"running; its log is up to {EVERY_SECONDS:g} s behind"
        yield f"--- attempt {number}: {ended}\n".encode()
        try:
            yield blobs.read(key(project_id, attempt.job_id, attempt.epoch))
        except BlobNotFound:
            if attempt.outcome is not None:
                yield b"(no log: it wrote nothing, its machine was lost, or it has only just ended)\n"
