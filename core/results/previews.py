"""Stored previews: a row for each, with its progress, its report and its answers.

The API process that received the request runs the preview (api/resources/previews.py) and renews its lease, by the
clock of the database. A preview whose lease has expired lost its process, and counts as failed.

Two requests are of one kind if their `parts` are equal: hashes of the model, of the content of the training file, of
the grader and of the settings of sampling. A job shows the newest completed preview of its kind.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, or_, select, update
from sqlalchemy.orm import Session, object_session

from core.database import pages
from core.database.engine import Work, db_now
from core.database.pages import Page
from core.database.tables import Preview, now
from core.errors import InvalidRequest, PreviewNotFound
from core.jobs.hyperparameters import Resolved
from core.model_checks import source_of
from core.registry import BaseModelEntry

IN_PROGRESS, COMPLETED, FAILED, CANCELED = "in_progress", "completed", "failed", "canceled"
LEASE_SECONDS = 30.0
MAX_KEPT = 200  # previews of a project; a new one deletes the oldest beyond these
INTERRUPTED = {
    "message": "The server that ran this preview was stopped. Create it again.",
    "type": "server_error",
    "param": None,
    "code": "interrupted",
    "status": 503,
}


@dataclass(frozen=True)
class PreviewResults:
    """The results of a completed preview, as the row stores them."""

    report: dict[str, Any]
    measured: dict[str, Any]
    answers: list[dict[str, Any]]


def parts(**values: Any) -> dict[str, str]:
    """The hash of each part of a request, by its name."""
    return {name: _hash(value) for name, value in values.items()}


def parts_of(
    model: str, entry: BaseModelEntry, method: Mapping[str, Any], settings: Resolved, training_sha256: str
) -> dict[str, str]:
    """The parts of a request for a reinforcement job.

    Args:
        model: as the request names it.
        method: the object of the method, as the job stores it.
        settings: resolved for the model; the number of rows does not matter.
    """
    return parts(
        model=[model, source_of(entry), entry.dtype, entry.context, entry.chat_template],
        training_file=training_sha256,
        grader=[method["grader"], settings.supervision],
        sampling=[
            settings.temperature,
            settings.max_completion_tokens,
            method["hyperparameters"]["reasoning_effort"],
            settings.chat_template,
            settings.chat_template_kwargs,
            settings.thinking_budget,
        ],
        response_format=method["response_format"],
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def add(work: Work, preview: Preview) -> None:
    """Add a preview that is about to run, and delete the oldest ended ones beyond MAX_KEPT."""
    session = work.session
    pages.keep_order(session, preview.project_id)
    preview.lease_expires_at = session.scalars(select(db_now())).one() + LEASE_SECONDS
    session.add(preview)
    session.flush()
    work.record("preview.created", preview.id, {"model": preview.request["model"]})
    beyond = session.scalars(
        select(Preview)
        .where(Preview.project_id == preview.project_id, _ended())
        .order_by(Preview.seq.desc())
        .offset(MAX_KEPT - 1)
    )
    for old in beyond.all():
        pages.delete_row(session, old, owner=old.project_id)


def get(session: Session, project_id: str, preview_id: str) -> Preview:
    """Raises PreviewNotFound: the project has no such preview."""
    found = session.scalar(select(Preview).where(Preview.id == preview_id, Preview.project_id == project_id))
    if found is None:
        raise PreviewNotFound(preview_id)
    return found


def page(session: Session, project_id: str, *, after: str | None, limit: int) -> Page[Preview]:
    """Newest first."""
    statement = select(Preview).where(Preview.project_id == project_id)
    return pages.newest_first(session, statement, Preview, after=after, limit=limit, owner=project_id)


def answers(session: Session, preview: Preview) -> list[dict[str, Any]]:
    """The graded answers of a completed preview, by row; empty otherwise."""
    return session.scalar(select(Preview.answers).where(Preview.id == preview.id)) or []


def status_of(preview: Preview) -> str:
    return FAILED if _is_lost(preview) else preview.status


def error_of(preview: Preview) -> dict[str, Any] | None:
    return INTERRUPTED if _is_lost(preview) else preview.error


def _is_lost(preview: Preview) -> bool:
    if preview.status != IN_PROGRESS:
        return False
    session = object_session(preview)
    assert session is not None, "a preview is shown in the session that has read it"
    return session.scalar(select(Preview.id).where(Preview.id == preview.id, _ended())) is not None


def _ended() -> ColumnElement[bool]:
    """Whether a preview has ended or its lease has. A lease beyond the next is from before the clock was set back."""
    held = Preview.lease_expires_at.between(db_now(), db_now() + 2 * LEASE_SECONDS)
    return or_(Preview.status != IN_PROGRESS, ~held)


def renew(session: Session, preview_id: str, progress: Mapping[str, Any]) -> bool:
    """Write the progress. Returns False if the preview was canceled or deleted."""
    values = {"progress": dict(progress), "lease_expires_at": db_now() + LEASE_SECONDS}
    return _change(session, preview_id, values)


def complete(
    session: Session, preview_id: str, progress: Mapping[str, Any], finished: PreviewResults
) -> bool:
    """Store the results. Returns False if the preview was canceled or deleted meanwhile."""
    values = {**vars(finished), "progress": dict(progress), "status": COMPLETED, "finished_at": now()}
    return _change(session, preview_id, values)


def fail(session: Session, preview_id: str, error: Mapping[str, Any]) -> bool:
    return _change(session, preview_id, {"error": dict(error), "status": FAILED, "finished_at": now()})


def cancel(work: Work, preview: Preview) -> None:
    """Cancel a preview; its process notices within a second. One that has ended stays as it is."""
    if _change(work.session, preview.id, {"status": CANCELED, "finished_at": now()}):
        work.record("preview.cancelled", preview.id)
    work.session.refresh(preview)


def remove(work: Work, preview: Preview) -> None:
    """Delete a preview. One in progress is canceled."""
    pages.delete_row(work.session, preview, owner=preview.project_id)
    work.record("preview.deleted", preview.id)


def delete_old(session: Session, before: float, most: int) -> int:
    """Delete at most `most` previews that ended before this Unix time, and return their number."""
    lost = (Preview.status == IN_PROGRESS) & (Preview.lease_expires_at < before)
    ended = or_(Preview.finished_at < before, lost)
    old = session.scalars(select(Preview.id).where(ended).limit(most)).all()
    session.execute(delete(Preview).where(Preview.id.in_(old)))
    return len(old)


def _change(session: Session, preview_id: str, values: dict[str, Any]) -> bool:
    change = update(Preview).where(Preview.id == preview_id, Preview.status == IN_PROGRESS).values(**values)
    changed = session.execute(change.execution_options(synchronize_session=False))
    return bool(changed.rowcount)  # type: ignore[attr-defined]


def has_some(session: Session, project_id: str, training_sha256: str) -> bool:
    """Whether the project has a completed preview of a file with this content."""
    return session.scalar(_completed(project_id, training_sha256).limit(1)) is not None


def matching(
    session: Session, project_id: str, training_sha256: str, wanted: Mapping[str, str]
) -> Preview | None:
    """The newest completed preview whose request has these parts."""
    statement = _completed(project_id, training_sha256).order_by(Preview.seq.desc())
    return next((one for one in session.scalars(statement) if one.parts == wanted), None)


def sampled(
    session: Session,
    project_id: str,
    training_sha256: str,
    wanted: Mapping[str, str],
    drawn: Mapping[str, int],
) -> Preview | None:
    """The newest completed preview that sampled the same answers: of equal parts but the grader, and as many of the
    same rows with the same seed. Its answers are loaded.
    """
    statement = _completed(project_id, training_sha256).order_by(Preview.seq.desc())
    for one in session.scalars(statement):
        same = all(one.parts.get(name) == value for name, value in wanted.items() if name != "grader")
        if same and all(one.request[name] == value for name, value in drawn.items()):
            session.refresh(one, ["answers"])  # of this one only: those of all previews may be gigabytes
            return one
    return None


def _completed(project_id: str, training_sha256: str) -> Select[Preview]:
    return select(Preview).where(
        Preview.project_id == project_id,
        Preview.training_sha256 == training_sha256,
        Preview.status == COMPLETED,
    )


def preview_of_job(session: Session, project_id: str, preview_id: str, wanted: Mapping[str, str]) -> Preview:
    """The preview that a job names.

    Raises:
        InvalidRequest: there is none, it has no report, or its request differs.
    """
    try:
        found = get(session, project_id, preview_id)
    except PreviewNotFound as missing:
        raise InvalidRequest(missing.message, param="preview") from None
    if found.status != COMPLETED:
        raise InvalidRequest(f"The preview {preview_id} is not completed.", param="preview")
    if other := [name for name, value in wanted.items() if found.parts.get(name) != value]:
        raise InvalidRequest(
            f"The preview {preview_id} has another request: it differs in {_listed(other)}. Leave 'preview' out, or "
            "preview this request.",
            param="preview",
        )
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)


def summary(preview: Preview) -> dict[str, Any]:
    """The results that a job and an estimate show of the preview of their request."""
    report = preview.report
    assert report is not None, "only completed previews have a summary"
    [own] = [signal for signal in report["signal"] if signal["group_size"] == report["group_size"]]
    return {
        "id": preview.id,
        "created_at": preview.created_at,
        "answers": report["answers"],
        "passed": report["passed"],
        "mean_reward": report["mean_reward"],
        "signal": own["share"]["expected"],
        "verdict": report["verdict"],
    }


def sentence(summary: Mapping[str, Any]) -> str:
    """The summary as an event of a job."""
    mean = (
        "none could be graded"
        if summary["mean_reward"] is None
        else f"mean reward {summary['mean_reward']:.2f}"
    )
    return (
        f"The preview {summary['id']} of this request: {summary['passed']} of {summary['answers']} answers pass, "
        f"{mean}, groups with signal {100 * summary['signal']:.0f} %: {summary['verdict'].replace('_', ' ')}."
    )
