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
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from core.database.columns import StorableString as String
from core.database.columns import StorableText as Text
from core.database.ids import TENANT_LENGTH, new_id

# SQLite autoincrements only a column declared INTEGER; PostgreSQL must not overflow at two billion events.
Seq = BigInteger().with_variant(Integer, "sqlite")


def now() -> int:
    return int(time.time())


class Table(DeclarativeBase):
    # Named constraints, so that migrations can drop them in both databases.
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
    id: Mapped[str] = mapped_column(
        String(64), primary_key=True, default=lambda: new_id("org-", TENANT_LENGTH)
    )
    name: Mapped[str] = mapped_column(String(64))  # part of the names of tuned models
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Project(Table):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(
        String(64), primary_key=True, default=lambda: new_id("proj_", TENANT_LENGTH)
    )
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # Limits of this project (core/tenancy/limits.py); for missing ones the operator's defaults apply.
    limits: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # Its queue and priority in Kueue, for the dispatcher: {"queue": a LocalQueue, "priority_class": ...}, or a part.
    kueue: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    archived_at: Mapped[int | None] = mapped_column(BigInteger, default=None)


class ProjectTurns(Table):
    """The last claims of a project's rows (core/turns.py).

    Not columns of projects: a request that adds a row to a list locks its project, and a claim must not wait for that.
    """

    __tablename__ = "project_turns"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    # A counter over the job starts of all projects: among equal projects the lowest one is next.
    last_turn: Mapped[int] = mapped_column(BigInteger, default=0)
    # The same for file validations.
    last_validation: Mapped[int] = mapped_column(BigInteger, default=0)
    # The same for eval runs.
    last_eval_run: Mapped[int] = mapped_column(BigInteger, default=0)


class ApiKey(Table):
    """An API key. Only its hash is stored: the key has 256 random bits, so one SHA-256 is sufficient."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(64), primary_key=True, default=lambda: new_id("key_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    last4: Mapped[str] = mapped_column(String(4))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    scope: Mapped[str] = mapped_column(String(8), default="admin")  # read < write < admin
    owner: Mapped[str] = mapped_column(String(128), default="")  # the person who uses it
    expires_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    last_used_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # The user of single sign-on whose sessions stand for this key; its text is not known.
    sso_user: Mapped[str | None] = mapped_column(String(128), default=None)


class ConsoleSession(Table):
    """A session of the console in a browser, or a login token for one. Only the hash of its token is stored."""

    __tablename__ = "console_sessions"
    id: Mapped[str] = mapped_column(String(64), primary_key=True, default=lambda: new_id("session_"))
    kind: Mapped[str] = mapped_column(String(8))  # session or login
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # Orders those of one second. Unix nanoseconds.
    created_ns: Mapped[int] = mapped_column(BigInteger, default=time.time_ns)
    expires_at: Mapped[int] = mapped_column(BigInteger)


class AuditEntry(Table):
    """One change, written in its transaction."""

    __tablename__ = "audit_entries"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("audit_"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # No foreign keys: the log outlives its subjects.
    organization_id: Mapped[str | None] = mapped_column(String(64), default=None)
    project_id: Mapped[str | None] = mapped_column(String(64), default=None)
    actor: Mapped[str] = mapped_column(String(64))  # the id of an API key, or "operator"
    action: Mapped[str] = mapped_column(String(64))  # such as job.created
    target: Mapped[str] = mapped_column(String(512))
    request_id: Mapped[str | None] = mapped_column(String(64), default=None)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class ProjectUsage(Table):
    """Usage of a project on one day (Unix time / 86400), repeated steps included."""

    __tablename__ = "project_usage"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    day: Mapped[int] = mapped_column(Integer, primary_key=True)
    gpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)
    grader_tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class ModelUsage(Table):
    """The part of a project's usage on one day that is known by model; see ProjectUsage."""

    __tablename__ = "model_usage"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    day: Mapped[int] = mapped_column(Integer, primary_key=True)
    model: Mapped[str] = mapped_column(String(512), primary_key=True)  # as the job or the eval run names it
    gpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)
    sampled_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    unused_tokens: Mapped[int] = mapped_column(BigInteger, default=0)  # of those: no step learned from them
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    grader_tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class Worker(Table):
    """A worker process as it last reported itself (core/service/workers.py)."""

    __tablename__ = "workers"
    name: Mapped[str] = mapped_column(String(128), primary_key=True)  # the owner of its leases: host/pid
    host: Mapped[str] = mapped_column(String(128))
    gpu_class: Mapped[str] = mapped_column(String(32))
    version: Mapped[str] = mapped_column(String(64))
    machines: Mapped[int] = mapped_column(Integer)  # that share its runs, this one included
    ranks: Mapped[int] = mapped_column(Integer)  # on each of them
    # [{"index", "name", "memory_used_bytes", "memory_total_bytes", "utilization"}], unknown values null.
    gpus: Mapped[list[Any]]
    memory_used_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of the host or the container
    memory_total_bytes: Mapped[int | None] = mapped_column(BigInteger)
    draining: Mapped[bool] = mapped_column(Boolean, default=False)
    findings: Mapped[list[Any]]  # of `regraft-server doctor` (core/telemetry/checkup.py)
    started_at: Mapped[float] = mapped_column(Double)
    seen_at: Mapped[float] = mapped_column(Double, index=True)  # by the database's clock, as leases


