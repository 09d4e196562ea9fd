"""/v1/regraft/pipelines: named stages, each a job or a file made from the results of others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.http.deps import CurrentActor, CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import REPLAYS_FIRST, Once
from api.http.openapi import refusals
from api.http.shapes import After, EndedListing, Limit, clamped, ends
from api.http.stored_graders import EVERY, TYPE, ResolvedReference, ResolvesGraders
from api.resources import job_body, job_checks, pipeline_requests
from api.resources.graders import refuse
from api.resources.pipeline_requests import PipelineClone, PipelineCreate, StageCreate, SweepStage
from core.database.engine import Work
from core.database.tables import EvalRun, Job, Pipeline, Project
from core.errors import InvalidRequest, ModelNotFound
from core.evals import summary, targets
from core.jobs.budgets import Price
from core.jobs.params import TEACHER_PARAM
from core.masking import hide_in_method, hide_secrets
from core.pipelines import graph, lifecycle, sweeps
from core.pipelines.lifecycle import Stage
from core.results import model_aliases
from core.storage import files
from core.tenancy import tenants

router = APIRouter(prefix="/regraft/pipelines", tags=["regraft"])

WHOLE = PipelineClone()


class StageErrorOut(BaseModel):
    """The error that ended a stage."""

    code: str
    message: str


class SweptJobOut(BaseModel):
    """A job of a sweep."""

    settings: dict[str, Any]
    job_id: str
    job_status: str | None = None
    stopped: str | None = Field(default=None, description="The reason for which the sweep has stopped it.")
    reward: float | None = Field(
        default=None,
        description="At the end: its mean over the rows that are graded in all jobs that succeeded.",
    )
    difference: float | None = Field(
        default=None, description="Of the best job minus this one; null of the best one."
    )
    low: float | None = Field(
        default=None, description="Lower 95 % bound of the difference, for all pairs of jobs at once."
    )


class StageOut(BaseModel):
    """A stage. Its results are `model` or `file`, once it has succeeded."""

    name: str
    kind: str = Field(description="job, sweep, sample, select or mix.")
    status: str = Field(description="waiting, running, succeeded, failed or cancelled.")
    needs: list[str] = Field(description="The stages that must succeed before this one starts.")
    spec: dict[str, Any] | None = Field(description="The request, without secrets; null in lists.")
    job_id: str | None = None
    job_status: str | None = None
    jobs: Annotated[list[SweptJobOut], Field(description="Of a sweep.")] = []
    conclusion: str | None = Field(default=None, description="Of a sweep that has ended, in one sentence.")
    eval_id: str | None = None
    run_id: str | None = None
    progress: dict[str, int] | None = Field(default=None, description="Of a sample stage: finished, total.")
    model: str | None = None
    file: str | None = None
    rows: int | None = Field(default=None, description="Of the file.")
    error: StageErrorOut | None = None
    note: str | None = Field(default=None, description="The reason why the stage cannot start yet.")
    started_at: int | None = None
    finished_at: int | None = None
    reused_from: str | None = Field(default=None, description="The pipeline that made the result of a clone.")
    earlier: Annotated[list[str], Field(description="The jobs of failed attempts.")] = []


class PipelineOut(BaseModel):
    """Named stages, each a job or a file made from the results of others."""

    id: str
    object: str = "regraft.pipeline"
    created_at: int
    finished_at: int | None
    name: str | None
    status: str = Field(description="running, paused, succeeded, failed or cancelled.")
    metadata: dict[str, str] | None
    cloned_from: str | None
    stages: list[StageOut]

    @classmethod
    def of(cls, session: Session, pipeline: Pipeline, *, is_listed: bool = False) -> "PipelineOut":
        statuses = _statuses(session, pipeline.stages)
        runs = _progress(session, pipeline.stages)
        return cls(
            id=pipeline.id,
            created_at=pipeline.created_at,
            finished_at=pipeline.finished_at,
            name=pipeline.name,
            status=pipeline.status,
            metadata=pipeline.metadata_,
            cloned_from=pipeline.cloned_from,
            stages=[
                StageOut.model_validate(
                    stage
                    | {
                        "needs": graph.needs(plan),
                        "job_status": statuses.get(stage.get("job_id", "")),
                        "progress": runs.get(stage.get("run_id", "")),
                        "jobs": [
                            one | {"job_status": statuses.get(one["job_id"])} for one in stage.get("jobs", ())
                        ],
                        "spec": None if is_listed else shown_spec(stage["spec"]),
                    }
                )
                for stage, plan in zip(pipeline.stages, lifecycle.planned(pipeline.stages), strict=True)
            ],
        )


def _statuses(session: Session, stages: Sequence[Stage]) -> Mapping[str, str]:
    ids = [job_id for stage in stages for job_id in lifecycle.job_ids(stage)]
    found = session.execute(select(Job.id, Job.status).where(Job.id.in_(ids)))
    return {row.id: row.status for row in found}


def _progress(session: Session, stages: Sequence[Stage]) -> Mapping[str, dict[str, int]]:
    ids = [stage["run_id"] for stage in stages if "run_id" in stage]
    runs = session.scalars(select(EvalRun).where(EvalRun.id.in_(ids)))
    return {run.id: {"finished": summary.finished(run.summary), "total": run.total} for run in runs}


def shown_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The specification without secrets of grader and tools. A stored grader is shown as a reference to its version."""
    if isinstance(spec.get("job"), Mapping):  # of a sweep
        return {**spec, "job": shown_spec(spec["job"])}
    method = spec.get("method") or {}
    inner = method.get("reinforcement") or {}
    shown = dict(spec)
    if isinstance(spec.get("grader"), dict):
        shown["grader"] = hide_secrets(spec["grader"])
    if inner:
        visible = hide_in_method(inner)
        for name in ("grader", "shadow_grader"):
            grader = inner.get(name)
            if isinstance(grader, dict) and (stored := ResolvedReference.of(grader)) is not None:
                visible[name] = {"type": TYPE, **stored.reference()}
        shown["method"] = {**method, "reinforcement": visible}
    return shown


