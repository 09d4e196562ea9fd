"""Organizations and projects, their limits and usage.

Limits are checked in the transaction of the change, after locking the project's row, so that concurrent requests see
each other's changes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Text, case, cast, func, select
from sqlalchemy.orm import Session

from core.database.engine import Work
from core.database.states import EVAL_RUN, JOB
from core.database.tables import (
    Eval,
    EvalJournal,
    EvalPage,
    EvalRun,
    File,
    GoldenCase,
    GraderAudit,
    GraderVersion,
    Job,
    Organization,
    Preview,
    Project,
    ProjectUsage,
    StoredGrader,
    Upload,
    UploadPart,
    now,
)
from core.errors import InvalidRequest, OrganizationNotFound, ProjectNotFound, QuotaExceeded
from core.tenancy.limits import Limits

DAY = 86400
# The value of a label, of those that are names of objects.
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
WINDOW_DAYS = 30


@dataclass(frozen=True)
class Usage:
    """Usage over some days. A step that was repeated after an interruption counts twice."""

    gpu_seconds: float
    grader_tokens: int


# Organizations and projects.


def create_organization(work: Work, name: str) -> Organization:
    organization = Organization(name=_named(name))
    work.session.add(organization)
    work.session.flush()
    _about(work, organization).record("organization.created", organization.id, {"name": organization.name})
    return organization


def organizations(session: Session) -> Sequence[Organization]:
    """List oldest first."""
    return session.scalars(select(Organization).order_by(Organization.created_at, Organization.id)).all()


def get_organization(session: Session, organization_id: str) -> Organization:
    organization = session.get(Organization, organization_id)
    if organization is None:
        raise OrganizationNotFound(organization_id)
    return organization


def rename_organization(work: Work, organization: Organization, name: str) -> None:
    """Rename an organization; existing models keep their names."""
    before, organization.name = organization.name, _named(name)
    names = {"before": before, "after": organization.name}
    _about(work, organization).record("organization.renamed", organization.id, names)


def create_project(work: Work, organization: Organization, name: str) -> Project:
    project = Project(organization_id=organization.id, name=_named(name))
    work.session.add(project)
    work.session.flush()
    _about(work, organization, project).record("project.created", project.id, {"name": project.name})
    return project


def projects(session: Session, organization_id: str | None = None) -> Sequence[Project]:
    """List oldest first, including archived ones."""
    statement = select(Project).order_by(Project.created_at, Project.id)
    if organization_id is not None:
        statement = statement.where(Project.organization_id == organization_id)
    return session.scalars(statement).all()


def get_project(session: Session, project_id: str) -> Project:
    project = session.get(Project, project_id)
    if project is None:
        raise ProjectNotFound(project_id)
    return project


def rename_project(work: Work, project: Project, name: str) -> None:
    before, project.name = project.name, _named(name)
    work.record("project.renamed", project.id, {"before": before, "after": project.name})


def _about(work: Work, organization: Organization, project: Project | None = None) -> Work:
    """The same work, logged in this organization and project, to which the author may not belong yet."""
    of_project = None if project is None else project.id
    actor = replace(work.actor, organization_id=organization.id, project_id=of_project)
    return replace(work, actor=actor)


# Limits.


def own_limits(project: Project) -> Limits:
    return Limits(**project.limits or {})


def limits(project: Project, defaults: Limits) -> Limits:
    """The effective limits: the project's own, then the operator's defaults."""
    return own_limits(project).or_else(defaults)


def set_limits(work: Work, project: Project, limits: Limits) -> None:
    """Replace all limits of the project. Running jobs continue."""
    before, project.limits = own_limits(project).set_limits(), limits.set_limits() or None
    work.record("project.limits_changed", project.id, {"before": before, "after": limits.set_limits()})


def set_kueue(work: Work, project: Project, changes: Mapping[str, str]) -> None:
    """Change `queue` and `priority_class` of the project in Kueue; an empty one is removed.

    Raises:
        InvalidRequest: a name is none of Kubernetes.
    """
    for name, value in changes.items():
        if value and not _KUBERNETES_NAME.fullmatch(value):
            raise InvalidRequest(
                f"{name}: {value!r} is no name in Kubernetes: up to 63 small letters, digits, '-' and '.', with a "
                "letter or a digit at both ends."
            )
    kept = {name: value for name, value in ((project.kueue or {}) | dict(changes)).items() if value}
    project.kueue = kept or None
    work.record("project.kueue_changed", project.id, {"kueue": kept})


def refuse_job_beyond(session: Session, project_id: str, limits: Limits) -> None:
    """Check the limits after adding a job to the queue, in the same transaction, which the error rolls back.

    Raises:
        QuotaExceeded: too many jobs are queued, or GPU time or grader tokens are used up.
    """
    if (limits.queued_jobs, limits.gpu_seconds_per_30_days, limits.grader_tokens_per_30_days) == (None,) * 3:
        return
    _lock(session, project_id)
    if limits.queued_jobs is not None:
        before = _jobs(session, project_id, JOB.waiting) - 1
        if before >= limits.queued_jobs:
            hint = "wait until one of them has started, or cancel one"
            raise QuotaExceeded("queued_jobs", used=before, maximum=limits.queued_jobs, hint=hint)
    if (beyond := used_up(session, project_id, limits)) is not None:
        raise beyond


def refuse_eval_run_beyond(session: Session, project_id: str, limits: Limits) -> None:
    """Check the limits after adding an eval run to the queue, in the same transaction, which the error rolls back.

    Raises:
        QuotaExceeded: too many runs are queued, or storage, GPU time or grader tokens are used up.
    """
    if limits.queued_eval_runs is not None:
        _lock(session, project_id)
        before = _eval_runs(session, project_id, EVAL_RUN.waiting) - 1
        if before >= limits.queued_eval_runs:
            hint = "wait until one of them has started, or cancel one"
            raise QuotaExceeded("queued_eval_runs", used=before, maximum=limits.queued_eval_runs, hint=hint)
    if limits.storage_bytes is not None:
        _lock(session, project_id)
        # The rows of the run are counted already, and its items need room, too.
        if (full := storage_used_up(session, project_id, limits)) is not None:
            raise full
    if (beyond := used_up(session, project_id, limits)) is not None:
        raise beyond


def used_up(session: Session, project_id: str, limits: Limits) -> QuotaExceeded | None:
    """The limit on GPU time or grader tokens that the project has reached; None if there is none."""
    if limits.gpu_seconds_per_30_days is None and limits.grader_tokens_per_30_days is None:
        return None
    used = usage_since(session, project_id)
    for name, amount, most in (
        ("gpu_seconds_per_30_days", used.gpu_seconds, limits.gpu_seconds_per_30_days),
        ("grader_tokens_per_30_days", used.grader_tokens, limits.grader_tokens_per_30_days),
    ):
        if most is not None and amount >= most:
            hint = "usage older than 30 days is freed daily; the operator can raise the limit"
            return QuotaExceeded(name, used=round(amount, 1), maximum=most, hint=hint)
    return None


def storage_used_up(session: Session, project_id: str, limits: Limits) -> QuotaExceeded | None:
    """The limit on stored bytes if the project has reached it."""
    if limits.storage_bytes is None or (used := stored_bytes(session, project_id)) < limits.storage_bytes:
        return None
    hint = "delete files, eval runs, previews or grader audits; the operator can raise the limit"
    return QuotaExceeded("storage_bytes", used=used, maximum=limits.storage_bytes, hint=hint)


def free_storage(session: Session, project_id: str, limits: Limits, *, needed: int = 1) -> int | None:
    """Bytes that the project may still store; None: unlimited.

    Raises:
        QuotaExceeded: fewer than `needed` bytes are left.
    """
    if limits.storage_bytes is None:
        return None
    used = stored_bytes(session, project_id)
    if used + needed > limits.storage_bytes:
        hint = "the new content does not fit; delete files or send less"
        raise QuotaExceeded("storage_bytes", used=used, maximum=limits.storage_bytes, hint=hint)
    return limits.storage_bytes - used


def refuse_file_beyond(session: Session, project_id: str, limits: Limits, size: int) -> None:
    """Check the storage limit before adding a file of `size` bytes, in the same transaction.

    Raises:
        QuotaExceeded: the file would exceed the limit.
    """
    if limits.storage_bytes is not None:
        _lock(session, project_id)
        free_storage(session, project_id, limits, needed=size)


def refuse_request_beyond(session: Session, project_id: str, limits: Limits, request: object) -> None:
    """Check the storage limit before adding a row with a request (JSON), in the same transaction.

    Call it for jobs and pipelines, which do not count as stored, because a project cannot delete them.

    Raises:
        QuotaExceeded: the request would exceed the limit.
    """
    refuse_file_beyond(session, project_id, limits, len(json.dumps(request)))


def refuse_stored_beyond(session: Session, project_id: str, limits: Limits) -> None:
    """Check the storage limit after adding rows, in the same transaction, which the error rolls back.

    Raises:
        QuotaExceeded: the rows exceed the limit.
    """
    if limits.storage_bytes is not None:
        _lock(session, project_id)
        free_storage(session, project_id, limits, needed=0)


def refuse_upload_beyond(session: Session, project_id: str, most: int) -> None:
    """Check the number of pending uploads before creating one, in the same transaction.

    Raises:
        QuotaExceeded: the project has `most` uploads that are not yet completed, cancelled or expired.
    """
    _lock(session, project_id)
    pending = session.scalars(select(func.count()).select_from(Upload).where(*_pending(project_id))).one()
    if pending >= most:
        hint = "complete or cancel some; each expires an hour after its creation"
        raise QuotaExceeded("pending_uploads", used=pending, maximum=most, hint=hint)


# Usage.


def usage_since(session: Session, project_id: str, days: int = WINDOW_DAYS) -> Usage:
    """Usage of today and the `days - 1` days before."""
    recent = ProjectUsage.project_id == project_id, ProjectUsage.day > now() // DAY - days
    gpu_seconds, grader_tokens = session.execute(
        select(func.sum(ProjectUsage.gpu_seconds), func.sum(ProjectUsage.grader_tokens)).where(*recent)
    ).one()
    return Usage(float(gpu_seconds or 0), int(grader_tokens or 0))


def in_use(session: Session, project_id: str) -> dict[str, Any]:
    """Current usage by limit, except the request rate."""
    used = usage_since(session, project_id)
    return {
        "running_jobs": _jobs(session, project_id, JOB.running),
        "queued_jobs": _jobs(session, project_id, JOB.waiting),
        "running_eval_runs": _eval_runs(session, project_id, EVAL_RUN.running),
        "queued_eval_runs": _eval_runs(session, project_id, EVAL_RUN.waiting),
        "storage_bytes": stored_bytes(session, project_id),
        "gpu_seconds_per_30_days": round(used.gpu_seconds, 1),
        "grader_tokens_per_30_days": used.grader_tokens,
    }


def stored_bytes(session: Session, project_id: str) -> int:
    """Bytes of all that a project can delete: files, results among them, multipart uploads, evals, runs, stored
    graders, previews and audits of graders.

    A pending upload counts as its announced size, or as its received bytes if those are more. Cancelled and expired
    uploads count their received bytes until deleted.
    """
    files = select(func.sum(File.bytes)).where(File.project_id == project_id, File.deleted_at.is_(None))
    received = select(func.coalesce(func.sum(UploadPart.bytes), 0)).where(UploadPart.upload_id == Upload.id)
    arrived = received.scalar_subquery()
    open_ = (Upload.status == "pending") & (Upload.expires_at > now())
    uploads = (
        select(case((open_ & (Upload.bytes > arrived), Upload.bytes), else_=arrived).label("bytes"))
        # The parts of a completed upload are in its file, and are deleted at once.
        .where(Upload.project_id == project_id, Upload.status != "completed")
        .where(open_ | select(UploadPart.seq).where(UploadPart.upload_id == Upload.id).exists())
        .subquery()
    )
    mine = EvalRun.project_id == project_id, EvalRun.deleted_at.is_(None)
    evals = [
        select(func.sum(func.length(cast(column, Text)))).where(
            Eval.project_id == project_id, Eval.deleted_at.is_(None)
        )
        for column in (Eval.data_source_config, Eval.testing_criteria)
    ]
    rows = select(func.sum(EvalRun.content_bytes)).where(*mine)
    items = select(func.sum(EvalPage.bytes)).join(EvalRun, EvalRun.id == EvalPage.run_id).where(*mine)
    # JSON is stored in ASCII, so a character is a byte.
    journal = (
        select(func.sum(func.length(cast(EvalJournal.data, Text))))
        .join(EvalRun, EvalRun.id == EvalJournal.run_id)
        .where(*mine)
    )
    graders = [
        select(func.sum(table.bytes))
        .join(StoredGrader, StoredGrader.id == table.grader_id)
        .where(StoredGrader.project_id == project_id)
        for table in (GraderVersion, GoldenCase)
    ]
    runs = [
        select(func.sum(func.length(cast(column, Text)))).where(table.project_id == project_id)
        for table, columns in (
            (Preview, (Preview.request, Preview.report, Preview.answers)),
            (GraderAudit, (GraderAudit.request, GraderAudit.report)),
        )
        for column in columns
    ]
    counted = (files, select(func.sum(uploads.c.bytes)), rows, items, journal, *evals, *graders, *runs)
    return sum(int(session.scalar(one) or 0) for one in counted)


def _pending(project_id: str) -> tuple[ColumnElement[bool], ...]:
    return Upload.project_id == project_id, Upload.status == "pending", Upload.expires_at > now()


def _jobs(session: Session, project_id: str, statuses: Sequence[str]) -> int:
    these = Job.project_id == project_id, Job.status.in_(statuses)
    return session.scalars(select(func.count()).select_from(Job).where(*these)).one()


def _eval_runs(session: Session, project_id: str, statuses: Sequence[str]) -> int:
    these = EvalRun.project_id == project_id, EvalRun.status.in_(statuses)
    return session.scalars(select(func.count()).select_from(EvalRun).where(*these)).one()


def _lock(session: Session, project_id: str) -> None:
    """Lock until the commit. Not FOR UPDATE, which would block inserts of rows with a foreign key to the project."""
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))


def _named(name: str) -> str:
    if not name.strip() or len(name) > 64 or "\0" in name:
        raise InvalidRequest("A name has 1 to 64 characters.", param="name")
    return name.strip()
