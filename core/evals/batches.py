"""Batches: the requests of a file, answered in the background (docs/howto/batches.md).

A batch is an eval run without criteria whose rows are requests, so a worker claims, resumes and records it as one
(core/evals/lifecycle.py). It belongs to no eval: its `eval_id` names the batches of its project. Once it has ended, its
items are replaced by the output file and the error file.
"""

import heapq
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Database, Work
from core.database.ids import new_id
from core.database.pages import Page
from core.database.states import EVAL_RUN
from core.database.tables import EvalJournal, EvalPage, EvalRun, File, now
from core.errors import BatchNotFound
from core.evals import items, lifecycle, summary
from core.evals.items import MAX_ROWS
from core.evals.rows import EvalRow
from core.outbound import webhooks
from core.storage import files
from core.storage.datasets import LineError, read_objects
from core.storage.store import BlobNotFound, BlobStore
from core.text import storable_json

log = logging.getLogger(__name__)

SOURCE = "regraft.batch"
PURPOSE, OUTPUT = "batch", "batch_output"
WINDOW_SECONDS = 24 * 3600
INVALID_INPUT = "invalid_input"  # the error of a batch whose input file is invalid
MAX_ERRORS = 100  # that a batch lists
MAX_CUSTOM_ID = MAX_MODEL = 512  # characters
KEYS = ("custom_id", "method", "url", "body")

Endpoint = Literal["/v1/chat/completions", "/v1/responses"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


@dataclass(frozen=True)
class PreparedRequest:
    """One request as the inference server reads it, and the response of the endpoint to its chat completion."""

    chat: Mapping[str, Any]  # without `model`
    response: Callable[[dict[str, Any]], dict[str, Any]]


def full_path(url: Any) -> Any:
    """The path of an endpoint that may lack the version, as Azure's examples have it: `/chat/completions`."""
    return f"/v1{url}" if isinstance(url, str) and f"/v1{url}" in get_args(Endpoint) else url


# Raises ServiceError for a body that the endpoint refuses.
Prepare = Callable[[Endpoint, dict[str, Any]], PreparedRequest]


# The input file.


@dataclass(frozen=True)
class RequestError(LineError):
    """A line that is no request of its batch; `path` is the parameter."""

    code: str = "invalid_request"


def requests(chunks: Iterable[bytes], endpoint: Endpoint) -> Iterator[EvalRow | LineError]:
    """The requests of an input file. Bodies are checked when they are answered, each by itself."""
    for row in read_objects(chunks):
        yield (
            RequestError(row.line, row.message, code="invalid_json_line")
            if isinstance(row, LineError)
            else _request(*row, endpoint)
        )


def _request(line: int, sent: dict[str, Any], endpoint: Endpoint) -> EvalRow | RequestError:
    for name in KEYS:
        if name not in sent:
            return RequestError(line, "is missing", name, code="missing_required_parameter")
    custom_id = sent["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        problem = f"must be a string of 1 to {MAX_CUSTOM_ID} characters"
        return RequestError(line, problem, "custom_id", code="invalid_custom_id")
    if sent["method"] != "POST":
        return RequestError(line, "must be 'POST'", "method", code="invalid_method")
    if full_path(sent["url"]) != endpoint:
        problem = f"must be the endpoint of the batch, '{endpoint}'"
        return RequestError(line, problem, "url", code="mismatched_url")
    if not isinstance(sent["body"], dict):
        return RequestError(line, "must be an object", "body", code="invalid_type")
    model = sent["body"].get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL:
        return RequestError(line, "must name a model", "body.model", code="missing_required_parameter")
    return EvalRow(line, {name: sent[name] for name in KEYS} | {"url": endpoint})


@dataclass
class Checked:
    """The result of the check of an input file. `model` is the one of all requests."""

    total: int = 0
    model: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)

    def refuse(self, code: str, message: str, *, line: int | None = None, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "line": line, "param": param})