@router.post(
    "",
    status_code=201,
    response_model=PipelineOut,
    responses=refusals(404),
    dependencies=[
        REPLAYS_FIRST,
        Depends(
            ResolvesGraders(
                *(
                    ("stages", EVERY, *job, *path)
                    for job in (("job",), ("sweep", "job"))
                    for path in job_body.GRADER_PATHS
                ),
                keep=True,
            )
        ),
        Depends(ResolvesGraders(("stages", EVERY, "sample", "grader"))),
    ],
)
async def create_pipeline(
    body: PipelineCreate, project: CurrentProject, actor: CurrentActor, service: ServiceDep, once: Once
) -> PipelineOut | JSONResponse:
    """Create a pipeline. All of its stages are checked first, as far as they do not depend on results."""
    plan = [stage.planned() for stage in body.stages]
    graph.check(plan)
    for number, stage in enumerate(body.stages):
        await _refuse_stage(stage, f"stages[{number}]", service, project)

    def create(work: Work) -> PipelineOut:
        made = Pipeline(
            project_id=project.id,
            name=body.name,
            metadata_=body.metadata,
            actor=actor.id,
            stages=[lifecycle.new_stage(stage) for stage in plan],
        )
        return _added(work, made, project, service)

    return await to_thread.run_sync(once, create)


def _added(work: Work, pipeline: Pipeline, project: Project, service: Service) -> PipelineOut:
    """Create the pipeline. Raises QuotaExceeded if the storage of the project is used up."""
    limits = tenants.limits(project, service.settings.default_limits)
    tenants.refuse_request_beyond(work.session, project.id, limits, pipeline.stages)
    lifecycle.create(work, pipeline)
    return PipelineOut.of(work.session, pipeline)


