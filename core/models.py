"""The tables. Times are Unix seconds; `seq` is the order of insertion and the cursor of every list."""

import time
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from core.ids import new_id

# SQLite numbers rows only in a column declared INTEGER; PostgreSQL should not run out at two billion events.
Seq = BigInteger().with_variant(Integer, "sqlite")


def now() -> int:
    return int(time.time())


class Table(DeclarativeBase):
    # Named constraints, so that a migration can drop them on both databases.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON(none_as_null=True), list[Any]: JSON(none_as_null=True)}


class Organization(Table):
    __tablename__ = "organizations"
    id: Mapped[str] = mapped_column(String(64), primary_key=True, default=lambda: new_id("org-"))
    name: Mapped[str] = mapped_column(String(64))  # appears in the names of tuned models
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Project(Table):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(String(64), primary_key=True, default=lambda: new_id("proj_"))
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # What this project may use at most (core/limits.py); what is not there is the operator's default.
    limits: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # A number that grows with every job any project starts: among equals, whose turn was longest ago is next.
    last_turn: Mapped[int] = mapped_column(BigInteger, default=0)
    # The same of the jobs whose files were looked at.
    last_validation: Mapped[int] = mapped_column(BigInteger, default=0)
    archived_at: Mapped[int | None] = mapped_column(BigInteger, default=None)


class ApiKey(Table):
    """The key itself is shown once and never stored: it holds 256 random bits, so one SHA-256 is enough."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(64), primary_key=True, default=lambda: new_id("key_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    last4: Mapped[str] = mapped_column(String(4))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    scope: Mapped[str] = mapped_column(String(8), default="admin")  # read < write < admin
    owner: Mapped[str] = mapped_column(String(128), default="")  # the person it was made for
    expires_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    last_used_at: Mapped[int | None] = mapped_column(BigInteger, default=None)


class AuditEntry(Table):
    """One change that somebody made, written in the transaction that made it."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("audit_"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # No foreign keys: the log outlives what it speaks of.
    organization_id: Mapped[str | None] = mapped_column(String(64), default=None)
    project_id: Mapped[str | None] = mapped_column(String(64), default=None)
    actor: Mapped[str] = mapped_column(String(64))  # the id of an API key, or "operator"
    action: Mapped[str] = mapped_column(String(64))  # such as job.created
    target: Mapped[str] = mapped_column(String(512))
    request_id: Mapped[str | None] = mapped_column(String(64), default=None)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class ProjectUsage(Table):
    """What a project used on one day (Unix time over 86400), repeated steps included."""

    __tablename__ = "project_usage"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    day: Mapped[int] = mapped_column(Integer, primary_key=True)
    gpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)
    grader_tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class IdempotentRequest(Table):
    """A POST that was answered, under the key its caller gave it: the same key gets the same answer."""

    __tablename__ = "idempotent_requests"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))  # sha256 of method, path and body
    created_at: Mapped[int] = mapped_column(BigInteger, default=now, index=True)
    status_code: Mapped[int] = mapped_column(Integer)
    answer: Mapped[dict[str, Any]]


class File(Table):
    __tablename__ = "files"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("file-", 22))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    blob_key: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # A deleted file keeps its row while a job that reads it is unfinished; the reconciler then removes both.
    deleted_at: Mapped[int | None] = mapped_column(BigInteger, default=None, index=True)


