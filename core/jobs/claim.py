"""The right of one attempt to write to its job."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """Valid as long as its epoch is that of the job's row."""

    job_id: str
    epoch: int
    owner: str


class LeaseLost(Exception):
    """The job was cancelled, or claimed by another worker. Stop, and write nothing more."""
