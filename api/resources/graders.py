"""/v1/fine_tuning/alpha/graders: validate and run graders."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BeforeValidator

from api.http.deps import CurrentProject, ReadProject, Service, ServiceDep
from api.http.judge_usage import booked_judges, refuse_judges_beyond
from api.http.large_bodies import body_is_read
from api.http.masks import refuse_masks
from api.http.openapi import FOR_ANY_KEY, refusals
from api.http.schema_checks import in_turn
from api.http.shapes import Body
from api.http.stored_graders import OrStored, ResolvesGraders
from core.asgi import until_gone
from core.database.tables import Project
from core.errors import GraderEnvironmentMissing, InvalidRequest, Unavailable
from core.results import lineage
from graders.backends import Backends
from graders.build import python_parts, reward_model_parts
from graders.checks import has_patterns
from graders.environments.catalog import EnvironmentNotBuilt
from graders.hazards.pool import OWNER, HazardFailed
from graders.report import run_report
from graders.run import grade_within
from graders.sandbox.pool import SandboxFailed, SandboxUnavailable
from graders.spec import GraderSpec, InvalidGrader, dump, parse_grader
from graders.types import Grade, Item, Sample

router = APIRouter(prefix="/fine_tuning/alpha/graders", tags=["Graders"])

# Shorter than in a job, where no user waits for the result of a remote grader.
TIMEOUT_S = 180.0

Grader = Annotated[GraderSpec, BeforeValidator(parse_grader), OrStored()]
# The `dependencies` of endpoints with a `grader: Grader`, which may be a reference.
TAKES_GRADER = [Depends(ResolvesGraders(("grader",)))]


def _refuse_unusable(spec: GraderSpec, backends: Backends, param: str) -> None:
    """Reject a valid grader that this server cannot run. Blocking: not for the event loop.

    Raises:
        InvalidRequest: the operator has not enabled a required service.
        GraderEnvironmentMissing: the grader's environment is not built on this server.
        Unavailable: the hazard pool failed.
    """
    try:
        backends.check(spec, param)
    except InvalidGrader as cause:
        raise InvalidRequest(cause.message, param=cause.param, code=cause.code) from cause
    except EnvironmentNotBuilt as missing:
        raise GraderEnvironmentMissing(str(missing)) from missing
    except HazardFailed as broken:
        raise Unavailable(f"The grader could not be checked: {broken}") from broken


class GraderValidate(Body):
    grader: Grader


class GraderRun(Body):
    grader: Grader
    model_sample: str
    item: dict[str, Any] | None = None
    trace_id: str | None = None  # sent to endpoints, to correlate their logs


def refuse_reward_models(spec: GraderSpec, param: str) -> None:
    """Reject a grader with a reward model where no job loads its weights.

    Raises:
        InvalidRequest: names the first one.
    """
    for where, part in reward_model_parts(spec, param):
        raise InvalidRequest(
            f"The reward model '{part.model}' scores answers in reinforcement jobs only: its weights are not loaded "
            "elsewhere in this version.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )


def _refuse_unknown_reward_models(spec: GraderSpec, service: Service, project: Project) -> None:
    """Raise InvalidRequest or NotFound for a reward model that no job of the project could grade with."""
    for where, part in reward_model_parts(spec, "grader"):
        with service.database.read() as session:
            lineage.grading_model(
                session, project.id, part.model, None, service.registry, param=f"{where}.model"
            )


async def refuse(
    spec: GraderSpec,
    service: Service,
    project: Project,
    param: str = "grader",
    *,
    in_job: bool = False,
) -> None:
    """Reject graders that `_refuse_unusable` rejects, and python graders whose source does not compile.

    `in_job`: a job grades with it, and has the weights of reward models.

    Compiling a pattern counts as a check of the project, compiling a source in the sandbox as a grader run.

    Raises:
        TooManyAtOnce: the project's queue for these is full.
    """
    # Creating a pipeline does not watch for a disconnect, and may wait here for minutes.
    body_is_read()
    if not in_job:
        refuse_reward_models(spec, param)
    refuse_masks(dump(spec), param)
    check = partial(_refuse_unusable, spec, service.backends, param)
    if has_patterns(spec):
        await in_turn(check, service, project)
    else:
        await to_thread.run_sync(check)
    if not any(python_parts(spec)):
        return
    async with compiling(service, project):
        await service.backends.compile(spec, project.id, param)


@asynccontextmanager
async def compiling(service: Service, project: Project) -> AsyncIterator[None]:
    """Sources that are compiled inside of it count as a grader run of the project; refusals are those of the API."""
    try:
        async with service.admission.grader_runs.admitted(project.id):
            yield
    except InvalidGrader as cause:
        raise InvalidRequest(cause.message, param=cause.param, code=cause.code) from cause
    except EnvironmentNotBuilt as missing:
        raise GraderEnvironmentMissing(str(missing)) from missing
    except (SandboxUnavailable, SandboxFailed) as cause:
        raise Unavailable(f"The sandbox of python graders: {cause}") from cause


@router.post(
    "/validate",
    openapi_extra=FOR_ANY_KEY,
    response_model=dict[str, Any],
    responses=refusals(404),
    dependencies=TAKES_GRADER,
)
async def validate_grader(
    request: Request, body: GraderValidate, project: ReadProject, service: ServiceDep
) -> dict[str, Any] | Response:
    """Validate a grader without running it, and return it in normalized form."""

    async def validated() -> dict[str, Any]:
        await refuse(body.grader, service, project, in_job=True)
        await to_thread.run_sync(_refuse_unknown_reward_models, body.grader, service, project)
        return {"grader": dump(body.grader, masked=True)}

    valid = await until_gone(request.receive, validated())
    return Response(status_code=499) if valid is None else valid


@router.post("/run", response_model=None, responses=refusals(404, 503), dependencies=TAKES_GRADER)
async def run_grader(
    request: Request, body: GraderRun, project: CurrentProject, service: ServiceDep
) -> dict[str, Any] | Response:
    """Grade one sample. A failing grader is a successful response: reward 0 and an error flag.

    A client that disconnects cancels the run or its place in the queue. Tokens of judges count towards the project's
    limit.
    """
    report = await until_gone(request.receive, _report(service, project, body))
    return Response(status_code=499) if report is None else report


async def _report(service: Service, project: Project, body: GraderRun) -> dict[str, Any]:
    await refuse(body.grader, service, project)
    async with service.admission.grader_runs.admitted(project.id):
        await to_thread.run_sync(refuse_judges_beyond, service, project, body.grader)
        sample = Sample.from_text(body.model_sample, parse_json=True)
        grade = await service.graders.run(_graded(service, project.id, body, sample, body.item or {}))
    return run_report(body.grader, grade)


async def _graded(service: Service, owner: str, body: GraderRun, sample: Sample, item: Item) -> Grade:
    OWNER.set(owner)
    backends = service.backends
    async with (
        booked_judges(service, owner, model=None) as ledger,
        backends.open(body.grader, owner=owner, trace_id=body.trace_id, ledger=ledger) as grader,
    ):
        return await grade_within(TIMEOUT_S, grader, sample, item)
