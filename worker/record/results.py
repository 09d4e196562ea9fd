"""The result file of a job that ended, however it ended: one CSV row a step."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Database
from core.database.ids import new_id
from core.database.tables import File, Job
from core.jobs import events, usage
from core.storage.store import BlobStore

_COLUMNS = {
    "train_mean_reward": ("train_mean_reward",),
    "full_valid_mean_reward": ("full_valid_mean_reward",),
    "full_valid_stderr": ("full_valid_stderr",),
    "full_valid_difference": ("full_valid_difference",),
    "full_valid_difference_low": ("full_valid_difference_low",),
    "full_valid_difference_high": ("full_valid_difference_high",),
    "full_valid_mean_parse_error": ("full_valid_mean_parse_error",),
    "completion_tokens_mean": ("completion_tokens_mean",),
    "mean_unresponsive_rewards": ("mean_unresponsive_rewards",),
    "truncated_share": ("truncated_share",),
    "groups_mixed_share": ("groups_mixed_share",),
    "groups_all_zero_share": ("groups_all_zero_share",),
    "groups_all_one_share": ("groups_all_one_share",),
    "loss": ("loss",),
    "kl": ("kl",),
    "entropy": ("entropy",),
    "sampling_entropy": ("sampling_entropy",),
    "clip_fraction": ("clip_fraction",),
    "grad_norm": ("grad_norm",),
    "logprob_gap": ("logprob_gap",),
    "logprob_gap_max": ("logprob_gap_max",),
    "logprob_gap_k1": ("logprob_gap_k1",),
    "logprob_gap_k3": ("logprob_gap_k3",),
    "logprob_gap_ess": ("logprob_gap_ess",),
    "sampling_duration": ("timing", "step", "sampling"),
    "grading_duration": ("timing", "step", "grading"),
    "training_duration": ("timing", "step", "training"),
    "eval_duration": ("timing", "step", "eval"),
    "total_duration": ("timing", "step", "full_iteration"),
}


def to_csv(steps: list[dict[str, Any]], verdict: Mapping[str, Any] | None = None) -> bytes:
    """Metrics of the steps, in order, as CSV with a header. What a step did not measure is blank.

    The job's verdict stands in columns `verdict/...` of the row of the delivered step, and only there.
    """
    rows = [row(step) | _verdict(step, verdict) for step in steps]
    # Per-grader columns differ between steps with and without a validation, so the header is their union.
    header = list(dict.fromkeys(column for row in rows for column in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def row(data: Mapping[str, Any]) -> dict[str, Any]:
    """The step as a row of the file: column -> value, None for what was not measured."""
    row = {"step": data["step"]} | {column: _dig(data, path) for column, path in _COLUMNS.items()}
    for section in ("scores", "errors", "usage", "timing"):
        for grader in data.get(section, {}).get("graders", []):
            for field, value in grader.items():
                if field not in ("name", "type", "model"):
                    row[f"{section}/graders/{grader['type']}/{grader['name']}/{field}"] = value
    return row


def _verdict(step: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    if verdict is None or verdict["step"] != step["step"]:
        return {}
    return {f"verdict/{name}": value for name, value in verdict.items() if name != "step"}


def _dig(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def prepare(database: Database, blobs: BlobStore, job: Job) -> File | None:
    """Write the CSV of the job's steps to the blob store; None if no step was finished. Add its row with `attach`."""
    with database.read() as session:
        steps = [row.data for row in events.steps(session, job.id)]
        verdict = session.scalars(select(Job.verdict).where(Job.id == job.id)).one()
    if not steps:
        return None
    file_id = new_id("file-", 22)
    info = blobs.put_bytes(f"projects/{job.project_id}/files/{file_id}", to_csv(steps, verdict))
    return File(
        id=file_id,
        project_id=job.project_id,
        filename="step_metrics.csv",
        purpose="fine-tune-results",
        bytes=info.size,
        sha256=info.sha256,
        blob_key=info.key,
    )


def attach(session: Session, job: Job, file: File | None) -> None:
    """Make `file` the job's result file, and add up what its steps used."""
    if file is None or job.result_file is not None:
        return
    pages.keep_order(session, file.project_id)
    session.add(file)
    job.result_file = file.id
    usage.settle(session, job)
