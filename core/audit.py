"""Who changed what, written in the transaction of the change: the log has it exactly when it happened."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core import pages
from core.models import AuditEntry, Project
from core.pages import Page


@dataclass(frozen=True)
class Actor:
    """On whose behalf something changes: an API key, in the request it came with, or the operator."""

    id: str
    organization_id: str | None = None
    project_id: str | None = None
    request_id: str | None = None


OPERATOR = Actor("operator")


def operator_of(project: Project) -> Actor:
    """The operator, at work on one project: the project's own log shows it."""
    return Actor(OPERATOR.id, project.organization_id, project.id)


def record(
    session: Session, *, actor: Actor, action: str, target: str, data: dict[str, Any] | None = None
) -> None:
    """Add a line to the log of the actor's project. `data` holds no secret and nothing of a dataset.

    Args:
        action: What happened to what, such as "job.created".
        target: The id of that.
    """
    session.add(
        AuditEntry(
            organization_id=actor.organization_id,
            project_id=actor.project_id,
            actor=actor.id,
            action=action,
            target=target[:512],
            request_id=actor.request_id,
            data=data or {},
        )
    )


def page(
    session: Session, project_id: str | None = None, *, after: str | None = None, limit: int
) -> Page[AuditEntry]:
    """Newest first: the project's log, or without a project all there is."""
    statement = select(AuditEntry)
    if project_id is not None:
        statement = statement.where(AuditEntry.project_id == project_id)
    return pages.newest_first(session, statement, AuditEntry, after=after, limit=limit)
