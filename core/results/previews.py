"""Stored previews: runs in the background (core/results/background.py) with the answers and their grades.

Two requests are of one kind if their `parts` are equal: hashes of the model, of the content of the training file, of
the grader without names and of the settings of sampling. A job shows the newest completed preview of its kind.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work
from core.database.tables import Preview
from core.errors import InvalidRequest, PreviewNotFound
from core.jobs.hyperparameters import Resolved
from core.model_checks import source_of
from core.registry import BaseModelEntry
from core.results import background
from core.stored_graders import behavior_of


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
        grader=[behavior_of(method["grader"]), settings.supervision],
        sampling=[
            settings.temperature,
            settings.max_completion_tokens,
            method["hyperparameters"]["reasoning_effort"],
            settings.chat_template,
            settings.chat_template_kwargs,
            settings.thinking_budget,
        ],
        response_format=method["response_format"],
        tools=[
            method.get("max_episode_steps"),
            # Without headers, which are secrets.
            *({**tool, "headers": None} for tool in method.get("tools") or ()),
        ],
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def add(work: Work, preview: Preview) -> None:
    """Add a preview that is about to run."""
    background.add(work.session, preview)
    work.record("preview.created", preview.id, {"model": preview.request["model"]})


def get(session: Session, project_id: str, preview_id: str) -> Preview:
    """Raises PreviewNotFound: the project has no such preview."""
    found = background.find(session, Preview, project_id, preview_id)
    if found is None:
        raise PreviewNotFound(preview_id)
    return found


def answers(session: Session, preview: Preview) -> list[dict[str, Any]]:
    """The graded answers of a completed preview, by row; empty otherwise."""
    return session.scalar(select(Preview.answers).where(Preview.id == preview.id)) or []


def complete(
    session: Session, preview_id: str, progress: Mapping[str, Any], finished: PreviewResults
) -> bool:
    """Store the results. Returns False if the preview was canceled or deleted meanwhile."""
    return background.complete(session, Preview, preview_id, progress, vars(finished))


def cancel(work: Work, preview: Preview) -> None:
    """Cancel a preview. One that has ended stays as it is."""
    if background.cancel(work.session, preview):
        work.record("preview.cancelled", preview.id)


def remove(work: Work, preview: Preview) -> None:
    """Delete a preview. One in progress is canceled."""
    pages.delete_row(work.session, preview, owner=preview.project_id)
    work.record("preview.deleted", preview.id)


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
        Preview.status == background.COMPLETED,
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
    if found.status != background.COMPLETED:
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
