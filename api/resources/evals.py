"""/v1/evals: validation samples in the shape of OpenAI's evals. Read-only (docs/howto/rollouts.md)."""

from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, Parts, ReadSession
from api.http.shapes import After, EndedListing, Limit, clamped
from core.database.engine import Database
from core.database.tables import Job, Project, RolloutPage
from core.errors import EvalNotFound, InvalidRequest, MadeByJobs
from core.results import evals, rollouts
from core.results.evals import Criterion
from core.results.rollouts import Place, Row, Wanted
from core.storage.store import BlobStore
from graders.spec import hide_secrets

router = APIRouter(prefix="/evals", tags=["Evals"])

Order = Annotated[Literal["asc", "desc"], Query(description="asc: oldest first; desc: newest first.")]
ItemStatus = Literal["pass", "fail", "error"]


class EvalOut(BaseModel):
    id: str
    object: Literal["eval"] = "eval"
    created_at: int
    name: str
    data_source_config: dict[str, Any]
    testing_criteria: list[dict[str, Any]]
    metadata: dict[str, str] | None
    job_id: str  # extension

    @classmethod
    def of(cls, job: Job) -> "EvalOut":
        return cls(
            id=evals.eval_id(job.id),
            created_at=job.created_at,
            name=job.suffix or job.id,
            data_source_config={"type": "custom", "schema": SCHEMA},
            testing_criteria=[
                hide_secrets(criterion.spec) | {"name": criterion.name, "pass_threshold": criterion.threshold}
                for criterion in evals.criteria(job.reinforcement["grader"])
            ],
            metadata=job.metadata_,
            job_id=job.id,
        )


# The variables of graders: `{{item.x}}` and `{{sample.output_text}}`. Rows may have other keys than their messages.
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "object", "properties": {"messages": {"type": "array"}}, "required": ["messages"]},
        "sample": {"type": "object", "properties": {"output_text": {"type": "string"}}},
    },
    "required": ["item", "sample"],
}


class RunOut(BaseModel):
    id: str
    object: Literal["eval.run"] = "eval.run"
    created_at: int
    eval_id: str
    name: str
    status: Literal["completed"] = "completed"
    model: str
    report_url: str
    result_counts: dict[str, int]
    per_model_usage: list[dict[str, Any]]
    per_testing_criteria_results: list[dict[str, Any]]
    data_source: dict[str, Any]
    metadata: dict[str, str] | None = None
    error: None = None
    step: int  # extension

    @classmethod
    def of(
        cls, job: Job, page: RolloutPage, *, model: str, summary: dict[str, Any], report_url: str
    ) -> "RunOut":
        counts, tokens = summary["counts"], summary["tokens"]
        return cls(
            id=evals.run_id(job.id, page.step),
            created_at=page.created_at,
            eval_id=evals.eval_id(job.id),
            name=f"Step {page.step}",
            model=model,
            report_url=report_url,
            result_counts={
                "total": counts["total"],
                "passed": counts["pass"],
                "failed": counts["fail"],
                "errored": counts["error"],
            },
            per_model_usage=[
                {
                    "model_name": model,
                    "invocation_count": counts["total"],
                    **tokens,
                    "cached_tokens": 0,
                    "total_tokens": sum(tokens.values()),
                }
            ],
            per_testing_criteria_results=[
                {"testing_criteria": name, **results} for name, results in summary["criteria"].items()
            ],
            data_source={"type": "jsonl", "source": {"type": "file_id", "id": job.validation_file}},
            step=page.step,
        )


class ItemOut(BaseModel):
    id: str
    object: Literal["eval.run.output_item"] = "eval.run.output_item"
    created_at: int
    run_id: str
    eval_id: str
    status: ItemStatus
    datasource_item_id: int | None
    datasource_item: dict[str, Any]
    results: list[dict[str, Any]]
    sample: dict[str, Any]
    rollout_id: str = Field(description="Id of this sample in /v1/regraft/jobs/{id}/rollouts.")

    @classmethod
    def of(cls, job: Job, page: RolloutPage, row: Row, *, model: str) -> "ItemOut":
        criteria = evals.criteria(job.reinforcement["grader"])
        return cls(
            id=evals.item_id(job.id, Place.of(row)),
            created_at=page.created_at,
            run_id=evals.run_id(job.id, page.step),
            eval_id=evals.eval_id(job.id),
            status=evals.status(row, criteria[0]),
            datasource_item_id=row["line"],
            datasource_item=(row["item"] or {}) | {"messages": row["messages"] or []},
            results=[_result(criterion, row) for criterion in criteria],
            sample=_sample(job, row, model),
            rollout_id=row["id"],
        )


def _result(criterion: Criterion, row: Row) -> dict[str, Any]:
    """The result of one grader. A null score could not be graded, for the given reason."""
    if criterion.key is None:
        reason, error, output = row["reason"], row["error"], row["output"]
    else:
        said = ((row[name] or {}).get(criterion.key) for name in ("sub_reasons", "sub_errors", "sub_outputs"))
        reason, error, output = said
    return {
        "name": criterion.name,
        "type": criterion.type,
        "passed": criterion.passed(row),
        "score": criterion.score(row),
        "reason": reason,
        "error": error,
        "output": output,
    }