async def _refuse_stage(stage: StageCreate, where: str, service: Service, project: Project) -> None:
    """Reject what no result of another stage can mend: an invalid job, an unusable grader, a model or file that is not
    there.
    """
    if stage.job is not None:
        await _refuse_job(stage.job, stage.name, f"{where}.job", service, project)
        return
    if stage.sweep is not None:
        await _refuse_sweep(stage.sweep, stage.name, f"{where}.sweep", service, project)
        return
    if stage.sample is not None and stage.sample.grader is not None:
        await refuse(stage.sample.grader, service, project, f"{where}.sample.grader")
    await to_thread.run_sync(_refuse_sources, stage, where, service, project)


async def _refuse_job(
    sent: Mapping[str, Any],
    name: str,
    where: str,
    service: Service,
    project: Project,
    *,
    is_grader_known: bool = False,
) -> job_body.JobCreate:
    job = pipeline_requests.parsed_job(sent, where)
    # The job gets two entries of metadata more than the request has, and the same limit.
    pipeline_requests.parsed_job(pipeline_requests.of_pipeline(sent, "", name), where)
    named = {path for path, _ in graph.references(sent)}
    try:
        is_method_known = not any(path.startswith(".method") for path in named)
        if is_method_known and not is_grader_known:
            job = await job_checks.usable_body(job, service, project)
        if named.isdisjoint((".model", f".{TEACHER_PARAM}")):
            await to_thread.run_sync(job_checks.accept, job, service, project)
        await to_thread.run_sync(_refuse_files, job, named, service, project)
        if is_method_known and ".training_file" not in named:
            await to_thread.run_sync(job_checks.audit_of, job, project, service)
    except ModelNotFound as missing:
        missing.param = f"{where}.{missing.param}"
        raise
    except InvalidRequest as mistake:
        raise pipeline_requests.named_within(mistake, where) from None
    return job


async def _refuse_sweep(sweep: SweepStage, name: str, where: str, service: Service, project: Project) -> None:
    _refuse_job_of_sweep(sweep, where)
    try:
        if (twice := sweeps.setting_named_twice([*sweep.over])) is not None:
            raise InvalidRequest(
                f"Invalid value for 'over': '{twice}' names the same setting as another name.",
                param=f"over.{twice}",
            )
        sweep.gpu_seconds(Price.of(service.settings))  # refuses money without a price
        sent = sweep.jobs
    except InvalidRequest as mistake:
        raise pipeline_requests.named_within(mistake, where) from None
    most = tenants.limits(project, service.settings.default_limits).queued_jobs
    if most is not None and len(sent) > most:
        raise InvalidRequest(
            f"Invalid value for '{where}.over': it has {len(sent)} combinations, and the project may queue "
            f"{most} jobs.",
            param=f"{where}.over",
        )
    for number, body in enumerate(sent):
        await _refuse_job(body, name, f"{where}.job", service, project, is_grader_known=number > 0)


def _refuse_job_of_sweep(sweep: SweepStage, where: str) -> None:
    """Refuse a job without rewards or without common rows, before its hyperparameters, which may be those of `over`."""
    own = {name: values[0] for name, values in sweep.over.items() if name in sweeps.OF_THE_JOB}
    job = pipeline_requests.parsed_job(sweeps.with_settings(sweep.job, own), f"{where}.job")
    try:
        job.reinforcement("A sweep")
    except InvalidRequest as mistake:
        raise pipeline_requests.named_within(mistake, f"{where}.job") from None
    if job.validation_split is not None:
        raise InvalidRequest(
            "A sweep compares its jobs on the same rows: send validation_file in place of validation_split.",
            param=f"{where}.job.validation_split",
        )


def _refuse_files(job: job_body.JobCreate, named: set[str], service: Service, project: Project) -> None:
    with service.database.read() as session:
        for param in ("training_file", "validation_file"):
            file_id = getattr(job, param)
            if file_id is not None and f".{param}" not in named:
                files.get_dataset(session, project.id, file_id, param=param)


