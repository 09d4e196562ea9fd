"""What the runs of a job wrote to their standard error, kept beside what else an attempt leaves in the blob store."""

from collections.abc import Iterator, Sequence

from core.blobs import BlobNotFound, BlobStore
from core.models import Attempt

# Of one attempt; the end is what tells why it ended.
MOST_BYTES = 256 * 1024
# That end of a run which is under way is put anew so often, if there is more of it.
EVERY_SECONDS = 30.0
# Of one job, in an answer.
MOST_ATTEMPTS = 50


def key(project_id: str, job_id: str, epoch: int) -> str:
    """Where the log of an attempt is, as far as it has come. An `Attempt` is all that there is of it as a row."""
    return f"projects/{project_id}/jobs/{job_id}/attempts/{epoch}/log.txt"


def read(blobs: BlobStore, project_id: str, attempts: Sequence[Attempt]) -> Iterator[bytes]:
    """The logs of a job's runs, oldest first, each below a line that says which it is."""
    runs = [(number, one) for number, one in enumerate(attempts, start=1) if one.kind == "run"]
    for number, attempt in runs[-MOST_ATTEMPTS:]:
        ended = attempt.outcome or f"under way; its log is up to {EVERY_SECONDS:g} s behind"
        yield f"--- attempt {number}: {ended}\n".encode()
        try:
            yield blobs.read(key(project_id, attempt.job_id, attempt.epoch))
        except BlobNotFound:
            if attempt.outcome is not None:
                yield b"(no log: it wrote nothing, its machine was lost, or it has ended only just now)\n"
