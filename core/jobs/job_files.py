"""The files of jobs that learn from the answers in them: which rows make a file unusable."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from core.database.tables import File
from core.jobs.methods import FORMATS, LOGITS, REWARD_MODEL
from core.storage import datasets, files
from core.storage.datasets import Example, InvalidDataset, read_objects
from core.storage.foreign_files import FIRST_ROWS
from core.storage.offline_rows import (
    FORMS,
    MAX_ROWS,
    MIN_ROWS,
    ROWS_OF,
    explained,
    format_of,
    is_labeled,
    method_of,
    remedy,
    reward_kind,
)
from core.storage.store import BlobNotFound, BlobStore

LABELS = "labels"


class BadFile(Exception):
    """The job fails with this message and code; `param` names the file."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.message = param, message
        self.code = code or f"invalid_{param}"


@dataclass(frozen=True)
class CountedRows:
    """The number of rows of a valid file, and what a job learns from them (`kinds_of`)."""

    number: int
    kinds: tuple[str, ...]


def count_rows(blobs: BlobStore, file: File, variant: str, param: str) -> CountedRows:
    """Check every row of a file, one at a time.

    Raises:
        BadFile: it has the format of another method, bad lines, or rows of several kinds, or its content is missing.
    """
    with problems_of(blobs, file, variant, param):
        refuse_other_format(blobs, file, variant, param)
        try:
            counted = _counted(cast(Hashable, blobs), file.blob_key, file.sha256, variant)
        except BlobNotFound:
            raise files.FileDamaged(file, files.MISSING) from None
    refuse_several_kinds(file, param, counted.kinds)
    return counted


# A form requests an estimate after each change, and a million rows take about 15 seconds. Errors are not kept.
@lru_cache(maxsize=256)
def _counted(blobs: BlobStore, blob_key: str, sha256: str, variant: str) -> CountedRows:
    kinds: set[str] = set()

    def noted(row: Example) -> list[str]:
        kinds.update(kinds_of(variant, [row]))
        return []

    chunks = blobs.open(blob_key)
    number = datasets.count_examples(chunks, form=FORMS[variant], check=noted, max_rows=MAX_ROWS)
    return CountedRows(number, tuple(sorted(kinds)))


@contextmanager
def problems_of(blobs: BlobStore, file: File, variant: str, param: str) -> Iterator[None]:
    """Raise the problems of a file's rows and content as BadFile."""
    try:
        yield
    except InvalidDataset as cause:
        raise BadFile(param, in_words(cause, blobs, file, variant, param)) from cause
    except files.FileDamaged as damage:
        raise BadFile(param, str(damage)) from damage


def in_words(invalid: InvalidDataset, blobs: BlobStore, file: File, variant: str, param: str) -> str:
    """The errors of a file in a job of this variant, as `explained` puts them, after the name of the file."""
    errors = explained(invalid, lambda: blobs.open(file.blob_key), variant, file.filename)
    return f"{_name(param).capitalize()} {file.id} ({file.filename}): {errors}"


def kinds_of(variant: str, rows: Iterable[Example]) -> list[str]:
    """Return what a job learns from these rows; methods with one kind of rows have none here."""
    if variant == REWARD_MODEL:
        return sorted({reward_kind(row.item) for row in rows})
    if variant == "dpo":
        return sorted({LABELS if is_labeled(row.item) else "pairs" for row in rows})
    return []


def refuse_several_kinds(file: File, param: str, kinds: Collection[str]) -> None:
    if len(kinds) > 1:
        found = " and with ".join(sorted(kinds))
        raise BadFile(param, f"{_name(param).capitalize()} {file.id} has rows with {found}; use one kind.")


def refuse_few_rows(number: int) -> None:
    """Raise BadFile, in OpenAI's words, for a training file of fewer rows than it takes."""
    if number < MIN_ROWS:
        raise BadFile(
            "training_file",
            f"Training file has {number} example(s), but must have at least {MIN_ROWS} examples",
            "invalid_n_examples",
        )


def refuse_other_kinds(kinds: Collection[str], hyperparameters: Mapping[str, Any]) -> None:
    """Raise BadFile if the two files have different kinds of rows, labels that the loss does not read, or scores that
    the step trust region does not.

    Args:
        kinds: of the rows of both files.
        hyperparameters: as the job stores them.
    """
    found = sorted(set(kinds))
    if len(found) > 1:
        raise BadFile("validation_file", f"One of the files has {found[0]}, and the other {found[1]}.")
    if found == [LABELS] and hyperparameters["advanced"]["loss"]["type"] != "kto":
        raise BadFile(
            "training_file",
            'Rows with one answer and its label need the loss kto: set advanced.loss to {"type": "kto"}, or give '
            "pairs.",
        )
    if found == ["scores"] and hyperparameters["advanced"]["optimizer"]["step_kl"]:
        raise BadFile(
            "training_file",
            "A reward model of scores has no step trust region, because its predictions have no probabilities: leave "
            "out advanced.optimizer.step_kl, or give pairs or steps.",
        )


def refuse_other_format(blobs: BlobStore, file: File, variant: str, param: str) -> None:
    """Raise BadFile if the first rows are all in the format of another method."""
    try:
        rows = list(islice(read_objects(blobs.open(file.blob_key)), FIRST_ROWS))
    except BlobNotFound:
        return  # reported when the file is read
    read = [row[1] for row in rows if isinstance(row, tuple)]
    found, methods = {format_of(row) for row in read}, {method_of(row) for row in read}
    [other] = found if len(found) == 1 else [None]
    if other is None or other in ROWS_OF[variant]:
        return
    method = "distillation" if variant == LOGITS else variant
    [made_for] = methods if len(methods) == 1 else [None]  # prompts have the format of conversations
    raise BadFile(
        param,
        f"The job failed due to an invalid {_name(param)}. Invalid file format. Input file {file.id} is in "
        f"the {FORMATS[other]} format, but the specified fine-tuning job is not using '{other}' as the training method "
        f"(provided method={method}). {remedy(made_for or other, variant)}",
    )


def _name(param: str) -> str:
    return param.replace("_", " ")