def _sample(job: Job, row: Row, model: str) -> dict[str, Any]:
    settings = job.resolved or {}
    prompt, completion = row["prompt_tokens"] or 0, row["completion_tokens"] or 0
    return {
        "input": row["messages"] or [],
        "output": [{"role": "assistant", "content": row["output_text"]}],
        "finish_reason": row["finish_reason"],
        "model": model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": 0,
        },
        "error": None,
        "temperature": settings.get("eval_temperature"),
        "max_completion_tokens": settings.get("max_completion_tokens"),
        "top_p": 1.0,
        "seed": job.seed,
    }


@router.get("")
def list_evals(
    project: CurrentProject,
    session: ReadSession,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    order_by: Annotated[
        Literal["created_at", "updated_at"],
        Query(description="Evals are created with their job and never updated."),
    ] = "created_at",
) -> EndedListing[EvalOut]:
    """List the evals of all jobs."""
    newest_first = order == "desc"
    page = evals.page(session, project.id, after=after, limit=clamped(limit), newest_first=newest_first)
    return _listing([EvalOut.of(job) for job in page.items], page.has_more)


@router.get("/{eval_id}")
def retrieve_eval(eval_id: str, project: CurrentProject, session: ReadSession) -> EvalOut:
    """Retrieve the eval of a job."""
    return EvalOut.of(evals.job_of(session, project.id, eval_id))


@router.get("/{eval_id}/runs")
def list_runs(
    eval_id: str,
    request: Request,
    project: CurrentProject,
    service: Parts,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Annotated[
        Literal["queued", "in_progress", "completed", "canceled", "failed"] | None,
        Query(description="Only completed runs are listed."),
    ] = None,
) -> EndedListing[RunOut]:
    """List the validations of a job, by step."""
    # The session is closed before pages are read (here and below): the blob store must not keep a connection waiting.
    with service.database.read() as session:
        job = evals.job_of(session, project.id, eval_id)
        newest_first = order == "desc"
        page = evals.runs(session, job, after=after, limit=clamped(limit), newest_first=newest_first)
        names = evals.models(session, job, [run.step for run in page.items])
    if status not in (None, "completed"):
        return _listing([], False)
    runs = [_run(request, service.blobs, job, run, names.get(run.step, job.model)) for run in page.items]
    return _listing(runs, page.has_more)


@router.get("/{eval_id}/runs/{run_id}")
def retrieve_run(
    eval_id: str, run_id: str, request: Request, project: CurrentProject, service: Parts
) -> RunOut:
    """Retrieve a validation."""
    job, run, model = _find(service.database, project, eval_id, run_id)
    return _run(request, service.blobs, job, run, model)


@router.get("/{eval_id}/runs/{run_id}/output_items")
def list_output_items(
    eval_id: str,
    run_id: str,
    project: CurrentProject,
    service: Parts,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Annotated[ItemStatus | None, Query(description="error: the sample could not be graded.")] = None,
) -> EndedListing[ItemOut]:
    """List the samples of a validation, in the order of the validation file."""
    job, run, model = _find(service.database, project, eval_id, run_id)
    place = None
    if after is not None and (place := evals.place_of(after, job.id, run.step)) is None:
        raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
    [whole, *_] = evals.criteria(job.reinforcement["grader"])
    samples = rollouts.find(service.blobs, [run], Wanted(), after=place, descending=order == "desc")
    wanted = (row for row in samples if status in (None, evals.status(row, whole)))
    most = clamped(limit)
    rows = list(islice(wanted, most + 1))
    return _listing([ItemOut.of(job, run, row, model=model) for row in rows[:most]], len(rows) > most)


@router.get("/{eval_id}/runs/{run_id}/output_items/{output_item_id}")
def retrieve_output_item(
    eval_id: str,
    run_id: str,
    output_item_id: str,
    project: CurrentProject,
    service: Parts,
) -> ItemOut:
    """Retrieve one sample of a validation."""
    job, run, model = _find(service.database, project, eval_id, run_id)
    place = evals.place_of(output_item_id, job.id, run.step)
    row = None if place is None else rollouts.at(service.blobs, run, place)
    if row is None:
        raise EvalNotFound("output_item", output_item_id)
    return ItemOut.of(job, run, row, model=model)


@router.post("", include_in_schema=False)
@router.post("/{path:path}", include_in_schema=False)
@router.delete("/{path:path}", include_in_schema=False)
def refuse(project: CurrentProject) -> None:
    """Reject the request: evals are created by jobs only and cannot be changed or deleted."""
    raise MadeByJobs


def _find(database: Database, project: Project, eval_id: str, run_id: str) -> tuple[Job, RolloutPage, str]:
    """Return the job, its validation, and the name of the validated model."""
    with database.read() as session:
        job = evals.job_of(session, project.id, eval_id)
        run = evals.run_of(session, job, run_id)
        return job, run, evals.models(session, job, [run.step]).get(run.step, job.model)


def _run(request: Request, blobs: BlobStore, job: Job, page: RolloutPage, model: str) -> RunOut:
    summary = page.summary
    if summary is None:  # written by an earlier version
        criteria = evals.criteria(job.reinforcement["grader"])
        summary = evals.summary(rollouts.find(blobs, [page], Wanted()), criteria)
    path = f"v1/regraft/jobs/{job.id}/rollouts?step={page.step}&split=valid"
    return RunOut.of(job, page, model=model, summary=summary, report_url=f"{request.base_url}{path}")


def _listing(data: list[Any], has_more: bool) -> EndedListing[Any]:
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return EndedListing(data=data, has_more=has_more, first_id=first, last_id=last)
