"""/v1/evals: created evals, and the validations of jobs as read-only evals (docs/howto/evals.md)."""

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.deps import CurrentProject, ReadSession, ServiceDep, UnitOfWork
from api.http.idempotency import REPLAYS_FIRST, Once
from api.http.openapi import refusals
from api.http.shapes import After, EndedListing, Limit, clamped
from api.http.stored_graders import EVERY, ResolvesGraders
from api.resources.eval_checks import refuse_eval
from api.resources.eval_requests import EvalCreate, EvalUpdate
from api.resources.eval_shapes import EvalOut
from core.database.engine import Work
from core.database.tables import Eval, Job, now
from core.errors import MadeByJobs
from core.evals import catalog, imported
from core.tenancy import tenants
from graders.spec import dump

router = APIRouter(prefix="/evals", tags=["Evals"])

Order = Annotated[Literal["asc", "desc"], Query(description="asc: oldest first; desc: newest first.")]


class EvalDeleted(BaseModel):
    object: Literal["eval.deleted"] = "eval.deleted"
    deleted: Literal[True] = True
    eval_id: str


@router.post(
    "",
    status_code=201,
    response_model=EvalOut,
    responses=refusals(404),
    dependencies=[REPLAYS_FIRST, Depends(ResolvesGraders(("testing_criteria", EVERY)))],
)
async def create_eval(
    body: EvalCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> EvalOut | JSONResponse:
    """Create an eval: the shape of its rows, and the criteria that its runs are graded by."""
    config = body.data_source_config.model_dump(mode="json", exclude_unset=True)
    await refuse_eval(config, body.testing_criteria, service, project)

    def create(work: Work) -> EvalOut:
        made = Eval(
            project_id=project.id,
            name=body.name or "",
            metadata_=body.metadata,
            data_source_config=config,
            testing_criteria=[dump(spec) for spec in body.testing_criteria],
        )
        made.created_at = made.updated_at = now()
        catalog.create(work, made)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_stored_beyond(work.session, project.id, limits)
        return EvalOut.of(made)

    return await to_thread.run_sync(once, create)


@router.get("")
def list_evals(
    project: CurrentProject,
    session: ReadSession,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    order_by: Annotated[
        Literal["created_at", "updated_at"],
        Query(description="The eval of a job is created with it and never updated."),
    ] = "created_at",
) -> EndedListing[EvalOut]:
    """List created evals and the evals of all jobs."""
    page = catalog.page(
        session,
        project.id,
        after=after,
        limit=clamped(limit),
        newest_first=order == "desc",
        order_by=order_by,
    )
    return listing([EvalOut.of(shown) for shown in page.items], page.has_more)


@router.get("/{eval_id}")
def retrieve_eval(eval_id: str, project: CurrentProject, session: ReadSession) -> EvalOut:
    """Retrieve an eval."""
    return EvalOut.of(catalog.find(session, project.id, eval_id))


@router.post("/{eval_id}", responses=refusals(405))
def update_eval(eval_id: str, body: EvalUpdate, project: CurrentProject, uow: UnitOfWork) -> EvalOut:
    """Change the name or the metadata of a created eval."""
    with uow() as work:
        made = changeable(catalog.find(work.session, project.id, eval_id))
        if body.name is not None:
            made.name = body.name
        if "metadata" in body.model_fields_set:
            made.metadata_ = body.metadata
        made.updated_at = now()
        work.record("eval.updated", imported.public_id(made.id))
        return EvalOut.of(made)


@router.delete("/{eval_id}", responses=refusals(405))
def delete_eval(eval_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> EvalDeleted:
    """Delete a created eval and its runs. Runs in progress are cancelled."""
    with uow() as work:
        made = changeable(catalog.find(work.session, project.id, eval_id))
        keys = catalog.remove(work, made)
    service.blobs.discard(*keys)
    return EvalDeleted(eval_id=eval_id)


def changeable(found: Eval | Job) -> Eval:
    """Raise MadeByJobs for the eval of a job, which shows the job's own validations."""
    if isinstance(found, Job):
        raise MadeByJobs
    return found


def listing(data: list[Any], has_more: bool) -> EndedListing[Any]:
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return EndedListing(data=data, has_more=has_more, first_id=first, last_id=last)
