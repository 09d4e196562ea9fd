"""validating_files of jobs that learn from the answers in a file: check every row, and report every bad line.

The order is OpenAI's: a file in the format of another method is reported as that, and only then its number of rows.
"""

import json
from collections.abc import Callable, Mapping

from core.claims import Claim
from core.database.engine import Database, WakeMessage
from core.database.tables import File, Job
from core.jobs import events, job_files, lifecycle
from core.jobs.job_files import BadFile, kinds_of
from core.jobs.methods import variant
from core.jobs.verdict import NOT_HELD_OUT
from core.pipelines import lifecycle as pipelines
from core.storage import files
from core.storage.datasets import Example
from core.storage.offline_rows import FORMS, MAX_ROWS
from core.storage.store import BlobStore
from worker.refusals import UserMistake


def fail_for(database: Database, claim: Claim, mistake: BadFile | UserMistake) -> list[WakeMessage]:
    """Fail the job. Returns no wake-ups."""
    with lifecycle.fenced(database, claim) as (session, job):
        lifecycle.fail(session, job, code=mistake.code, message=mistake.message, param=mistake.param)
    return []


def validate_offline(
    database: Database,
    blobs: BlobStore,
    claim: Claim,
    job: Job,
    stored: Mapping[str, File],
    progressed: Callable[[], None],
) -> list[WakeMessage]:
    """Validate the files of a claimed job. Returns the wake-ups to send.

    Args:
        stored: the files of the job's project by id.
        progressed: called for each row; may raise, to stop.
    """
    kind = variant(job.method, job.body)
    try:
        rows = checked(blobs, stored.get(job.training_file), kind, "training_file", progressed)
        job_files.refuse_few_rows(len(rows))
        valid_rows: list[Example] = []
        if job.validation_file is not None:
            found = stored.get(job.validation_file)
            valid_rows = checked(blobs, found, kind, "validation_file", progressed)
        job_files.refuse_other_kinds(kinds_of(kind, [*rows, *valid_rows]), job.body["hyperparameters"])
    except BadFile as bad:
        return fail_for(database, claim, bad)
    learned = {json.dumps(row.item, sort_keys=True) for row in rows}
    shared = sum(json.dumps(row.item, sort_keys=True) in learned for row in valid_rows)
    with lifecycle.fenced(database, claim) as (session, held):
        if held.validation_file == held.training_file:
            events.append(session, held.id, NOT_HELD_OUT, level="warn")
        elif shared:
            events.append(
                session,
                held.id,
                f"{shared} of {len(valid_rows)} validation rows are training rows as well. Their loss does not measure "
                "generalization.",
                level="warn",
            )
        return pipelines.validated(session, held)


def checked(
    blobs: BlobStore,
    file: File | None,
    variant: str,
    param: str,
    progressed: Callable[[], None] = lambda: None,
) -> list[Example]:
    """Return the rows of a valid file.

    Raises:
        BadFile: it was deleted or damaged, has the format of another method, or has bad lines.
    """
    if file is None:
        raise BadFile(param, f"The {param.replace('_', ' ')} was deleted before it could be read.")

    def watched(row: Example) -> list[str]:
        progressed()
        return []

    with job_files.problems_of(blobs, file, variant, param):
        job_files.refuse_other_format(blobs, file, variant, param)
        rows = files.read_rows(blobs, file, form=FORMS[variant], check=watched, max_rows=MAX_ROWS)
    job_files.refuse_several_kinds(file, param, kinds_of(variant, rows))
    return rows
