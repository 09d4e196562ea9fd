"""Organisations and projects, and what each project uses of what it may.

The checks are made in the transaction of the change they belong to, after the project's row was locked, so that of
two requests that come at once the second sees what the first has taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from core import jobs
from core.db import Work
from core.errors import InvalidRequest, OrganizationNotFound, ProjectNotFound, QuotaExceeded
from core.limits import Limits
from core.models import File, Job, Organization, Project, ProjectUsage, Upload, UploadPart, now
from core.waiting import RUNNING, WAITING

DAY = 86400
WINDOW_DAYS = 30


@dataclass(frozen=True)
class Usage:
    """What was used in some days. A step that was repeated after an interruption counts twice."""

    gpu_seconds: float
    grader_tokens: int


# Organisations and projects.


def create_organization(work: Work, name: str) -> Organization:
    organization = Organization(name=_named(name))
    work.session.add(organization)
    work.session.flush()
    _about(work, organization).record("organization.created", organization.id, {"name": organization.name})
    return organization


def organizations(session: Session) -> Sequence[Organization]:
    """Oldest first."""
    return session.scalars(select(Organization).order_by(Organization.created_at, Organization.id)).all()


def get_organization(session: Session, organization_id: str) -> Organization:
    organization = session.get(Organization, organization_id)
    if organization is None:
        raise OrganizationNotFound(organization_id)
    return organization


def rename_organization(work: Work, organization: Organization, name: str) -> None:
    """From now on: models that are there keep the name they were given."""
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
    """Oldest first, the archived ones too."""
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


def archive_project(work: Work, project: Project) -> None:
    """Refuse its keys from now on, and cancel its jobs: nobody could stop them any more. Its rows and files stay."""
    if project.archived_at is not None:
        return
    # The jobs first: a worker that claims one locks it and then the project, and so must we.
    unfinished = select(Job).where(Job.project_id == project.id, Job.status.not_in(jobs.FINAL))
    for job in work.session.scalars(unfinished.order_by(Job.seq)).all():
        jobs.cancel(work, job)
    project.archived_at = now()
    work.record("project.archived", project.id)


def _about(work: Work, organization: Organization, project: Project | None = None) -> Work:
    """The same work: who does it may belong to none of the two yet, but the log of both has it."""
    of_project = None if project is None else project.id
    actor = replace(work.actor, organization_id=organization.id, project_id=of_project)
    return replace(work, actor=actor)


# Limits.


def own_limits(project: Project) -> Limits:
    return Limits(**project.limits or {})


def limits(project: Project, defaults: Limits) -> Limits:
    """Those that hold for the project: its own, then the operator's defaults."""
    return own_limits(project).or_else(defaults)


def set_limits(work: Work, project: Project, limits: Limits) -> None:
    """Instead of all those it had. What already runs goes on."""
    before, project.limits = own_limits(project).given(), limits.given() or None
    work.record("project.limits_changed", project.id, {"before": before, "after": limits.given()})


def refuse_job_beyond(session: Session, project_id: str, limits: Limits) -> None:
    """Call it when one more job has joined the queue, in that transaction: raised, it takes the job back.

    Raises:
        QuotaExceeded: one job too many waits, or no GPU time or grader tokens are left for it.
    """
    if (limits.queued_jobs, limits.gpu_seconds_per_30_days, limits.grader_tokens_per_30_days) == (None,) * 3:
        return
    _lock(session, project_id)
    if limits.queued_jobs is not None:
        before = _jobs(session, project_id, WAITING) - 1
        if before >= limits.queued_jobs:
            hint = "wait until one of them has started, or cancel one"
            raise QuotaExceeded("queued_jobs", used=before, maximum=limits.queued_jobs, hint=hint)
    if (beyond := used_up(session, project_id, limits)) is not None:
        raise beyond


def used_up(session: Session, project_id: str, limits: Limits) -> QuotaExceeded | None:
    """Which of the limits on GPU time and grader tokens the project has reached; None if it may go on."""
    if limits.gpu_seconds_per_30_days is None and limits.grader_tokens_per_30_days is None:
        return None
    used = usage_since(session, project_id)
    for name, amount, most in (
        ("gpu_seconds_per_30_days", used.gpu_seconds, limits.gpu_seconds_per_30_days),
        ("grader_tokens_per_30_days", used.grader_tokens, limits.grader_tokens_per_30_days),
    ):
        if most is not None and amount >= most:
            hint = "what was used 30 days ago is free again every day, or ask for more"
            return QuotaExceeded(name, used=round(amount, 1), maximum=most, hint=hint)
    return None


