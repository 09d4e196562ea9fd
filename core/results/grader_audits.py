"""Stored audits of graders: runs in the background (core/results/background.py) with a report.

The report is also kept on each version of a stored grader with the same specification. Names of graders have no
influence on scores, so a job finds the audit of its grader by the specification without them.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work
from core.database.tables import GraderAudit, GraderVersion, StoredGrader
from core.errors import GraderAuditNotFound
from core.results import background
from core.results.grader_audit_report import GraderAuditReport

REPORT = TypeAdapter(GraderAuditReport)


def add(work: Work, audit: GraderAudit) -> None:
    """Add an audit that is about to run."""
    background.add(work.session, audit)
    work.record("grader_audit.created", audit.id, {"version": audit.version})


def get(session: Session, project_id: str, audit_id: str) -> GraderAudit:
    """Raises GraderAuditNotFound: the project has no such audit."""
    found = background.find(session, GraderAudit, project_id, audit_id)
    if found is None:
        raise GraderAuditNotFound(audit_id)
    return found


def complete(session: Session, audit_id: str, progress: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Store the report, also on the versions of this grader. Returns False if the audit was canceled or deleted."""
    if not background.complete(session, GraderAudit, audit_id, progress, {"report": dict(report)}):
        return False
    audit = session.scalars(select(GraderAudit).where(GraderAudit.id == audit_id)).one()
    mine = select(StoredGrader.id).where(StoredGrader.project_id == audit.project_id)
    kept = update(GraderVersion).where(
        GraderVersion.version == audit.version, GraderVersion.grader_id.in_(mine)
    )
    session.execute(kept.values(audit=summary(audit)).execution_options(synchronize_session=False))
    return True


def cancel(work: Work, audit: GraderAudit) -> None:
    """Cancel an audit. One that has ended stays as it is."""
    if background.cancel(work.session, audit):
        work.record("grader_audit.cancelled", audit.id)


def remove(work: Work, audit: GraderAudit) -> None:
    """Delete an audit. One in progress is canceled. Versions of stored graders keep its result."""
    pages.delete_row(work.session, audit, owner=audit.project_id)
    work.record("grader_audit.deleted", audit.id)


def newest(session: Session, project_id: str, behavior: str, training_sha256: str) -> GraderAudit | None:
    """The newest completed audit of this grader on a file with this content."""
    return session.scalar(
        select(GraderAudit)
        .where(
            GraderAudit.project_id == project_id,
            GraderAudit.training_sha256 == training_sha256,
            GraderAudit.behavior_sha256 == behavior,
            GraderAudit.status == background.COMPLETED,
        )
        .order_by(GraderAudit.seq.desc())
        .limit(1)
    )


def summary(audit: GraderAudit) -> dict[str, Any]:
    """The results that a version of a stored grader shows."""
    report = audit.report
    assert report is not None, "only completed audits have a summary"
    return {
        "id": audit.id,
        "created_at": audit.created_at,
        "verdict": report["verdict"],
        "sentence": report["sentence"],
        "false_positives": report["false_positives"],
        "mentions": report["mentions"],
        "false_negatives": report["false_negatives"],
        "correlation": report["sensitivity"]["correlation"],
    }


def sentence(audit: GraderAudit) -> str:
    """The result as an event of a job."""
    report = audit.report
    assert report is not None, "only completed audits have a result"
    return f"The audit {audit.id} of this grader on this file: {report['sentence']}"
