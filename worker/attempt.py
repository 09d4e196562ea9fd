"""One attempt at a claimed job: its claim, its job, and its access to the database and the blob store."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database.engine import Database
from core.database.tables import Job
from core.jobs import events, lifecycle, usage
from core.retry import RetryPolicy
from core.storage.store import BlobStore
from graders.judge.usage import TokenLedger
from graders.types import Grader
from worker.out_of_memory import FirstAnswer
from worker.progress import PROGRESS
from worker.sampled_tokens import SampledTokens
from worker.sharing.base import DeviceShare

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """What all parts of a run that read or write anything share.

    Reads, writes and uploads are repeated during an outage (core/retry.py), so each must be safe to repeat.
    """

    claim: Claim
    job: Job  # as it was when the attempt began
    database: Database
    blobs: BlobStore
    retry: RetryPolicy
    shared: DeviceShare | None = None  # None: it has the device and its base model to itself
    first_answer: FirstAnswer = field(default_factory=FirstAnswer, compare=False, repr=False)  # to a shortage
    ledger: TokenLedger = field(default_factory=TokenLedger)  # of judges and teachers on servers
    sampled: SampledTokens = field(default_factory=SampledTokens)
    shadow_grader: Grader | None = None  # open while the attempt runs, of a job that has one

    @classmethod
    def begin(
        cls,
        claim: Claim,
        database: Database,
        blobs: BlobStore,
        *,
        patience_seconds: float,
        shared: DeviceShare | None = None,
    ) -> Self:
        """Read the claimed job. An outage that the attempt survives becomes an event of the job."""
        retry = RetryPolicy(
            patience_seconds, partial(report_outage, database, claim), during=PROGRESS.waiting
        )

        def read() -> Job:
            with database.read() as session:
                return session.scalars(select(Job).where(Job.id == claim.job_id)).one()

        return cls(claim, retry(read), database, blobs, retry, shared)

    @property
    def prefix(self) -> str:
        """Of the keys of all blobs that this attempt writes."""
        return f"projects/{self.job.project_id}/jobs/{self.job.id}/attempts/{self.claim.epoch}"

    def read(self, do: Callable[[Session], T]) -> T:
        """Return `do(session)` from a transaction that only reads."""

        def once() -> T:
            with self.database.read() as session:
                return do(session)

        return self.retry(once)

    def write(self, do: Callable[[Session, Job], T]) -> T:
        """Return `do(session, job)` from a transaction that only the holder of the claim can commit.

        Raises:
            LeaseLost: the job was cancelled or claimed by another worker. Nothing was written.
        """

        def once() -> T:
            with lifecycle.fenced(self.database, self.claim) as (session, job):
                return do(session, job)

        return self.retry(once)

    def book(self) -> None:
        """Count the tokens that no step has recorded: of judges, and sampled ones. They are spent in any case."""
        self._book(self.retry)

    def book_once(self) -> None:
        """As `book`, of an attempt that ends with an error, maybe that of an outage that it has waited for."""
        try:
            self._book(None)
        except Exception:
            lost = self.ledger.unbooked, self.sampled.pending
            log.warning("%d tokens of judges could not be counted, nor %d sampled ones", *lost, exc_info=True)

    def _book(self, retry: RetryPolicy | None) -> None:
        tokens, job = self.ledger.unbooked, self.job
        usage.book_grader_tokens(self.database, job.project_id, job.model, tokens=tokens, retry=retry)
        self.ledger.book(tokens)
        unused = self.sampled.pending
        usage.book_unused(self.database, self.claim, unused, retry=retry)
        self.sampled.take(unused)

    def put(self, key: str, data: bytes) -> None:
        """Store a blob."""
        self.retry(partial(self.blobs.put_bytes, key, data))

    def event(self, message: str, data: dict[str, Any], *, level: str = "info") -> None:
        """Add an event to the job's log. `data["step"]`, if present, is the step that it belongs to."""

        def append(session: Session, job: Job) -> None:
            events.append(session, job.id, message, level=level, data=data, step=data.get("step"))

        self.write(append)


def report_outage(database: Database, claim: Claim, incident: str) -> None:
    """Add an event about an outage that the attempt survived, unless another one has claimed the job since."""
    with database.write() as session:
        if session.scalar(select(Job.epoch).where(Job.id == claim.job_id)) == claim.epoch:
            events.append(session, claim.job_id, incident, level="warn")