class IdempotentRequest(Table):
    """The stored response of a POST with an Idempotency-Key."""

    __tablename__ = "idempotent_requests"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))  # sha256 of method, path and body
    created_at: Mapped[int] = mapped_column(BigInteger, default=now, index=True)
    status_code: Mapped[int] = mapped_column(Integer)
    answer: Mapped[dict[str, Any]]


class File(Table):
    __tablename__ = "files"
    __table_args__ = (Index(None, "project_id", "seq"), Index(None, "project_id", "sha256"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("file-", 22))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    blob_key: Mapped[str] = mapped_column(
        String(512)
    )  # files of a project with the same content share a blob
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # A deleted file keeps its row while an unfinished job reads it; the reconciler then removes both.
    deleted_at: Mapped[int | None] = mapped_column(BigInteger, default=None, index=True)


class Upload(Table):
    """A multipart upload of a large file."""

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


class Leased(Table):
    """A row that a worker claims (core/claims.py, which explains the columns)."""

    __abstract__ = True
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    status: Mapped[str]
    # The fencing token: every claim, cancel and lost lease increments it, and a worker with an outdated value cannot
    # write.
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    # Null unless a worker holds the row.
    lease_owner: Mapped[str | None] = mapped_column(String(128), default=None)
    lease_expires_at: Mapped[float | None] = mapped_column(Double, default=None)
    next_run_at: Mapped[float] = mapped_column(Double, default=0.0)  # no claim before this time
    dispatched_at: Mapped[float] = mapped_column(Double, default=0.0)  # the last wake-up of a worker for it


class Job(Leased):
    """A fine-tuning job. core/jobs/lifecycle.py is the only writer of `status`, `epoch` and the lease."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "project_id", "seq"),
        # Evals of jobs and created evals are one list, ordered by time (core/evals/catalog.py).
        Index(None, "project_id", "created_at", "seq"),
        # Index 1 and 2: all waiting or running jobs. All four columns: the oldest job of each project (core/turns.py).
        Index(None, "status", "gpu_class", "project_id", "seq"),
        Index(None, "status", "project_id", "seq"),  # the same of validations, which have no class
        Index(None, "status", "lease_expires_at"),
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftjob-"))
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))

    # The request.
    model: Mapped[str] = mapped_column(String(256))
    training_file: Mapped[str] = mapped_column(String(64))
    validation_file: Mapped[str | None] = mapped_column(String(64), default=None)
    suffix: Mapped[str | None] = mapped_column(String(64), default=None)
    seed: Mapped[int] = mapped_column(BigInteger)
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata", default=None)
    method: Mapped[str] = mapped_column(String(32), default="reinforcement")  # core/jobs/methods.py
    # The object of the method, normalized: its hyperparameters (with their "auto"), for reinforcement also grader and
    # response_format, and the integrations (core/jobs/integrations.py). The column is older than the other methods.
    body: Mapped[dict[str, Any]] = mapped_column("reinforcement")

    # The tuned model that it trains further (core/results/lineage.py); null: it starts from the base model.
    parent: Mapped[dict[str, Any] | None] = mapped_column(default=None)

    # The results.
    status: Mapped[str] = mapped_column(String(32), default="validating_files")
    # The resolved hyperparameters, written when the first run has loaded the model and the data.
    resolved: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    started_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    finished_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    estimated_finish: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # The delivered model compared with its base (core/jobs/verdict.py), written just before the job ends.
    verdict: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    fine_tuned_model: Mapped[str | None] = mapped_column(String(512), default=None)
    result_file: Mapped[str | None] = mapped_column(String(64), default=None)
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    # Sums over the recorded steps and, until the job ends, the basis of its estimate (core/jobs/usage.py).
    usage: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The cap at which the job pauses (core/jobs/budgets.py): {"asked": the request, "gpu_seconds": 3600.0}. The
    # recorded steps count against it.
    budget: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    gpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)

    # The worker.
    gpu_class: Mapped[str] = mapped_column(String(32))
    # Of each node, and nodes, if the request chose them (core/jobs/resources.py); null: those of the class.
    gpus: Mapped[int | None] = mapped_column(Integer, default=None)
    nodes: Mapped[int | None] = mapped_column(Integer, default=None)
    failures: Mapped[int] = mapped_column(Integer, default=0)
    # The work of the run inside of its step (worker/progress.py), with the epoch of its claim.
    progress: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The state of its Kubernetes Job while it is queued (core/jobs/pods.py); null without a dispatcher.
    pod: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The results of the newest preview of the same request, when the job was created (core/results/previews.py).
    preview: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The memory plan of the newest attempt, and what out-of-memory errors lowered (worker/recording/plan_record.py).
    memory: Mapped[dict[str, Any] | None] = mapped_column(default=None)


class MemoryLimit(Table):
    """The sizes that out-of-memory errors lowered for jobs of one kind, on a device that no other process used.

    They count for a week (worker/recording/plan_record.py).
    """

    __tablename__ = "memory_limits"
    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    device: Mapped[str] = mapped_column(
        String(128), primary_key=True
    )  # its name, such as "NVIDIA H100 80GB HBM3"
    workload: Mapped[str] = mapped_column(String(128), primary_key=True)
    sizes: Mapped[dict[str, Any]]  # worker/model/lowering.py: SizeLimits
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now, onupdate=now)


class Attempt(Table):
    """One attempt of a worker at a job: its checkpoint, times and outcome."""

    __tablename__ = "job_attempts"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # validation | run
    worker: Mapped[str] = mapped_column(String(128))
    started_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float | None] = mapped_column(Double, default=None)
    # validated, succeeded, failed, cancelled, paused, drained, put_off, crashed, expired
    outcome: Mapped[str | None] = mapped_column(String(16), default=None)
    reason: Mapped[str | None] = mapped_column(Text, default=None)
    resumed_from: Mapped[int | None] = mapped_column(Integer, default=None)  # the step of that checkpoint


class EpisodeServer(Table):
    """The address at which the run of a job answers the user's agent (core/jobs/episode_servers.py)."""

    __tablename__ = "episode_servers"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    secret: Mapped[str] = mapped_column(
        String(64)
    )  # between API and run; the keys of episodes follow from it
    epoch: Mapped[int] = mapped_column(Integer)  # of the run
    url: Mapped[str] = mapped_column(String(512))  # "": it does not sample now


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
    # The step that the event reports. When a lost attempt's steps are repeated, its events are superseded: no longer
    # listed, but still valid as cursors.
    step: Mapped[int | None] = mapped_column(Integer, default=None)
    superseded: Mapped[bool] = mapped_column(Boolean, default=False)


class BackgroundRun(Table):
    """Work that a process of the API does in the background (core/results/background.py)."""

    __abstract__ = True
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    finished_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    request: Mapped[dict[str, Any]]  # as it is shown: values of grader headers are masked
    training_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), default="in_progress")
    progress: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # The process that does it renews this; a run past it has lost its process.
    lease_expires_at: Mapped[float] = mapped_column(Double)


