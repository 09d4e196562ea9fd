"""The audit log, written in the transaction of the change that it records."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.pages import Page
from core.database.tables import AuditEntry, Project


@dataclass(frozen=True)
class Actor:
    """The author of a change: an API key with its request, or the operator."""

    id: str
    organization_id: str | None = None
    project_id: str | None = None
    request_id: str | None = None


OPERATOR = Actor("operator")


def operator_of(project: Project) -> Actor:
    """The operator, acting on one project, whose log then contains the change."""
    return Actor(OPERATOR.id, project.organization_id, project.id)


def record(
    session: Session, *, actor: Actor, action: str, target: str, data: dict[str, Any] | None = None
) -> None:
    """Append to the log of the actor's project. `data` contains no secrets and no content of datasets.

    Args:
        action: Resource and verb, such as "job.created".
        target: Id of the resource.
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


def delete_old(session: Session, before: float, most: int) -> int:
    """Delete entries from before this Unix time, at most `most`, and return their number.

    Looks at the oldest entries only: `created_at` has no index, and rises with `seq`.
    """
    oldest = select(AuditEntry.seq, AuditEntry.created_at).order_by(AuditEntry.seq).limit(most)
    old = [seq for seq, created_at in session.execute(oldest) if created_at < before]
    session.execute(delete(AuditEntry).where(AuditEntry.seq.in_(old)))
    return len(old)


def page_of(
    session: Session, project_id: str, actions: Collection[str], target: str, *, after: str | None, limit: int
) -> Page[AuditEntry]:
    """List the entries of a project with one of these actions on `target`, newest first."""
    entries = select(AuditEntry).where(
        AuditEntry.project_id == project_id, AuditEntry.action.in_(actions), AuditEntry.target == target
    )
    return pages.newest_first(session, entries, AuditEntry, after=after, limit=limit)


def page(
    session: Session, project_id: str | None = None, *, after: str | None = None, limit: int
) -> Page[AuditEntry]:
    """List entries newest first: those of a project, or all."""
    statement = select(AuditEntry)
    if project_id is not None:
        statement = statement.where(AuditEntry.project_id == project_id)
    return pages.newest_first(session, statement, AuditEntry, after=after, limit=limit)