def check(found: Iterable[EvalRow | LineError]) -> Checked:
    """Check the lines of an input file, up to the first MAX_ERRORS wrong ones."""
    checked, lines = Checked(), dict[str, int]()
    for row in found:
        if len(checked.errors) >= MAX_ERRORS:
            break
        if isinstance(row, RequestError):
            subject = f"'{row.path}' " if row.path else "The line "
            checked.refuse(row.code, f"{subject}{row.message}.", line=row.line, param=row.path or None)
            continue
        assert isinstance(row, EvalRow)
        checked.total += 1
        if checked.total > MAX_ROWS:
            checked.refuse("too_many_requests", f"A batch has at most {MAX_ROWS} requests.", line=row.line)
            break
        custom_id, model = row.item["custom_id"], row.item["body"]["model"]
        if (earlier := lines.setdefault(custom_id, row.line)) != row.line:
            message = f"The custom_id {custom_id!r} is already that of line {earlier}."
            checked.refuse("duplicate_custom_id", message, line=row.line, param="custom_id")
        checked.model = checked.model or model
        if model != checked.model:
            message = f"All requests of a batch name one model, and the first one names {checked.model!r}."
            checked.refuse("mismatched_model", message, line=row.line, param="body.model")
    if not checked.total and not checked.errors:
        checked.refuse("empty_file", "The input file has no requests.")
    return checked


# The row.


def new(project_id: str, checked: Checked, *, metadata: dict[str, str] | None, **source: Any) -> EvalRun:
    """A batch that waits for a worker, or one that has failed because of its input file.

    Args:
        source: `endpoint`, `input_file_id`, `completion_window` and `output_expires_after` in seconds or None.
    """
    batch = EvalRun(
        id=new_id("batch_"),
        eval_id=owner(project_id),
        project_id=project_id,
        name="",
        metadata_=metadata,
        model=None if checked.errors else checked.model,
        data_source={"type": SOURCE, **source},
        file_id=source["input_file_id"],
        total=checked.total,
        summary=summary.empty([]),
        output_due=not checked.errors,
    )
    if checked.errors:
        batch.status, batch.total, batch.finished_at = "failed", 0, now()
        batch.error = {
            "code": INVALID_INPUT,
            "message": "The input file is invalid.",
            "data": storable_json(checked.errors),
        }
    return batch


def owner(project_id: str) -> str:
    """The `eval_id` of a project's batches."""
    return f"batches-{project_id}"


def is_batch(run: EvalRun) -> bool:
    return bool(run.data_source.get("type") == SOURCE)


def get(session: Session, project_id: str, batch_id: str) -> EvalRun:
    """Raises BatchNotFound: the project has no such batch."""
    batch = session.scalar(_of(project_id).where(EvalRun.id == batch_id))
    if batch is None:
        raise BatchNotFound(batch_id)
    return batch


def page(session: Session, project_id: str, *, after: str | None, limit: int) -> Page[EvalRun]:
    """The batches of a project, newest first.

    Raises:
        InvalidRequest: `after` is none of them.
    """
    return pages.newest_first(session, _of(project_id), EvalRun, after=after, limit=limit)


def _of(project_id: str) -> Select[EvalRun]:
    return select(EvalRun).where(EvalRun.eval_id == owner(project_id))


def status(batch: EvalRun) -> Status:
    """The status under OpenAI's names. A batch that ended is final once its files are written."""
    is_expired = _is_expired(batch)
    if batch.status in EVAL_RUN.final:
        if batch.status == "canceled" and not is_expired:
            return "cancelling" if batch.output_due else "cancelled"
        if batch.output_due:
            return "finalizing"
        return "expired" if is_expired else "completed" if batch.status == "completed" else "failed"
    return "validating" if batch.started_at is None else "in_progress"


def _is_expired(batch: EvalRun) -> bool:
    return (batch.error or {}).get("code") == lifecycle.EXPIRED


# The files of a batch that has ended.


def due(session: Session, without: Sequence[str] = ()) -> list[EvalRun]:
    """Some of the batches that have ended and lack their files, apart from those with these ids."""
    ended = select(EvalRun).where(EvalRun.output_due, EvalRun.status.in_(EVAL_RUN.final))
    ended = ended.where(EvalRun.id.not_in(without))
    return list(session.scalars(ended.order_by(EvalRun.seq).limit(20)))


def write_files(database: Database, blobs: BlobStore, batch_id: str) -> None:
    """Replace the items of a batch that has ended by its files. Idempotent, and safe to call concurrently.

    Raises:
        BlobNotFound: items are missing.
    """
    try:
        _write_files(database, blobs, batch_id)
    except BlobNotFound:
        with database.read() as session:
            is_due = session.scalars(select(EvalRun.output_due).where(EvalRun.id == batch_id)).one()
        if is_due:  # otherwise another process has just replaced them
            raise