class Preview(BackgroundRun):
    """Answers of a base model to a few rows, graded as a job would (core/results/previews.py)."""

    __tablename__ = "previews"
    __table_args__ = (
        Index(None, "project_id", "seq"),
        Index(None, "project_id", "training_sha256"),
        Index(None, "finished_at"),
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("prev_"))
    # Hashes of the parts of the request on which its answers and grades depend, by name.
    parts: Mapped[dict[str, Any]]
    # Mean answer lengths by row and the speed, for the estimates of the same job.
    measured: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    answers: Mapped[list[Any] | None] = mapped_column(default=None, deferred=True)


class GraderAudit(BackgroundRun):
    """A grader tried on probes made from the rows of a file (core/results/grader_audits.py)."""

    __tablename__ = "grader_audits"
    __table_args__ = (
        Index(None, "project_id", "seq"),
        Index(None, "project_id", "training_sha256"),
        Index(None, "finished_at"),
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("graderaudit_"))
    version: Mapped[str] = mapped_column(String(64))  # of the specification, as a stored grader has it
    behavior_sha256: Mapped[str] = mapped_column(String(64))  # of the specification without names


class StepMetric(Table):
    """One row for each finished step, and one for step 0, the validation of the base model."""

    __tablename__ = "step_metrics"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    data: Mapped[dict[str, Any]]
    # Of a validation: the mean score per row of the file, in order, null where no answer could be graded. Used to
    # compare
    # validations independently of the quota of stored samples. Loaded only on access.
    valid_scores: Mapped[list[Any] | None] = mapped_column(default=None, deferred=True)
    # The same by the job's shadow grader.
    shadow_scores: Mapped[list[Any] | None] = mapped_column(default=None, deferred=True)


