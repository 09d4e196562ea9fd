"""Rows with something sensible in every column; pass what the test is about."""

import time
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from core.database.engine import Send
from core.database.states import JOB
from core.database.tables import File, Job, Organization, Project, StepMetric

Row = TypeVar("Row")


def organization(session: Session, **fields: Any) -> Organization:
    return _stored(session, Organization(**{"name": "acme"} | fields))


def project(session: Session, **fields: Any) -> Project:
    """Of a new organization, unless told which."""
    if "organization_id" not in fields:
        fields["organization_id"] = organization(session).id
    return _stored(session, Project(**{"name": "support"} | fields))


def file(session: Session, project: Project, **fields: Any) -> File:
    defaults = {
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "bytes": 100,
        "sha256": "0" * 64,
        "blob_key": "files/train",
    }
    return _stored(session, File(project_id=project.id, **defaults | fields))


def job(session: Session, project: Project, **fields: Any) -> Job:
    """Queued unless told otherwise. In a state in which a worker holds it, it is held for a minute."""
    defaults: dict[str, Any] = {
        "model": "tiny",
        "training_file": "file-train",
        "seed": 1,
        "body": {"grader": {}, "hyperparameters": {}},
        "gpu_class": "cpu",
        "status": "queued",
    }
    if fields.get("status") in JOB.leased:
        defaults |= {"epoch": 1, "lease_owner": "worker", "lease_expires_at": time.time() + 60}
    owner = {"project_id": project.id, "organization_id": project.organization_id}
    return _stored(session, Job(**owner | defaults | fields))


def step(
    session: Session,
    job: Job,
    number: int,
    *,
    seconds: float = 1.0,
    eval: float = 0.0,
    tokens: int = 8,
    **more: Any,
) -> StepMetric:
    """A step that took `seconds`, `eval` of them for a validation, and sampled and learned from `tokens`."""
    data = {
        "step": number,
        "sampled_tokens": tokens,
        "trained_tokens": tokens,
        "completion_tokens_mean": tokens / 8,
        "timing": {"step": {"full_iteration": seconds, "eval": eval}},
    }
    row = StepMetric(job_id=job.id, step=number, epoch=job.epoch, data=data | more)
    return session.merge(row)


def _stored(session: Session, row: Row) -> Row:
    session.add(row)
    session.flush()
    return row


def noting(sent: list[tuple[str, str]]) -> Send:
    """What sends messages to workers, but only writes them down."""

    def send(task: str, queue: str, about: str = "") -> bool:
        sent.append((task, queue))
        return True

    return send
