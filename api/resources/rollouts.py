"""/v1/regraft/jobs: extensions of OpenAI's API: all stored samples, and the metrics of every step."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal, cast

import pyarrow.parquet as pq
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep
from api.http.shapes import After, Listing, Measured
from core.database.tables import RolloutPage
from core.errors import InvalidRequest, NotFound
from core.jobs import events, lifecycle
from core.results import rollouts
from core.results.rollouts import SamplePosition, Wanted
from core.storage.store import CHUNK_BYTES, BlobNotFound, BlobStore

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

MAX_CONCURRENT = 1000
AT_ONCE = 100

Step = Annotated[int | None, Query(ge=0, le=999_999_999)]
Split = Annotated[Literal["train", "valid"] | None, Query(description="With `step`, the default is train.")]


def _wanted(
    line: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Line of the dataset file, from 1.")
    ] = None,
    finish_reason: Literal["stop", "length"] | None = None,
    graded: Annotated[bool | None, Query(description="Whether the sample has a score.")] = None,
    error: Annotated[str | None, Query(description="Kind of the grading error.")] = None,
    grader: Annotated[
        str | None, Query(description="Part of a multi grader; score bounds and `graded` apply to its score.")
    ] = None,
    min_score: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_score: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Wanted:
    return Wanted(line, finish_reason, graded, error, grader, min_score, max_score)


def _pages(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    step: Step = None,
    step_from: Step = None,
    step_to: Step = None,
    split: Split = None,
) -> Sequence[RolloutPage]:
    """The matching pages of the job, which belongs to this project."""
    if step is not None and (step_from is not None or step_to is not None):
        raise InvalidRequest("Give either step, or step_from and step_to.", param="step")
    # A separate session: pages are read from the blob store, which must not keep a connection waiting.
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        first, last = (step_from, step_to) if step is None else (step, step)
        if step is not None and split is None:
            split = "train"
        pages = rollouts.pages(session, job.id, first_step=first, last_step=last, split=split)
    if step is not None and not any(_is_there(service.blobs, page) for page in pages):
        raise NotFound(f"Job {job.id} has no {split} rollouts of step {step}.", param="step")
    return pages


def _is_there(blobs: BlobStore, page: RolloutPage) -> bool:
    try:
        return blobs.size(page.blob_key) >= 0
    except BlobNotFound:  # deleted by retention
        return False


Pages = Annotated[Sequence[RolloutPage], Depends(_pages)]
Filters = Annotated[Wanted, Depends(_wanted)]


class StepListing(Listing[Measured]):
    pass


class RolloutListing(Listing[dict[str, Any]]):
    # Over the selected steps, regardless of the filters: the number of samples, and of those stored.
    total: int
    stored: int


@router.get("/{job_id}/rollouts")
def list_rollouts(
    job_id: str,
    service: ServiceDep,
    pages: Pages,
    wanted: Filters,
    step: Step = None,
    after: After = None,
    limit: Annotated[
        int | None, Query(description=f"Maximum number of samples, at most {MAX_CONCURRENT}.")
    ] = None,
    order: Literal["asc", "desc"] = "asc",
) -> RolloutListing:
    """List stored samples with their grades, by step. Those of one `step` come in one page unless `limit` is set."""
    place = None
    if after is not None and (place := SamplePosition.parse(after)) is None:
        raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
    if limit is None and (step is None or after is not None):
        limit = AT_ONCE
    most = None if limit is None else max(1, min(limit, MAX_CONCURRENT))
    matches = rollouts.find(service.blobs, pages, wanted, after=place, descending=order == "desc")
    # One more than the limit, to determine has_more.
    rows = list(matches if most is None else islice(matches, most + 1))
    return RolloutListing(
        data=rows[:most],
        has_more=most is not None and len(rows) > most,
        total=sum(max(page.total, page.samples) for page in pages),
        stored=sum(page.samples for page in pages),
    )


@router.get("/{job_id}/rollouts/download", response_class=StreamingResponse)
def download_rollouts(
    job_id: str,
    service: ServiceDep,
    pages: Pages,
    wanted: Filters,
    format: Literal["jsonl", "parquet"] = "jsonl",
) -> StreamingResponse:
    """Download all matching samples in one file."""
    headers = {"content-disposition": f'attachment; filename="{job_id}-rollouts.{format}"'}
    if format == "jsonl":
        lines = _lines(service, pages, wanted)
        return StreamingResponse(lines, media_type="application/jsonl", headers=headers)
    file = _parquet(service, pages, wanted)
    headers["content-length"] = str(file.seek(0, 2))
    file.seek(0)
    return StreamingResponse(_chunks(file), media_type="application/vnd.apache.parquet", headers=headers)


@router.get("/{job_id}/metrics")
def list_metrics(job_id: str, project: CurrentProject, session: ReadSession) -> StepListing:
    """List the metrics of all finished steps; step 0 is the validation of the base model."""
    job = lifecycle.get(session, project.id, job_id)
    return StepListing(data=[{"step": row.step, **row.data} for row in events.steps(session, job.id)])


def _lines(service: Service, pages: Sequence[RolloutPage], wanted: Wanted) -> Iterator[bytes]:
    for table in rollouts.found_tables(service.blobs, pages, wanted):
        yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rollouts.records(table)).encode()


def _parquet(service: Service, pages: Sequence[RolloutPage], wanted: Wanted) -> BinaryIO:
    """The file, on disk and unnamed, so that closing deletes it. Written one row group at a time."""
    file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed by the response
    try:
        schema = rollouts.with_earlier_names(rollouts.SCHEMA.empty_table()).schema
        with pq.ParquetWriter(file, schema, **rollouts.FORMAT) as writer:
            for table in rollouts.found_tables(service.blobs, pages, wanted):
                writer.write_table(rollouts.with_earlier_names(table))
    except BaseException:
        file.close()
        raise
    return file


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