class Upload(Table):
    """A large file that arrives in parts."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "status", "expires_at"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("upload_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str] = mapped_column(String(32))
    mime_type: Mapped[str] = mapped_column(String(128))
    bytes: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16), default="pending")  # completed, cancelled, expired
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    file_expires_after: Mapped[int | None] = mapped_column(BigInteger, default=None)  # seconds
    file_id: Mapped[str | None] = mapped_column(String(64), default=None)


class UploadPart(Table):
    __tablename__ = "upload_parts"
    __table_args__ = (Index(None, "upload_id"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("part_"))
    upload_id: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    blob_key: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Job(Table):
    """A fine-tuning job. core/jobs.py is the only writer of `status`, `epoch` and the lease."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "project_id", "seq"),
        # The first two: all that wait or run. All four: the oldest job of each project (core/waiting.py).
        Index(None, "status", "gpu_class", "project_id", "seq"),
        Index(None, "status", "lease_expires_at"),
    )
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftjob-"))
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)

    # What was asked for.
    model: Mapped[str] = mapped_column(String(256))
    training_file: Mapped[str] = mapped_column(String(64))
    validation_file: Mapped[str | None] = mapped_column(String(64), default=None)
    suffix: Mapped[str | None] = mapped_column(String(64), default=None)
    seed: Mapped[int] = mapped_column(BigInteger)
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata", default=None)
    # method.reinforcement, normalised: grader, hyperparameters (with their "auto"), response_format. Beside them what
    # core/integrations.py keeps there.
    reinforcement: Mapped[dict[str, Any]]

    # What became of it.
    status: Mapped[str] = mapped_column(String(32), default="validating_files")
    # The hyperparameters without "auto", written when the first run has loaded the model and the data.
    resolved: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    started_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    finished_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    estimated_finish: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # The delivered model compared with its base (core/verdict.py), written just before the job ends.
    verdict: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    fine_tuned_model: Mapped[str | None] = mapped_column(String(512), default=None)
    result_file: Mapped[str | None] = mapped_column(String(64), default=None)
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    # Sums over the recorded steps and, until the job ends, what its estimate is made of (core/usage.py).
    usage: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The cap at which the job pauses (core/budgets.py): {"asked": as it was given, "gpu_seconds": 3600.0}. What counts
    # against it are the recorded steps.
    budget: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    gpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)

    # Who works on it. `epoch` is the fence: it moves on at every claim, cancel and lost lease, and a run
    # whose number is no longer the row's can write nothing.
    gpu_class: Mapped[str] = mapped_column(String(32))
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    failures: Mapped[int] = mapped_column(Integer, default=0)
    lease_owner: Mapped[str | None] = mapped_column(String(128), default=None)
    lease_expires_at: Mapped[float | None] = mapped_column(Double, default=None)
    next_run_at: Mapped[float] = mapped_column(Double, default=0.0)
    dispatched_at: Mapped[float] = mapped_column(Double, default=0.0)


class Attempt(Table):
    """One worker's turn at a job: who, when, from where, and how it ended."""

    __tablename__ = "job_attempts"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # validation | run
    worker: Mapped[str] = mapped_column(String(128))
    started_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float | None] = mapped_column(Double, default=None)
    # validated, succeeded, failed, cancelled, paused, drained, crashed, expired
    outcome: Mapped[str | None] = mapped_column(String(16), default=None)
    reason: Mapped[str | None] = mapped_column(Text, default=None)
    resumed_from: Mapped[int | None] = mapped_column(Integer, default=None)  # the step of that checkpoint


class Event(Table):
    __tablename__ = "events"
    __table_args__ = (Index(None, "job_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftevent-"))
    job_id: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    level: Mapped[str] = mapped_column(String(8), default="info")
    type: Mapped[str] = mapped_column(String(32), default="message")
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)
    # The step it tells of. When a lost attempt's steps are done again, what it said of them is superseded: no
    # longer listed, and still there for whoever holds its id as a cursor.
    step: Mapped[int | None] = mapped_column(Integer, default=None)
    superseded: Mapped[bool] = mapped_column(Boolean, default=False)


class StepMetric(Table):
    """One row for each finished step, and one for step 0, the validation of the base model."""

    __tablename__ = "step_metrics"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    data: Mapped[dict[str, Any]]
    # Of a validation: the mean score of each row of the file, in its order, null where no answer could be graded. Two
    # validations are compared by it, whatever the quota of stored samples left out. Loaded only where it is asked for.
    valid_scores: Mapped[list[Any] | None] = mapped_column(default=None, deferred=True)