class RolloutPage(Table):
    """The blob with the graded samples of a step, in Parquet (core/results/rollouts.py)."""

    __tablename__ = "rollout_pages"
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    split: Mapped[str] = mapped_column(String(8), primary_key=True)  # train | valid
    epoch: Mapped[int] = mapped_column(Integer)
    blob_key: Mapped[str] = mapped_column(String(512))
    samples: Mapped[int] = mapped_column(Integer)
    total: Mapped[int] = mapped_column(Integer)  # samples before subsampling to the quota
    bytes: Mapped[int] = mapped_column(BigInteger)
    # Of a validation: the summary of its eval run over all samples (core/results/evals.py). None: of a training batch.
    summary: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Eval(Table):
    """A created eval. A deleted one remains as a cursor of its list for a month."""

    __tablename__ = "evals"
    __table_args__ = (Index(None, "project_id", "created_at", "seq"), Index(None, "deleted_at"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("eval_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now)
    name: Mapped[str] = mapped_column(String(256))
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata", default=None)
    data_source_config: Mapped[dict[str, Any]]  # as requested: {"type": "custom", "item_schema": ...}
    testing_criteria: Mapped[list[Any]]  # grader specs
    deleted_at: Mapped[int | None] = mapped_column(BigInteger, default=None)


class EvalRun(Leased):
    """A run of an eval. core/evals/lifecycle.py is the only writer of `status`, `epoch` and the lease."""

    __tablename__ = "eval_runs"
    __table_args__ = (
        Index(None, "eval_id", "seq"),
        Index(None, "status", "project_id", "seq"),
        Index(None, "deleted_at"),
        Index(None, "output_due"),
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("evalrun_"))
    eval_id: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(256))
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata", default=None)
    model: Mapped[str | None] = mapped_column(String(512), default=None)  # None: nothing is sampled
    # The request without the rows of `file_content`, which are in `content`.
    data_source: Mapped[dict[str, Any]]
    content: Mapped[list[Any] | None] = mapped_column(default=None, deferred=True)
    content_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    file_id: Mapped[str | None] = mapped_column(String(64), default=None)
    total: Mapped[int] = mapped_column(Integer)  # rows of the source
    # Counts, scores and tokens of the finished items (core/evals/summary.py).
    summary: Mapped[dict[str, Any]] = mapped_column(default=dict)
    budget: Mapped[dict[str, Any] | None] = mapped_column(
        default=None
    )  # caps by name (core/evals/budgets.py)

    status: Mapped[str] = mapped_column(String(16), default="queued")
    error: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    started_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    finished_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # Of a batch whose files are not written yet (core/evals/batches.py).
    output_due: Mapped[bool] = mapped_column(Boolean, default=False)

    failures: Mapped[int] = mapped_column(Integer, default=0)  # in a row, without a new item
    lost_workers: Mapped[int] = mapped_column(Integer, default=0)  # whose lease expired: the same
    note: Mapped[str | None] = mapped_column(String(256), default=None)  # what it waits for
    # Since when no worker has known a name in it (Unix time). Null: the last one did.
    unknown_since: Mapped[float | None] = mapped_column(Double, default=None)


class EvalPage(Table):
    """The blob with the items of one block of rows of an eval run: Parquet (core/evals/items.py)."""

    __tablename__ = "eval_pages"
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)  # of the block, from 0
    blob_key: Mapped[str] = mapped_column(String(512), index=True)
    items: Mapped[int] = mapped_column(Integer)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class EvalJournal(Table):
    """An item whose block is not yet a page: its sample and its grades so far, each in a row, or the finished item.

    A worker that resumes the run repeats nothing that is here.
    """

    __tablename__ = "eval_journal"
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    line: Mapped[int] = mapped_column(Integer, primary_key=True)
    # 0: the sample, or the finished item; from 1: the grade of this criterion.
    part: Mapped[int] = mapped_column(Integer, primary_key=True, default=0)
    data: Mapped[dict[str, Any]]


class StoredGrader(Table):
    """A named grader of a project. Its content is in its versions."""

    __tablename__ = "stored_graders"
    __table_args__ = (UniqueConstraint("project_id", "name"), Index(None, "project_id", "seq"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("grader_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[str] = mapped_column(String(64))  # the one that was saved last
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now)


class GraderVersion(Table):
    """A specification, addressed by its hash (core/stored_graders.py). It never changes."""

    __tablename__ = "grader_versions"
    __table_args__ = (UniqueConstraint("grader_id", "version"), Index(None, "grader_id", "seq"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    grader_id: Mapped[str] = mapped_column(String(64))
    version: Mapped[str] = mapped_column(String(64))
    spec: Mapped[dict[str, Any]]
    note: Mapped[str] = mapped_column(String(1024), default="")
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    # The result of its newest audit (core/results/grader_audits.py); None: it has none.
    audit: Mapped[dict[str, Any] | None] = mapped_column(default=None)


class GoldenCase(Table):
    """An answer and its row, with the score that every version of a grader must give it."""

    __tablename__ = "golden_cases"
    __table_args__ = (UniqueConstraint("grader_id", "sha256"), Index(None, "grader_id", "seq"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("case_"))
    grader_id: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(
        String(64)
    )  # of sample and item: a second case of them replaces the first
    sample: Mapped[dict[str, Any]]
    item: Mapped[dict[str, Any]]
    min_score: Mapped[float | None] = mapped_column(Double, default=None)
    max_score: Mapped[float | None] = mapped_column(Double, default=None)
    note: Mapped[str] = mapped_column(String(1024), default="")
    rollout_id: Mapped[str | None] = mapped_column(
        String(128), default=None
    )  # the stored answer that it came from
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class Pipeline(Leased):
    """Named stages, each a job or a file made from others (core/pipelines/lifecycle.py, the only writer)."""

    __tablename__ = "pipelines"
    __table_args__ = (Index(None, "project_id", "seq"), Index(None, "status", "next_run_at"))
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftpipe-"))
    name: Mapped[str | None] = mapped_column(String(256), default=None)
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata", default=None)
    actor: Mapped[str] = mapped_column(String(64))  # who created it, and on whose behalf its stages start
    cloned_from: Mapped[str | None] = mapped_column(String(64), default=None)
    stages: Mapped[list[Any]]  # core/pipelines/lifecycle.py, Stage
    status: Mapped[str] = mapped_column(String(16), default="running")
    finished_at: Mapped[int | None] = mapped_column(BigInteger, default=None)


class Checkpoint(Table):
    """A complete manifest in the blob store; the row is written after it."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step"), Index(None, "job_id", "seq"))
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("ftckpt_"))
    job_id: Mapped[str] = mapped_column(String(64))
    step: Mapped[int] = mapped_column(Integer)
    epoch: Mapped[int] = mapped_column(Integer)
    blob_prefix: Mapped[str] = mapped_column(String(512))
    # None: not validated at this step. Exists for resuming, and is replaced by the next one unless a pause has named
    # it.
    valid_reward: Mapped[float | None] = mapped_column(Double, default=None)
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class ScrubRound(Table):
    """Progress of the scrub round: one row, shared by all workers (worker/supervisor/scrub.py)."""

    __tablename__ = "scrub_rounds"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # always 1
    started_at: Mapped[float] = mapped_column(Double)
    # The worker that holds the lease on the round, and when the lease ends (Unix time).
    holder: Mapped[str] = mapped_column(String(64), default="")
    held_until: Mapped[float] = mapped_column(Double, default=0.0)
    # The `seq` of the last file and of the last checkpoint that this round has read.
    file_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    checkpoint_seq: Mapped[int] = mapped_column(BigInteger, default=0)


class TunedModel(Table):
    """A model name for requests: the job's result, or one of its checkpoints."""

    __tablename__ = "tuned_models"
    __table_args__ = (Index(None, "project_id", "seq"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(String(512), unique=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    job_id: Mapped[str] = mapped_column(String(64), index=True)
    checkpoint_id: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(256))
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)


class ModelAlias(Table):
    """A name that a project gives to a model (core/results/model_aliases.py)."""

    __tablename__ = "model_aliases"
    __table_args__ = (
        UniqueConstraint("project_id", "name"),
        Index(None, "project_id", "seq"),
        Index(None, "model"),
    )
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("alias_"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(512))  # a base model, or the name of a tuned model
    previous_model: Mapped[str | None] = mapped_column(String(512), default=None)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now)


class PastCursor(Table):
    """The position of a deleted row in its list: its id may still be the `after` of a client that pages."""

    __tablename__ = "past_cursors"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))  # the project or job of the list
    seq: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int] = mapped_column(BigInteger, default=now, index=True)


class CheckpointPermission(Table):
    """Permission of another project of the organization to use a tuned model."""

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
    # Thresholds for fine_tuning.job.threshold_reached: {"full_valid_mean_reward": 0.8} (core/outbound/webhooks.py).
    thresholds: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    # Not hashed: it signs every delivery.
    secret: Mapped[str] = mapped_column(String(128))
    old_secret: Mapped[str | None] = mapped_column(String(128), default=None)
    old_secret_until: Mapped[int | None] = mapped_column(BigInteger, default=None)
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    updated_at: Mapped[int] = mapped_column(BigInteger, default=now)


class WebhookDelivery(Table):
    """One event for one endpoint, written in the transaction that emitted it."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index(None, "settled", "next_attempt_at"),)
    seq: Mapped[int] = mapped_column(Seq, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True, default=lambda: new_id("wh_"))  # its webhook-id
    endpoint_id: Mapped[str] = mapped_column(String(64), index=True)
    job_id: Mapped[str] = mapped_column(String(64))
    type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)  # the exact text to sign and send
    created_at: Mapped[int] = mapped_column(BigInteger, default=now)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    next_attempt_at: Mapped[float] = mapped_column(Double, default=0.0)
    settled: Mapped[bool] = mapped_column(Boolean, default=False)  # delivered, or given up
    delivered_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    last_status: Mapped[int | None] = mapped_column(Integer, default=None)
    last_error: Mapped[str | None] = mapped_column(Text, default=None)
