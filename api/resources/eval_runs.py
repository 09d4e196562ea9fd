"""/v1/evals/{id}/runs: runs and their output items, of created evals and of jobs."""

from itertools import islice
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.deps import CurrentProject, Service, ServiceDep, UnitOfWork
from api.http.idempotency import Once
from api.http.openapi import refusals
from api.http.shapes import After, EndedListing, Limit, clamped
from api.resources import eval_checks
from api.resources.estimates import in_reader
from api.resources.eval_requests import FileContent, RunCreate, SampledSource, parse_criteria
from api.resources.eval_shapes import ItemOut, ItemStatus, RunOut, RunStatus
from api.resources.evals import Order, changeable, listing
from api.resources.rollouts import SEARCHES
from core.database.engine import Work
from core.database.tables import Eval, EvalRun, File, Job, Project, RolloutPage
from core.errors import EvalNotFound, InvalidRequest
from core.evals import catalog, imported, items, lifecycle, summary
from core.results import evals, rollouts
from core.results.rollout_filters import Wanted
from core.storage import files
from core.tenancy import tenants
from core.text import to_json
from graders.spec import InvalidGrader

router = APIRouter(prefix="/evals", tags=["Evals"])

# Of the rows of `file_content` that one list of runs echoes.
MAX_LISTED_BYTES = 8 << 20


class RunDeleted(BaseModel):
    object: Literal["eval.run.deleted"] = "eval.run.deleted"
    deleted: Literal[True] = True
    run_id: str


@router.post("/{eval_id}/runs", status_code=201, response_model=RunOut, responses=refusals(404, 405))
async def create_run(
    eval_id: str, body: RunCreate, request: Request, project: CurrentProject, service: ServiceDep, once: Once
) -> RunOut | JSONResponse:
    """Create a run. All of its rows are checked first; a worker then samples and grades them."""
    made = await to_thread.run_sync(_eval_of, service, project, eval_id)
    try:
        criteria = parse_criteria(made.testing_criteria)
    except InvalidGrader as cause:  # of an imported eval
        raise InvalidRequest(cause.message, param=cause.param, code=cause.code) from cause
    await eval_checks.refuse_run(body, made.data_source_config, criteria, service, project)

    def check() -> tuple[File | None, int]:
        source = body.data_source
        if isinstance(source, SampledSource):
            eval_checks.refuse_model(source, service, project)
        file = eval_checks.find_file(body, service, project)
        config = made.data_source_config
        return file, eval_checks.count_rows(body, file, config, criteria, service, project)

    file, total = await in_reader(service, project, check)

    def create(work: Work) -> RunOut:
        catalog.find(work.session, project.id, eval_id)  # it may have been deleted meanwhile
        if file is not None:
            files.get(work.session, project.id, file.id)
        source = body.data_source
        content = source.source.as_data() if isinstance(source.source, FileContent) else None
        run = EvalRun(
            eval_id=made.id,
            project_id=project.id,
            name=body.name or "",
            metadata_=body.metadata,
            model=source.model if isinstance(source, SampledSource) else None,
            data_source=body.stored_source(),
            content=content,
            content_bytes=0 if content is None else len(to_json(content)),
            file_id=None if file is None else file.id,
            total=total,
            budget=None if body.budget is None else body.budget.to_row(),
            summary=summary.empty([spec.name for spec in criteria]),
        )
        lifecycle.create(work, run)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_eval_run_beyond(work.session, project.id, limits)
        return RunOut.of_run(run, content, report_url=_report_url(request, run))

    return await to_thread.run_sync(once, create)


def _eval_of(service: Service, project: Project, eval_id: str) -> Eval:
    with service.database.read() as session:
        return changeable(catalog.find(session, project.id, eval_id))


@router.get("/{eval_id}/runs")
def list_runs(
    eval_id: str,
    request: Request,
    project: CurrentProject,
    service: ServiceDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Annotated[
        RunStatus | None, Query(description="The runs of a job's eval are all completed.")
    ] = None,
) -> EndedListing[RunOut]:
    """List the runs of an eval by creation, or the validations of a job by step."""
    most, newest_first = clamped(limit), order == "desc"
    # The session is closed before pages are read (here and below): the blob store must not keep a connection waiting.
    with service.database.read() as session:
        found = catalog.find(session, project.id, eval_id)
        if isinstance(found, Eval):
            made = catalog.runs(
                session,
                found,
                after=after,
                limit=most,
                newest_first=newest_first,
                status=status,
                max_bytes=MAX_LISTED_BYTES,
            )
            shown = [
                RunOut.of_run(run, run.content, report_url=_report_url(request, run)) for run in made.items
            ]
            return listing(shown, made.has_more)
        page = evals.runs(session, found, after=after, limit=most, newest_first=newest_first)
        names = evals.models(session, found, [run.step for run in page.items])
    if status not in (None, "completed"):
        return listing([], False)
    validations = [_validation(request, found, run, names.get(run.step, found.model)) for run in page.items]
    return listing(validations, page.has_more)


@router.get("/{eval_id}/runs/{run_id}")
def retrieve_run(
    eval_id: str, run_id: str, request: Request, project: CurrentProject, service: ServiceDep
) -> RunOut:
    """Retrieve a run."""
    with service.database.read() as session:
        found = catalog.find(session, project.id, eval_id)
        if isinstance(found, Eval):
            run = catalog.run_of(session, found, run_id)
            return RunOut.of_run(run, run.content, report_url=_report_url(request, run))
        page, model = validation_of(service, found, run_id)
    return _validation(request, found, page, model)


