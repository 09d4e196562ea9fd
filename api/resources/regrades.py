"""/v1/regraft/jobs/{id}/regrades: the stored answers of a job scored by another grader, in the background."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import REPLAYS_FIRST, Once
from api.http.openapi import refusals
from api.http.shapes import After, Body, Limit, Listing, clamped
from api.resources import graders
from api.resources.eval_requests import Cap, Name
from api.resources.graders import Grader
from api.resources.rollouts import SEARCHES, ComparedScores
from core.database.engine import Work
from core.database.tables import EvalRun, Job, Project, RolloutPage
from core.errors import InvalidRequest
from core.evals import budgets, items, lifecycle, regrades, summary
from core.evals.items import MAX_ROWS, Item
from core.evals.regrades import Change, SelectedSteps
from core.jobs import lifecycle as jobs
from core.masking import hide_secrets
from core.results import rollouts
from core.results.rollouts import SamplePosition, Split
from core.strict import StrictModel
from core.tenancy import tenants
from graders.build import missing_item_paths
from graders.spec import GraderSpec, dump

router = APIRouter(prefix="/regraft/jobs/{job_id}", tags=["regraft"])

LARGEST_STEP = 999_999_999


class JudgeBudget(StrictModel):
    """A cap on the tokens of judges."""

    tokens: Cap


class RegradeCreate(Body):
    """Another grader, and the answers that it scores: by default all that are stored."""

    grader: Grader
    name: Name = ""
    split: Split | None = None
    step_from: Annotated[int, Field(ge=0, le=LARGEST_STEP)] = 0
    step_to: Annotated[int, Field(ge=0, le=LARGEST_STEP)] = LARGEST_STEP
    budget: JudgeBudget | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> "RegradeCreate":
        if self.step_from > self.step_to:
            raise ValueError("step_from may be at most step_to")
        return self


class RegradeOut(BaseModel):
    """Stored answers of a job scored by another grader."""

    id: str
    object: Literal["regraft.regrade"] = "regraft.regrade"
    job_id: str
    name: str
    created_at: int
    started_at: int | None
    finished_at: int | None
    status: str = Field(description="queued, in_progress, completed, failed or canceled.")
    error: dict[str, Any] | None
    grader: dict[str, Any]
    split: Annotated[Split | None, Field(description="null: both.")]
    step_from: int
    step_to: int
    answers: int
    graded: Annotated[int, Field(description="Finished answers so far, with or without a score.")]
    usage: Annotated[list[dict[str, Any]], Field(description="Tokens of judges by model.")]
    budget: dict[str, int] | None
    pass_threshold: float
    comparison: Annotated[ComparedScores | None, Field(description="Once it is completed.")]

    @classmethod
    def of(cls, run: EvalRun) -> "RegradeOut":
        source, kept = run.data_source, run.summary
        compared = kept.get("comparison")
        return cls(
            id=run.id,
            job_id=run.eval_id,
            name=run.name,
            created_at=run.created_at,
            started_at=run.started_at,
            finished_at=run.finished_at,
            status=run.status,
            error=run.error,
            grader=hide_secrets(source["grader"]),
            split=source["split"],
            step_from=source["first_step"],
            step_to=source["last_step"],
            answers=run.total,
            graded=summary.finished(kept),
            usage=[{"model_name": name, **tokens} for name, tokens in kept["models"].items()],
            budget=budgets.render(run.budget, kept),
            pass_threshold=source["pass_threshold"],
            comparison=None if compared is None else ComparedScores(**compared),
        )


class RegradedOut(BaseModel):
    """An answer with both scores. `id` is that of the rollout."""

    id: str
    step: int
    split: Split
    group: int
    line: int
    output_text: str
    before: float | None
    after: float | None
    changes: list[Change]
    reason: str | None
    error: str | None
    output: Annotated[str | None, Field(description="Printed by the new grader.")]

    @classmethod
    def of(cls, run: EvalRun, item: Item) -> "RegradedOut":
        stored = item["sample"]["rollout"]
        result = item["results"][0] if item["results"] else {}
        return cls(
            id=stored["id"],
            step=stored["step"],
            split=stored["split"],
            group=stored["group"],
            line=stored["line"],
            output_text=item["sample"]["output"][0]["content"],
            before=stored["score"],
            after=result.get("score"),
            changes=sorted(regrades.changes(run, item)),
            reason=result.get("reason"),
            error=result.get("error"),
            output=result.get("output"),
        )


class RegradeDeleted(BaseModel):
    object: Literal["regraft.regrade.deleted"] = "regraft.regrade.deleted"
    deleted: Literal[True] = True
    id: str


@router.post(
    "/regrade",
    status_code=201,
    response_model=RegradeOut,
    responses=refusals(404),
    dependencies=[REPLAYS_FIRST, *graders.TAKES_GRADER],
)
async def create_regrade(
    job_id: str, body: RegradeCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> RegradeOut | JSONResponse:
    """Score the stored answers of a job with another grader. A worker grades them; the job does not change."""
    await graders.refuse(body.grader, service, project)
    selection, pages = await to_thread.run_sync(_selected, job_id, body, service, project)

    def create(work: Work) -> RegradeOut:
        job = jobs.get(work.session, project.id, job_id)
        run = regrades.new(
            job,
            dump(body.grader),
            selection,
            pages=pages,
            name=body.name,
            budget=None if body.budget is None else body.budget.model_dump(),
        )
        lifecycle.create(work, run)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_eval_run_beyond(work.session, project.id, limits)
        return RegradeOut.of(run)

    return await to_thread.run_sync(once, create)


def _selected(
    job_id: str, body: RegradeCreate, service: Service, project: Project
) -> tuple[SelectedSteps, Sequence[RolloutPage]]:
    """The selected steps that are there, and the pages of their answers. Blocks.

    Raises:
        InvalidRequest: there are none or too many, or the first one lacks a field that the grader reads.
    """
    with service.database.read() as session:
        job = jobs.get(session, project.id, job_id)
        pages = rollouts.pages(
            session, job.id, first_step=body.step_from, last_step=body.step_to, split=body.split
        )
    total = sum(page.samples for page in pages)
    if total == 0:
        raise InvalidRequest("The job has no stored answers of these steps.", param="job_id")
    if total > MAX_ROWS:
        raise InvalidRequest(
            f"{total} answers are selected, and a regrade has at most {MAX_ROWS}: select fewer steps with step_from "
            "and step_to.",
            param="step_from",
        )
    first = next(regrades.rows(service.blobs, ((0, page) for page in pages)), None)
    if first is not None and (missing := _missing(body.grader, first.item)):
        raise InvalidRequest(
            f"The grader reads {{{{{missing}}}}}, which the rows of the job do not have.", param="grader"
        )
    steps = [page.step for page in pages]
    return SelectedSteps(min(steps), max(steps), body.split), pages


def _missing(spec: GraderSpec, item: dict[str, Any]) -> str | None:
    return next(iter(missing_item_paths(spec, item)), None)


@router.get("/regrades")
def list_regrades(
    job_id: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[RegradeOut]:
    """List the regrades of a job, newest first."""
    page = regrades.page(session, jobs.get(session, project.id, job_id), after=after, limit=clamped(limit))
    return Listing(data=[RegradeOut.of(run) for run in page.items], has_more=page.has_more)


@router.get("/regrades/{regrade_id}")
def retrieve_regrade(
    job_id: str, regrade_id: str, project: CurrentProject, session: ReadSession
) -> RegradeOut:
    """Retrieve a regrade: how far it is, and what it changed once it is completed."""
    return RegradeOut.of(regrades.get(session, _job(session, project, job_id), regrade_id))


@router.get("/regrades/{regrade_id}/answers", dependencies=SEARCHES)
def list_regraded(
    job_id: str,
    regrade_id: str,
    project: CurrentProject,
    service: ServiceDep,
    change: Annotated[
        Change | None, Query(description="flipped: it passed before and does not now, or the reverse.")
    ] = None,
    after: After = None,
    limit: Limit = 20,
) -> Listing[RegradedOut]:
    """List the answers with both scores, by step; also those that an unfinished regrade has graded so far."""
    most = clamped(limit)
    with service.database.read() as session:
        run = regrades.get(session, _job(session, project, job_id), regrade_id)
        stored = items.items_of_run(session, run.id)
    place = None
    if after is not None and (place := SamplePosition.parse(after)) is None:
        raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
    found = (
        item
        for item in items.find(service.blobs, stored)
        if (place is None or SamplePosition.of(item["sample"]["rollout"]) > place)
        and (change is None or change in regrades.changes(run, item))
    )
    some = list(islice(found, most + 1))
    return Listing(data=[RegradedOut.of(run, item) for item in some[:most]], has_more=len(some) > most)


@router.post("/regrades/{regrade_id}/cancel")
def cancel_regrade(job_id: str, regrade_id: str, project: CurrentProject, uow: UnitOfWork) -> RegradeOut:
    """Cancel a regrade immediately. The answers so far are kept."""
    with uow() as work:
        run = regrades.get(work.session, _job(work.session, project, job_id), regrade_id)
        lifecycle.cancel(work, run)
        return RegradeOut.of(run)


@router.delete("/regrades/{regrade_id}")
def delete_regrade(
    job_id: str, regrade_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> RegradeDeleted:
    """Delete a regrade. One in progress is cancelled."""
    with uow() as work:
        run = regrades.get(work.session, _job(work.session, project, job_id), regrade_id)
        keys = lifecycle.remove(work, run)
    service.blobs.discard(*keys)
    return RegradeDeleted(id=regrade_id)


def _job(session: Any, project: Project, job_id: str) -> Job:
    return jobs.get(session, project.id, job_id)
