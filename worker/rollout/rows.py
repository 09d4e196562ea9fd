"""The rows of a job's training and validation files."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.tables import File
from core.jobs import methods, tools
from core.storage import datasets, files
from core.storage.datasets import Example
from core.storage.offline_rows import FORMS
from worker.attempt import Attempt
from worker.refusals import UserMistake


@dataclass(frozen=True)
class Rows:
    train: list[Example]
    valid: list[Example]


def read_rows(attempt: Attempt) -> Rows:
    """Read the files of the job, with the functions that its tools bring along.

    Only a job that learns from its rows may have no validation file.

    Raises:
        UserMistake: one of them was deleted or is damaged.
    """
    job = attempt.job
    form = FORMS.get(methods.variant(job.method, job.body), datasets.PROMPTS)
    train = read_file(attempt, "training_file", job.training_file, form)
    valid = []
    if job.validation_file is not None:
        valid = read_file(attempt, "validation_file", job.validation_file, form)
    return Rows(tools.with_functions(job.body, train), tools.with_functions(job.body, valid))


def read_file(attempt: Attempt, param: str, file_id: str, form: datasets.RowForm) -> list[Example]:
    """Read one file of the job. Raises UserMistake as `read_rows` does."""
    of_project = select(File).where(File.id == file_id, File.project_id == attempt.job.project_id)

    def find_file(session: Session) -> File | None:
        return session.scalar(of_project)

    file = attempt.read(find_file)
    if file is None:
        raise UserMistake(f"invalid_{param}", f"The file {file_id} was deleted.", param)
    try:
        return attempt.retry(lambda: files.read_rows(attempt.blobs, file, form=form))
    except (files.FileDamaged, datasets.InvalidDataset) as cause:
        raise UserMistake(f"invalid_{param}", str(cause), param) from cause
