"""/v1/fine_tuning/jobs: create, watch and control jobs."""

import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import REPLAYS_FIRST, Once
from api.http.openapi import refusals
from api.http.shapes import After, EndedListing, Limit, Listing, clamped, ends
from api.resources import validation_split
from api.resources.job_body import TAKES_JOB, BudgetChange, JobCreate
from api.resources.job_checks import Accepted, EarlierRuns, accept, earlier_runs, usable_body
from api.resources.job_shapes import CheckpointOut, EventOut, JobOut
from core.asgi import until_gone
from core.database.engine import Work
from core.database.tables import Job, Project
from core.jobs import events, fairness, integrations, lifecycle
from core.jobs.budgets import Price
from core.results import grader_audits, job_results, previews, tuned_models
from core.storage import files
from core.storage.uncommitted import Uncommitted
from core.tenancy import tenants

router = APIRouter(prefix="/fine_tuning/jobs", tags=["Fine-tuning"])


def render(session: Session, service: Service, *some: Job) -> list[JobOut]:
    """The jobs as the API shows them, with a fixed number of queries for all of them."""
    places = fairness.places(
        session, some, service.settings.default_limits, service.settings.hardware.pod_classes
    )
    price = Price.of(service.settings)
    results = job_results.results(session, some)
    return [JobOut.of(job, price, places.get(job.id), results.get(job.id)) for job in some]


