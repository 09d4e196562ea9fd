"""The result file of a job that ended, however it ended: one CSV row a step."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.claims import lock
from core.database import pages
from core.database.engine import Database
from core.database.ids import new_id
from core.database.tables import File, Job
from core.jobs import events, usage
from core.step_metrics import COLUMNS, OFFLINE_COLUMNS, StepMetrics
from core.storage.store import BlobStore


def to_csv(steps: Sequence[StepMetrics], verdict: Mapping[str, Any] | None = None) -> bytes:
    """Metrics of the steps, in order, as CSV with a header. Metrics that a step did not measure are blank.

    The columns `verdict/...` have the job's verdict in the row of the delivered step, and are blank in all others.
    """
    rows = [row(step) | _verdict(step, verdict) for step in steps]
    # Per-grader columns differ between steps with and without a validation, so the header is their union.
    header = list(dict.fromkeys(column for row in rows for column in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def row(step: StepMetrics) -> dict[str, Any]:
    """The step as a row of the file: column -> value, None for what was not measured."""
    columns = COLUMNS if step.offline is None else OFFLINE_COLUMNS[step.offline]
    row = {metric.name: metric.value(step) for metric in columns}
    sections = {"scores": step.scores, "errors": step.errors, "usage": step.usage, "timing": step.timing}
    for section, measured in sections.items():
        for grader in measured.graders:
            for field, value in grader.items():
                if field not in ("name", "type", "model", "weight"):
                    row[f"{section}/graders/{grader['type']}/{grader['name']}/{field}"] = value
    return row


def _verdict(step: StepMetrics, verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    if verdict is None or verdict["step"] != step.step:
        return {}
    return {f"verdict/{name}": value for name, value in verdict.items() if name != "step"}


def prepare(database: Database, blobs: BlobStore, job: Job) -> File | None:
    """Write the CSV of the job's steps to the blob store; None if no step was finished. Add its row with `attach`."""
    with database.read() as session:
        steps = events.metrics(session, job.id)
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


def attach(session: Session, job: Job, file: File | None) -> bool:
    """Make `file` the job's result file, and add up what its steps used. Returns False if the job has one already."""
    if file is None:
        return False
    lock(session, job)  # two reconcilers may have prepared one each
    if job.result_file is not None:
        return False
    pages.keep_order(session, file.project_id)
    session.add(file)
    job.result_file = file.id
    usage.settle(session, job)
    return True
