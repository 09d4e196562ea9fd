"""A sample of the rows of a training file."""

import random

from core.database.tables import File
from core.errors import InvalidRequest
from core.jobs.job_files import in_words
from core.storage import datasets
from core.storage.datasets import Example, InvalidDataset, LineError
from core.storage.store import BlobStore


def draw_rows(blobs: BlobStore, file: File, count: int, seed: int) -> tuple[list[Example], int]:
    """A uniform sample of the rows, or all if there are fewer, and their number; only the chosen ones are held.

    Raises:
        InvalidRequest: a line of the file is invalid.
    """
    chosen: list[Example] = []
    draw = random.Random(f"{seed}/preview")
    total = 0
    for number, row in enumerate(datasets.read_rows(blobs.open(file.blob_key))):
        if isinstance(row, LineError):
            message = in_words(InvalidDataset([row]), blobs, file, "reinforcement", "training_file")
            raise InvalidRequest(message, param="training_file", code="invalid_training_file")
        total = number + 1
        if number < count:
            chosen.append(row)
        elif (place := draw.randrange(number + 1)) < count:
            chosen[place] = row
    return sorted(chosen, key=lambda row: row.line), total