class RolloutPage(Table):
    """Where the graded samples of one step lie: a Parquet blob (core/rollouts.py), or JSON lines if it is old."""

    __tablename__ = "rollout_pages"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    split: Mapped[str] = mapped_column(String(8), primary_key=True)  # train | valid
    epoch: Mapped[int] = mapped_column(Integer)
    blob_key: Mapped[str] = mapped_column(String(512))
    samples: Mapped[int] = mapped_column(Integer)
    # How many there were, before some were left out for the sake of the quota. 0: an older version wrote all of them.
    total: Mapped[int] = mapped_column(Integer, default=0)
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    # Of a validation: what its eval run says of all samples (core/evals.py).
    summary: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Checkpoint(Table):
    """A manifest in the blob store that is whole; the row is written after it."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step"), Index(None, "job_id", "seq"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftckpt_"))
    job_id: Mapped[str] = mapped_column(String(64))
    step: Mapped[int] = mapped_column(Integer)
    epoch: Mapped[int] = mapped_column(Integer)
    blob_prefix: Mapped[str] = mapped_column(String(512))
    # None: not validated at this step. Made for resuming, and replaced by the next one unless a pause has named it.
    valid_reward: Mapped[float | None] = mapped_column(Double, default=None)
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class ScrubRound(Table):
    """How far the round that reads all objects has come: one row, shared by all workers (worker/scrub.py)."""

    __tablename__ = "scrub_rounds"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # always 1
    started_at: Mapped[float] = mapped_column(Double)
    # The worker that holds the lease on the round, and when the lease ends (Unix time).
    holder: Mapped[str] = mapped_column(String(64), default="")
    held_until: Mapped[float] = mapped_column(Double, default=0.0)
    # The `seq` of the last file and of the last checkpoint that were read in this round.
    file_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    checkpoint_seq: Mapped[int] = mapped_column(BigInteger, default=0)


class TunedModel(Table):
    """A name that can be called: the job's result, or one of its kept checkpoints."""

    __tablename__ = "tuned_models"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(String(512), unique=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    job_id: Mapped[str] = mapped_column(String(64), index=True)
    checkpoint_id: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class PastCursor(Table):
    """The place of a row that was deleted from a list: its id may still be the `after` of a script that pages."""

    __tablename__ = "past_cursors"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))  # the project or the job whose list it was
    seq: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int] = mapped_column(BigInteger, default=now, index=True)


class CheckpointPermission(Table):
    """Another project of the organization may call a tuned model."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("model", "project_id"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("cp_"))
    model: Mapped[str] = mapped_column(String(512))  # the name of the tuned model
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class WebhookEndpoint(Table):
    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("whep_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    url: Mapped[str] = mapped_column(String(2048))
    event_types: Mapped[list[Any]]
    # What fine_tuning.job.threshold_reached is sent for: {"full_valid_mean_reward": 0.8} (core/webhooks.py).
    thresholds: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # Not hashed: every delivery is signed with it.
    secret: Mapped[str] = mapped_column(String(128))
    old_secret: Mapped[str | None] = mapped_column(String(128), default=None)
    old_secret_until: Mapped[int | None] = mapped_column(BigInteger, default=None)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now)


class WebhookDelivery(Table):
    """One event on its way to one endpoint, written in the transaction that made it happen."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index(None, "settled", "next_attempt_at"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("wh_"))  # its webhook-id
    endpoint_id: Mapped[str] = mapped_column(String(64), index=True)
    job_id: Mapped[str] = mapped_column(String(64))
    type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)  # the exact text that is signed and sent
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    next_attempt_at: Mapped[float] = mapped_column(Double, default=0.0)
    settled: Mapped[bool] = mapped_column(Boolean, default=False)  # delivered, or given up
    delivered_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    last_status: Mapped[int | None] = mapped_column(Integer, default=None)
    last_error: Mapped[str | None] = mapped_column(Text, default=None)