@router.post("", response_model=JobOut, responses=refusals(404), dependencies=[REPLAYS_FIRST, *TAKES_JOB])
async def create_job(
    request: Request, body: JobCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> JobOut | Response:
    """Create a fine-tuning job."""
    usable = await until_gone(request.receive, usable_body(body, service, project))
    if usable is None:
        return Response(status_code=499)
    made = partial(_created, usable, project, service, once)
    if body.validation_split is None:
        return await to_thread.run_sync(made)
    return await service.admission.file_reads.in_thread(project.id, made, service.file_readers)


def _created(body: JobCreate, project: Project, service: Service, once: Once) -> JobOut | JSONResponse:
    accepted = accept(body, service, project)
    earlier = earlier_runs(body, accepted.model, project, service)
    parts = _split(body, project, service)
    with Uncommitted(service.blobs, *(() if parts is None else parts.keys())) as uncommitted:

        def create(work: Work) -> JobOut:
            job = added(work, body, accepted, project, service, earlier, parts)
            made = render(work.session, service, job)[0]
            if parts is not None:
                uncommitted.keep(*parts.keys(job.training_file, job.validation_file))
            return made

        return once(create)


def _split(body: JobCreate, project: Project, service: Service) -> validation_split.SplitFiles | None:
    if body.validation_split is None:
        return None
    method = body.method
    return validation_split.split(
        service,
        project,
        body.training_file,
        body.validation_split,
        method.type,
        learns_from_file=method.learns_from_file,
    )


def added(
    work: Work,
    body: JobCreate,
    accepted: Accepted,
    project: Project,
    service: Service,
    earlier: EarlierRuns,
    parts: validation_split.SplitFiles | None = None,
) -> Job:
    """Create the job in a transaction. The body passed `usable_body`; `accept` and `earlier_runs` made the rest.

    Raises:
        InvalidRequest: there is no such file, or none of training data.
        QuotaExceeded: the project may queue no further job, or its storage is used up.
    """
    find = partial(files.get_dataset, work.session, project.id)
    training = find(body.training_file, param="training_file")
    validation = find(body.validation_file, param="validation_file") if body.validation_file else None
    source = training
    if parts is not None:
        split = validation_split.added(work, service, project, parts)
        training, validation = split.training, split.validation
    job = lifecycle.create(
        work,
        project=project,
        model=accepted.base_model,
        training_file=training,
        validation_file=validation,
        suffix=body.suffix,
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        metadata=body.metadata,
        method=body.method.type,
        body=integrations.pin(body.method_body(), accepted.integrations),
        parent=None if accepted.parent is None else accepted.parent.to_row(),
        gpu_class=accepted.gpu_class,
        gpus=body.resources.gpus,
        nodes=body.resources.nodes,
        budget=accepted.budget,
    )
    _show(work, job, earlier)
    if parts is not None:
        events.append(work.session, job.id, f"Divided {source.id} into these files by validation_split")
    limits = tenants.limits(project, service.settings.default_limits)
    tenants.refuse_job_beyond(work.session, project.id, limits)
    tenants.refuse_request_beyond(work.session, project.id, limits, job.body)
    return job


def _show(work: Work, job: Job, earlier: EarlierRuns) -> None:
    if earlier.preview is not None:
        job.preview = previews.summary(earlier.preview)
        events.append(work.session, job.id, previews.sentence(job.preview))
    if earlier.audit is not None:
        events.append(work.session, job.id, grader_audits.sentence(earlier.audit))


@router.get("")
def list_jobs(
    request: Request,
    project: CurrentProject,
    session: ReadSession,
    service: ServiceDep,
    after: After = None,
    limit: Limit = 20,
) -> Listing[JobOut]:
    """List jobs, newest first; `metadata[k]=v` filters by a pair, `metadata=null` selects jobs without metadata."""
    query = request.query_params
    page = lifecycle.page(
        session,
        project.id,
        after=after,
        limit=clamped(limit),
        metadata={key[9:-1]: value for key, value in query.items() if re.fullmatch(r"metadata\[.+\]", key)},
        without_metadata=query.get("metadata") == "null",
    )
    return Listing(data=render(session, service, *page.items), has_more=page.has_more)


@router.get("/{job_id}")
def retrieve_job(job_id: str, project: CurrentProject, session: ReadSession, service: ServiceDep) -> JobOut:
    """Retrieve a job."""
    return render(session, service, lifecycle.get(session, project.id, job_id))[0]


@router.post("/{job_id}/cancel", responses=refusals(400))
def cancel_job(job_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> JobOut:
    """Cancel a job permanently."""
    return _changed(job_id, project, service, uow, lifecycle.cancel)


@router.post("/{job_id}/pause", responses=refusals(400))
def pause_job(job_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> JobOut:
    """Pause a job at its next checkpoint."""
    return _changed(job_id, project, service, uow, lifecycle.pause)


@router.post("/{job_id}/resume", responses=refusals(400))
def resume_job(job_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> JobOut:
    """Resume a paused job from its last checkpoint."""

    def resume(work: Work, job: Job) -> None:
        lifecycle.resume(work, job)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_job_beyond(work.session, project.id, limits)

    return _changed(job_id, project, service, uow, resume)


def _changed(
    job_id: str, project: Project, service: Service, uow: UnitOfWork, change: Callable[[Work, Job], object]
) -> JobOut:
    with uow() as work:
        job = lifecycle.get(work.session, project.id, job_id)
        change(work, job)
        return render(work.session, service, job)[0]


@router.post("/{job_id}/budget")
def change_budget(
    job_id: str, body: BudgetChange, project: CurrentProject, service: ServiceDep, uow: UnitOfWork
) -> JobOut:
    """Change or remove the budget of an unfinished job. A job that paused at its old budget must be resumed."""
    budget = body.budget.to_row(Price.of(service.settings)) if body.budget else None
    with uow() as work:
        job = lifecycle.get(work.session, project.id, job_id)
        lifecycle.set_budget(work, job, budget)
        return render(work.session, service, job)[0]


@router.get("/{job_id}/events")
def list_events(
    job_id: str,
    project: CurrentProject,
    session: ReadSession,
    after: After = None,
    limit: Limit = 20,
    type: Annotated[
        Literal["message", "metrics"] | None, Query(description="Only events of this type.")
    ] = None,
) -> Listing[EventOut]:
    """List the events of a job, newest first."""
    job = lifecycle.get(session, project.id, job_id)
    page = events.page(session, job.id, type=type, after=after, limit=clamped(limit))
    return Listing(data=[EventOut.of(event) for event in page.items], has_more=page.has_more)


@router.get("/{job_id}/checkpoints")
def list_checkpoints(
    job_id: str,
    project: CurrentProject,
    session: ReadSession,
    service: ServiceDep,
    after: After = None,
    limit: Limit = 10,
) -> EndedListing[CheckpointOut]:
    """List the checkpoints of a job, newest first."""
    job = lifecycle.get(session, project.id, job_id)
    page = tuned_models.checkpoints(session, job, after=after, limit=clamped(limit))
    names = tuned_models.names(session, page.items)
    # Only the embedded deployment shows paths in the blob store.
    url = service.blobs.url if service.settings.embedded else lambda key: None
    data = [
        CheckpointOut.of(checkpoint, names.get(checkpoint.id), url(checkpoint.blob_prefix))
        for checkpoint in page.items
    ]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))