def free_storage(session: Session, project_id: str, limits: Limits, *, needed: int = 1) -> int | None:
    """The bytes the project may still store; None: any number.

    Raises:
        QuotaExceeded: fewer than `needed` are left.
    """
    if limits.storage_bytes is None:
        return None
    used = stored_bytes(session, project_id)
    if used + needed > limits.storage_bytes:
        hint = "what is to be stored does not fit; delete files, or send less"
        raise QuotaExceeded("storage_bytes", used=used, maximum=limits.storage_bytes, hint=hint)
    return limits.storage_bytes - used


def refuse_file_beyond(session: Session, project_id: str, limits: Limits, size: int) -> None:
    """Call it before a file of `size` bytes is added, in that transaction.

    Raises:
        QuotaExceeded: with it the project would store more than it may.
    """
    if limits.storage_bytes is not None:
        _lock(session, project_id)
        free_storage(session, project_id, limits, needed=size)


def refuse_upload_beyond(session: Session, project_id: str, most: int) -> None:
    """Call it before an upload in parts is announced, in that transaction.

    Raises:
        QuotaExceeded: the project has `most` uploads that are neither completed nor cancelled nor expired.
    """
    _lock(session, project_id)
    pending = session.scalars(select(func.count()).select_from(Upload).where(*_pending(project_id))).one()
    if pending >= most:
        hint = "complete or cancel some; each expires an hour after its creation"
        raise QuotaExceeded("pending_uploads", used=pending, maximum=most, hint=hint)


# Usage.


def usage_since(session: Session, project_id: str, days: int = WINDOW_DAYS) -> Usage:
    """What the project used today and on the `days - 1` days before."""
    recent = ProjectUsage.project_id == project_id, ProjectUsage.day > now() // DAY - days
    gpu_seconds, grader_tokens = session.execute(
        select(func.sum(ProjectUsage.gpu_seconds), func.sum(ProjectUsage.grader_tokens)).where(*recent)
    ).one()
    return Usage(float(gpu_seconds or 0), int(grader_tokens or 0))


def in_use(session: Session, project_id: str) -> dict[str, Any]:
    """What the project uses of each limit but the rate of its requests, by the limit's name."""
    used = usage_since(session, project_id)
    return {
        "running_jobs": _jobs(session, project_id, RUNNING),
        "queued_jobs": _jobs(session, project_id, WAITING),
        "storage_bytes": stored_bytes(session, project_id),
        "gpu_seconds_per_30_days": round(used.gpu_seconds, 1),
        "grader_tokens_per_30_days": used.grader_tokens,
    }


def stored_bytes(session: Session, project_id: str) -> int:
    """Of all its files that are not deleted, results too, and of its uploads in parts.

    A pending upload counts as what it announced, or as what it has received if that is more. Cancelled and expired
    uploads count their received bytes until deleted.
    """
    files = select(func.sum(File.bytes)).where(File.project_id == project_id, File.deleted_at.is_(None))
    received = select(func.coalesce(func.sum(UploadPart.bytes), 0)).where(UploadPart.upload_id == Upload.id)
    arrived = received.scalar_subquery()
    open_ = (Upload.status == "pending") & (Upload.expires_at > now())
    uploads = (
        select(case((open_ & (Upload.bytes > arrived), Upload.bytes), else_=arrived).label("bytes"))
        # The parts of a completed one are in its file, and deleted at once.
        .where(Upload.project_id == project_id, Upload.status != "completed")
        .where(open_ | select(UploadPart.seq).where(UploadPart.upload_id == Upload.id).exists())
        .subquery()
    )
    return sum(int(session.scalar(one) or 0) for one in (files, select(func.sum(uploads.c.bytes))))


def _pending(project_id: str) -> tuple[ColumnElement[bool], ...]:
    return Upload.project_id == project_id, Upload.status == "pending", Upload.expires_at > now()


def _jobs(session: Session, project_id: str, statuses: Sequence[str]) -> int:
    these = Job.project_id == project_id, Job.status.in_(statuses)
    return session.scalars(select(func.count()).select_from(Job).where(*these)).one()


def _lock(session: Session, project_id: str) -> None:
    """Until the commit. Not FOR UPDATE: every new row of the project refers to this one, and would wait, too."""
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))


def _named(name: str) -> str:
    if not name.strip() or len(name) > 64 or "\0" in name:
        raise InvalidRequest("A name has 1 to 64 characters.", param="name")
    return name.strip()