@router.post("/{eval_id}/runs/{run_id}", include_in_schema=False)  # OpenAI's specification
@router.post("/{eval_id}/runs/{run_id}/cancel", responses=refusals(400, 405))  # OpenAI's client
def cancel_run(
    eval_id: str, run_id: str, request: Request, project: CurrentProject, uow: UnitOfWork
) -> RunOut:
    """Cancel a run immediately. The items so far are kept."""
    with uow() as work:
        made = changeable(catalog.find(work.session, project.id, eval_id))
        run = catalog.run_of(work.session, made, run_id)
        lifecycle.cancel(work, run)
        return RunOut.of_run(run, run.content, report_url=_report_url(request, run))


@router.delete("/{eval_id}/runs/{run_id}", responses=refusals(405))
def delete_run(
    eval_id: str, run_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> RunDeleted:
    """Delete a run and its items. A run in progress is cancelled."""
    with uow() as work:
        made = changeable(catalog.find(work.session, project.id, eval_id))
        keys = lifecycle.remove(work, catalog.run_of(work.session, made, run_id))
    service.blobs.discard(*keys)
    return RunDeleted(run_id=run_id)


@router.get("/{eval_id}/runs/{run_id}/output_items", dependencies=SEARCHES)
def list_output_items(
    eval_id: str,
    run_id: str,
    project: CurrentProject,
    service: ServiceDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Annotated[ItemStatus | None, Query(description="error: the sample could not be graded.")] = None,
) -> EndedListing[ItemOut]:
    """List the finished items of a run, in the order of its rows."""
    most, newest_first = clamped(limit), order == "desc"
    with service.database.read() as session:
        found = catalog.find(session, project.id, eval_id)
        made = stored_items(session, found, run_id) if isinstance(found, Eval) else None
    if made is not None:
        run, where = made
        line = None
        if after is not None:
            cursor = items.by_id(service.blobs, where, run_id, after)
            if cursor is None:
                raise catalog.no_cursor(after)
            line = cursor["line"]
        read = items.find(service.blobs, where, after_line=line, newest_first=newest_first, status=status)
        some = list(islice(read, most + 1))
        return listing([ItemOut.of_item(run, item) for item in some[:most]], len(some) > most)
    assert isinstance(found, Job)
    page, model = validation_of(service, found, run_id)
    place = None
    if after is not None and (place := evals.position_of(after, found.id, page.step)) is None:
        raise catalog.no_cursor(after)
    [whole, *_] = evals.criteria(found.body["grader"])
    samples = rollouts.find(service.blobs, [page], Wanted(), after=place, descending=newest_first)
    wanted = (row for row in samples if status in (None, evals.status(row, whole)))
    rows = list(islice(wanted, most + 1))
    return listing([ItemOut.of(found, page, row, model=model) for row in rows[:most]], len(rows) > most)


@router.get("/{eval_id}/runs/{run_id}/output_items/{output_item_id}")
def retrieve_output_item(
    eval_id: str,
    run_id: str,
    output_item_id: str,
    project: CurrentProject,
    service: ServiceDep,
) -> ItemOut:
    """Retrieve one item of a run."""
    with service.database.read() as session:
        found = catalog.find(session, project.id, eval_id)
        made = stored_items(session, found, run_id) if isinstance(found, Eval) else None
    if made is not None:
        run, where = made
        item = items.by_id(service.blobs, where, run_id, output_item_id)
        if item is None:
            raise EvalNotFound("output_item", output_item_id)
        return ItemOut.of_item(run, item)
    assert isinstance(found, Job)
    page, model = validation_of(service, found, run_id)
    place = evals.position_of(output_item_id, found.id, page.step)
    row = None if place is None else rollouts.at(service.blobs, page, place)
    if row is None:
        raise EvalNotFound("output_item", output_item_id)
    return ItemOut.of(found, page, row, model=model)


def stored_items(session: Any, eval_row: Eval, run_id: str) -> tuple[EvalRun, items.StoredItems]:
    """The run of a created eval and where its items are. Raises EvalNotFound."""
    run = catalog.run_of(session, eval_row, run_id)
    return run, items.items_of_run(session, run.id)


def validation_of(service: Service, job: Job, run_id: str) -> tuple[RolloutPage, str]:
    """The validation of a job, and the name of the validated model."""
    with service.database.read() as session:
        page = evals.run_of(session, job, run_id)
        return page, evals.models(session, job, [page.step]).get(page.step, job.model)


def _validation(request: Request, job: Job, page: RolloutPage, model: str) -> RunOut:
    assert page.summary is not None, "a validation of a job with a grader has one"
    path = f"v1/regraft/jobs/{job.id}/rollouts?step={page.step}&split=valid"
    return RunOut.of(job, page, model=model, summary=page.summary, report_url=f"{request.base_url}{path}")


def _report_url(request: Request, run: EvalRun) -> str:
    path = f"v1/evals/{imported.public_id(run.eval_id)}/runs/{imported.public_id(run.id)}/output_items"
    return f"{request.base_url}{path}"