def give_up(database: Database, batch_id: str) -> None:
    """Fail a batch whose files cannot be written. Its items stay where they are."""
    with database.write() as session:
        batch = session.scalars(select(EvalRun).where(EvalRun.id == batch_id).with_for_update()).one()
        if batch.output_due:
            message = "The files of the batch could not be written; the service's log has the reason."
            batch.status, batch.error = "failed", {"code": "internal_error", "message": message}
            batch.output_due = False
            webhooks.batch_ended(batch, status(batch))


def _write_files(database: Database, blobs: BlobStore, batch_id: str) -> None:
    with database.read() as session:
        batch = session.scalars(select(EvalRun).where(EvalRun.id == batch_id)).one()
        stored = items.items_of_run(session, batch.id)
        requested = session.scalar(select(File).where(File.id == batch.file_id))
    seconds, made = batch.data_source["output_expires_after"], []
    unexecuted = _unexecuted(blobs, batch, requested, stored) if _is_expired(batch) else ()
    for name, lines in (
        ("output", _answers(blobs, batch, stored, "pass")),
        ("error", heapq.merge(_answers(blobs, batch, stored, "error"), unexecuted)),
    ):
        first = next(iter(lines), None)
        if first is not None:
            content = (line for _, line in chain([first], lines))
            filename = f"{batch.id}_{name}.jsonl"
            expires_at = None if seconds is None else now() + seconds
            file = files.put(
                blobs, batch.project_id, filename, content, purpose=OUTPUT, expires_at=expires_at
            )
            made.append((f"{name}_file_id", file))
    with database.write() as session:
        batch = session.scalars(select(EvalRun).where(EvalRun.id == batch_id).with_for_update()).one()
        if is_first := batch.output_due:
            work = Work(session)
            for _, file in made:
                files.add(work, file)
            ids = {name: file.id for name, file in made}
            batch.data_source = {**batch.data_source, **ids, "files_written_at": now()}
            batch.output_due = False
            session.execute(delete(EvalPage).where(EvalPage.run_id == batch.id))
            session.execute(delete(EvalJournal).where(EvalJournal.run_id == batch.id))
            webhooks.batch_ended(batch, status(batch))
    if is_first:
        blobs.discard(*(page.blob_key for page in stored.pages.values()))
    else:  # another process was faster
        blobs.discard(*(file.blob_key for _, file in made))


Line = tuple[int, bytes]
"""The number of a request, and its line of a file."""


def _answers(
    blobs: BlobStore, batch: EvalRun, stored: items.StoredItems, outcome: Literal["pass", "error"]
) -> Iterator[Line]:
    expected, number = batch.summary["counts"][outcome], 0
    for item in items.find(blobs, stored, status=outcome):
        number += 1
        custom_id = item["datasource_item"]["custom_id"]
        line = {"id": item["id"], "custom_id": custom_id, "response": item["sample"], "error": None}
        yield item["line"], _encoded(line)
    if number != expected:
        raise BlobNotFound(f"{expected - number} of {expected} answers are missing")


def _unexecuted(
    blobs: BlobStore, batch: EvalRun, file: File | None, stored: items.StoredItems
) -> Iterator[Line]:
    """The requests that were not answered in time. They are unknown once the input file is gone."""
    done = {item["line"] for item in items.find(blobs, stored)}
    error = {
        "code": lifecycle.EXPIRED,
        "message": "This request could not be executed before the completion window expired.",
    }
    try:
        if file is None:
            raise BlobNotFound(f"the input file of {batch.id} was deleted")
        for row in requests(files.read_content(blobs, file), batch.data_source["endpoint"]):
            if isinstance(row, EvalRow) and row.line not in done:
                custom_id = row.item["custom_id"]
                line = {
                    "id": request_id(batch, row.line),
                    "custom_id": custom_id,
                    "response": None,
                    "error": error,
                }
                yield row.line, _encoded(line)
    except (BlobNotFound, files.FileDamaged) as cause:
        log.warning("the error file of %s lacks requests that were not executed: %s", batch.id, cause)


def request_id(batch: EvalRun, line: int) -> str:
    """The id of the request in a line of the input file."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line}"


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
