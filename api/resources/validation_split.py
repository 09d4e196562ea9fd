"""The `validation_split` of a job: two files made from its training file, which are files like any other."""

from dataclasses import dataclass
from functools import partial

from sqlalchemy import select

from api.http.deps import Service
from core.database.engine import Work
from core.database.tables import File, Project
from core.errors import ContentDamaged, InvalidRequest
from core.jobs.job_files import in_words
from core.storage import datasets, files, splitting
from core.storage.datasets import InvalidDataset
from core.storage.offline_rows import MAX_ROWS, MIN_ROWS
from core.storage.store import BlobNotFound
from core.tenancy import tenants


@dataclass(frozen=True)
class SplitFiles:
    """Files whose contents are stored and whose rows are not."""

    training: File
    validation: File

    def keys(self, *file_ids: str | None) -> list[str]:
        """The keys of the contents of those of the files, of both without an id."""
        both = (self.training, self.validation)
        return [file.blob_key for file in both if not file_ids or file.id in file_ids]


def split(
    service: Service, project: Project, file_id: str, share: float, method: str, *, learns_from_file: bool
) -> SplitFiles:
    """Store both parts of a training file. Reads the file three times, a line at a time.

    Raises:
        InvalidRequest: there is no such training file, it cannot be divided, or too few rows are left for training.
        ContentDamaged: its content is missing or damaged.
        QuotaExceeded: the storage of the project is used up.
    """
    with service.database.read() as session:
        tenants.free_storage(session, project.id, tenants.limits(project, service.settings.default_limits))
        source = files.get_dataset(session, project.id, file_id, param="training_file")
    read = partial(files.read_content, service.blobs, source)
    try:
        hashes = splitting.hashes_of(read())
        most = MAX_ROWS if learns_from_file else datasets.MAX_VALIDATION_ROWS
        chosen = splitting.choose(hashes, share, most)
        left = sum(one not in chosen for one in hashes)
        if method != "reinforcement":
            refuse_few_left(left, len(hashes), method)
        parts = (
            splitting.rows_of_split(read, hashes, chosen, is_validation=False),
            splitting.rows_of_split(read, hashes, chosen, is_validation=True),
        )
        stem = source.filename.removesuffix(".jsonl")
        names = (f"{stem}.{1 - share:.4g}.train.jsonl", f"{stem}.{share:.4g}.valid.jsonl")
        return SplitFiles(
            *(
                files.put(service.blobs, project.id, name, lines, expires_at=source.expires_at)
                for name, lines in zip(names, parts, strict=True)
            )
        )
    except InvalidDataset as invalid:
        message = in_words(invalid, service.blobs, source, method, "training_file")
        raise InvalidRequest(message, param="training_file", code="invalid_training_file") from None
    except (files.FileDamaged, BlobNotFound) as damage:
        raise ContentDamaged(str(damage)) from None


def refuse_few_left(left: int, rows: int, method: str) -> None:
    """Refuse a split of enough rows that leaves too few of them for training."""
    if left < MIN_ROWS <= rows:
        raise InvalidRequest(
            f"The split leaves {left} of {rows} rows for training, and a {method} job needs at least {MIN_ROWS}.",
            param="validation_split",
            code="invalid_n_examples",
        )


def added(work: Work, service: Service, project: Project, parts: SplitFiles) -> SplitFiles:
    """The rows of both files: earlier ones with the same content, or new ones.

    Raises:
        the errors of an upload beyond the project's storage.
    """
    return SplitFiles(
        _added(work, service, project, parts.training), _added(work, service, project, parts.validation)
    )


def _added(work: Work, service: Service, project: Project, file: File) -> File:
    earlier = work.session.scalar(
        select(File)
        .where(
            File.project_id == project.id,
            File.filename == file.filename,
            File.sha256 == file.sha256,
            File.purpose == file.purpose,
            File.deleted_at.is_(None),
            File.expires_at.is_(file.expires_at)
            if file.expires_at is None
            else File.expires_at == file.expires_at,
        )
        .order_by(File.seq)
        .limit(1)
    )
    if earlier is not None:
        return earlier
    limits = tenants.limits(project, service.settings.default_limits)
    tenants.refuse_file_beyond(work.session, project.id, limits, file.bytes)
    files.add(work, file)
    return file