def _refuse_sources(stage: StageCreate, where: str, service: Service, project: Project) -> None:
    spec = stage.planned().spec
    kind = stage.planned().kind
    named = {path for path, _ in graph.references(spec)}
    sources = {".file": spec.get("file")} | {
        f".files[{index}].file": one["file"] for index, one in enumerate(spec.get("files", ()))
    }
    with service.database.read() as session:
        for path, file_id in sources.items():
            if file_id is not None and path not in named:
                files.get_dataset(session, project.id, file_id, param=f"{where}.{kind}{path}")
        if stage.sample is not None and ".model" not in named:
            name = stage.sample.model
            served = targets.served(session, service.blobs, service.registry, project.id, name)
            if served is None and name not in service.backends.models:
                model_aliases.refuse(session, project.id, name, f"{where}.sample.model")
                missing = ModelNotFound(name, [*service.registry.names, *service.backends.models])
                missing.param = f"{where}.sample.model"
                raise missing


@router.get("")
def list_pipelines(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> EndedListing[PipelineOut]:
    """List the pipelines, newest first."""
    page = lifecycle.page(session, project.id, after=after, limit=clamped(limit))
    shown = [PipelineOut.of(session, one, is_listed=True) for one in page.items]
    return EndedListing(data=shown, has_more=page.has_more, **ends(page))


@router.get("/{pipeline_id}")
def retrieve_pipeline(pipeline_id: str, project: CurrentProject, session: ReadSession) -> PipelineOut:
    """Retrieve a pipeline with its stages."""
    return PipelineOut.of(session, lifecycle.get(session, project.id, pipeline_id))


@router.post("/{pipeline_id}/cancel", responses=refusals(400))
def cancel_pipeline(pipeline_id: str, project: CurrentProject, uow: UnitOfWork) -> PipelineOut:
    """Cancel a pipeline, and the jobs of its running stages."""
    return _changed(pipeline_id, project, uow, lifecycle.cancel)


@router.post("/{pipeline_id}/pause", responses=refusals(400))
def pause_pipeline(pipeline_id: str, project: CurrentProject, uow: UnitOfWork) -> PipelineOut:
    """Start no further stage, and pause the running jobs."""
    return _changed(pipeline_id, project, uow, lifecycle.pause)


@router.post("/{pipeline_id}/resume", responses=refusals(400))
def resume_pipeline(pipeline_id: str, project: CurrentProject, uow: UnitOfWork) -> PipelineOut:
    """Resume a paused pipeline and its paused jobs."""
    return _changed(pipeline_id, project, uow, lifecycle.resume)


@router.post("/{pipeline_id}/retry", responses=refusals(400))
def retry_pipeline(pipeline_id: str, project: CurrentProject, uow: UnitOfWork) -> PipelineOut:
    """Start the failed and cancelled stages of a pipeline again. The results of all others are kept."""
    return _changed(pipeline_id, project, uow, lifecycle.retry)


def _changed(
    pipeline_id: str, project: Project, uow: UnitOfWork, change: Callable[[Work, Pipeline], None]
) -> PipelineOut:
    with uow() as work:
        pipeline = lifecycle.get(work.session, project.id, pipeline_id, lock=True)
        change(work, pipeline)
        return PipelineOut.of(work.session, pipeline)


@router.post(
    "/{pipeline_id}/clone", status_code=201, response_model=PipelineOut, responses=refusals(400, 404)
)
async def clone_pipeline(
    pipeline_id: str,
    project: CurrentProject,
    actor: CurrentActor,
    service: ServiceDep,
    once: Once,
    body: PipelineClone = WHOLE,
) -> PipelineOut | JSONResponse:
    """Create a pipeline with the same stages. Those before `from` keep their results."""

    def clone(work: Work) -> PipelineOut:
        pipeline = lifecycle.get(work.session, project.id, pipeline_id)
        try:
            stages = lifecycle.cloned(pipeline, body.first)
        except KeyError:
            raise InvalidRequest(
                f"Invalid value for 'from': the pipeline has no stage '{body.first}'.", param="from"
            ) from None
        made = Pipeline(
            project_id=project.id,
            name=body.name or pipeline.name,
            metadata_=body.metadata or pipeline.metadata_,
            actor=actor.id,
            cloned_from=pipeline.id,
            stages=stages,
        )
        return _added(work, made, project, service)

    return await to_thread.run_sync(once, clone)
