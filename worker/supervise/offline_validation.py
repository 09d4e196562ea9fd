"""validating_files of jobs that learn from the answers in a file: check every row, and report every bad line.

The order is OpenAI's: a file in the format of another method is reported as that, and only then its number of rows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from core.database.engine import Database
from core.database.tables import File, Job
from core.jobs import events, lifecycle
from core.jobs.claim import Claim
from core.jobs.methods import FORMATS, LOGITS, REWARD_MODEL, variant
from core.storage import files
from core.storage.datasets import Example, InvalidDataset, read_objects
from core.storage.offline_rows import FORMS, MAX_ROWS, MIN_ROWS, format_of, is_labeled, reward_kind
from core.storage.store import BlobNotFound, BlobStore
from worker.supervise.bad_files import BadFile, failed

LABELS = "labels"
# Formats that a variant reads, where it is not the one with the same name.
READ_BY: Mapping[str, tuple[str, ...]] = {REWARD_MODEL: (REWARD_MODEL, "dpo"), LOGITS: ("supervised",)}
# Rows that tell the format of a file.
FIRST_ROWS = 20


def validate_offline(
    database: Database,
    blobs: BlobStore,
    claim: Claim,
    job: Job,
    stored: Mapping[str, File],
    progressed: Callable[[], None],
) -> list[tuple[str, str]]:
    """Validate the files of a claimed job. Returns the (task, queue) pairs to notify.

    Args:
        stored: the files of the job's project by id.
        progressed: called for each row; may raise, to stop.
    """
    kind = variant(job.method, job.body)
    try:
        rows = checked(blobs, stored.get(job.training_file), kind, "training_file", progressed)
        if len(rows) < MIN_ROWS:
            raise BadFile(
                "training_file",
                f"Training file has {len(rows)} example(s), but must have at least {MIN_ROWS} examples",
                "invalid_n_examples",
            )
        valid_rows: list[Example] = []
        if job.validation_file is not None:
            found = stored.get(job.validation_file)
            valid_rows = checked(blobs, found, kind, "validation_file", progressed)
        if len(kinds := _kinds(kind, [*rows, *valid_rows])) > 1:
            raise BadFile("validation_file", f"One of the files has {kinds[0]}, and the other {kinds[1]}.")
        if kinds == [LABELS] and job.body["hyperparameters"]["advanced"]["loss"]["type"] != "kto":
            raise BadFile(
                "training_file",
                'Rows with one answer and its label need the loss kto: set advanced.loss to {"type": "kto"}, or give '
                "pairs.",
            )
    except BadFile as bad:
        return failed(database, claim, bad)
    learned = {json.dumps(row.item, sort_keys=True) for row in rows}
    shared = sum(json.dumps(row.item, sort_keys=True) in learned for row in valid_rows)
    with lifecycle.fenced(database, claim) as (session, held):
        if shared:
            events.append(
                session,
                held.id,
                f"{shared} of {len(valid_rows)} validation rows are training rows as well. Their loss does not measure "
                "generalization.",
                level="warn",
            )
        return [lifecycle.validated(session, held)]


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
    name = param.replace("_", " ")
    if file is None:
        raise BadFile(param, f"The {name} was deleted before it could be read.")

    def watched(row: Example) -> list[str]:
        progressed()
        return []

    try:
        refuse_other_format(blobs, file, variant, param)
        rows = files.read_rows(blobs, file, form=FORMS[variant], check=watched, max_rows=MAX_ROWS)
    except InvalidDataset as cause:
        raise BadFile(param, f"{name.capitalize()} {file.id}: {cause}") from cause
    except files.FileDamaged as damage:
        raise BadFile(param, str(damage)) from damage
    if len(kinds := _kinds(variant, rows)) > 1:
        raise BadFile(
            param, f"{name.capitalize()} {file.id} has rows with {' and with '.join(kinds)}; use one kind."
        )
    return rows


def _kinds(variant: str, rows: Sequence[Example]) -> list[str]:
    """Return what a job learns from these rows; methods with one kind of rows have none here."""
    if variant == REWARD_MODEL:
        return sorted({reward_kind(row.item) for row in rows})
    if variant == "dpo":
        return sorted({LABELS if is_labeled(row.item) else "pairs" for row in rows})
    return []


def refuse_other_format(blobs: BlobStore, file: File, variant: str, param: str) -> None:
    """Raise BadFile if the first rows are all in the format of another method."""
    try:
        rows = list(islice(read_objects(blobs.open(file.blob_key)), FIRST_ROWS))
    except BlobNotFound:
        return  # reported when the file is read
    found = {format_of(row[1]) for row in rows if isinstance(row, tuple)}
    [other] = found if len(found) == 1 else [None]
    if other is None or other in READ_BY.get(variant, (variant,)):
        return
    method = "distillation" if variant == LOGITS else variant
    raise BadFile(
        param,
        f"The job failed due to an invalid {param.replace('_', ' ')}. Invalid file format. Input file {file.id} is in "
        f"the {FORMATS[other]} format, but the specified fine-tuning job is not using '{other}' as the training method "
        f"(provided method={method}). ",
    )
