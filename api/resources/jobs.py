"""/v1/fine_tuning/jobs: create, watch and control jobs."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError
from sqlalchemy.orm import Session

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.idempotency import Once
from api.http.openapi import refusals
from api.http.schema_checks import refuse_unusable_schema
from api.http.shapes import After, Body, EndedListing, Limit, Listing, Measured, clamped, ends
from api.resources.graders import refuse
from api.resources.integrations import Integrations, to_rows
from core.database.engine import Work
from core.database.tables import Checkpoint, Event, Job, Project
from core.errors import InvalidParameter, InvalidRequest
from core.jobs import budgets, events, fairness, integrations, lifecycle, usage
from core.jobs.budgets import Price
from core.jobs.devices import device_of
from core.jobs.hyperparameters import NO_SAMPLER_OF_ITS_OWN, Hyperparameters, shown_advanced
from core.registry import BaseModelEntry, SamplerName, sampler_of
from core.response_format import ResponseFormat
from core.results import evals, tuned_models
from core.settings import Settings
from core.storage import files
from core.strict import StrictModel
from core.tenancy import tenants
from graders.build import reads_tools
from graders.spec import GIVE_STEPS, GraderSpec, dump, hide_secrets, parse_grader

router = APIRouter(prefix="/fine_tuning/jobs", tags=["Fine-tuning"])


def _required(value: Any) -> Any:
    if value is None:
        raise PydanticKnownError("missing")
    return value


GRADER_PARAM = "method.reinforcement.grader"
Checked = BeforeValidator(partial(parse_grader, param=GRADER_PARAM))
NoNul = r"^[^\x00]*$"  # PostgreSQL can store it, but not search for it


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("only letters, digits, punctuation and plain spaces are allowed")
    return text


Suffix = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
MetadataKey = Annotated[str, Field(max_length=64, pattern=NoNul)]
MetadataValue = Annotated[str, Field(max_length=512, pattern=NoNul)]


def _nothing(value: Any, info: ValidationInfo) -> None:
    """Accept null and empty values; reject anything else by name."""
    if value not in (None, [], {}):
        where = f"method.reinforcement.{info.field_name}"
        message = f"'{where}' is not supported by this version: answers are single messages without tools."
        raise InvalidParameter(message, param=where, code="unsupported_parameter")


Nothing = Annotated[None, BeforeValidator(_nothing)]


def _empty_for_null(value: Any) -> Any:
    return {} if value is None else value


class Reinforcement(StrictModel):
    grader: Annotated[GraderSpec, Checked]
    hyperparameters: Annotated[Hyperparameters, BeforeValidator(_empty_for_null)] = Hyperparameters()
    response_format: ResponseFormat | None = None
    tools: Nothing = None  # Azure's field, as is the next one
    max_episode_steps: Nothing = None

    @model_validator(mode="after")
    def _steps_come_from_somewhere(self) -> "Reinforcement":
        if self.hyperparameters.advanced.supervision == "process" and self.grader.type not in GIVE_STEPS:
            raise ValueError(
                f"supervision 'process' needs a grader that scores steps ({' or '.join(GIVE_STEPS)}), "
                f"and '{self.grader.type}' gives one score per answer"
            )
        return self


UNSUPPORTED_METHODS = ("supervised", "dpo")


class Method(StrictModel):
    type: Literal["reinforcement"]
    reinforcement: Reinforcement

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        """A client's typed object serializes unused methods as nulls."""
        if not isinstance(sent, dict):
            return sent
        return {key: one for key, one in sent.items() if key not in UNSUPPORTED_METHODS or one is not None}


# Above any realistic budget; keeps sums of such numbers finite.
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Budget(StrictModel):
    """A cap on a job's usage: {"gpu_seconds"}, or {"amount", "currency"} at the service's price."""

    gpu_seconds: Positive | None = None
    amount: Positive | None = None
    currency: Annotated[str, Field(max_length=3)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "Budget":
        if (self.gpu_seconds is None) == (self.amount is None):
            raise ValueError("give either gpu_seconds, or amount and currency")
        if (self.amount is None) != (self.currency is None):
            raise ValueError("amount and currency must be given together")
        return self

    def to_row(self, price: Price) -> dict[str, Any]:
        return budgets.to_row(self.model_dump(exclude_none=True), price)


class BudgetChange(Body):
    budget: Budget | None  # null removes the cap; the field is required, so that an empty request is an error


def _null(value: Any) -> None:
    """Only null and empty values reach this."""


def refuse_unsupported_method(sent: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for an unsupported method, before any other validation error.

    OpenAI's quickstart sends no method, which means "supervised" there.
    """
    method = sent.get("method")
    kind = method.get("type") if isinstance(method, Mapping) else "supervised" if method is None else method
    if kind in UNSUPPORTED_METHODS:
        left_out = " (the default where 'method' is left out)" if method is None else ""
        raise InvalidParameter(
            f"Method '{kind}'{left_out} is not supported by this server yet: it trains with method 'reinforcement' "
            "only. Send method={'type': 'reinforcement', 'reinforcement': {'grader': ...}} and a validation_file.",
            param="method.type",
            code="unsupported_method",
        )
    if sent.get("hyperparameters"):
        raise InvalidParameter(
            "The top-level 'hyperparameters' is deprecated and belongs to supervised jobs. Send "
            "'method.reinforcement.hyperparameters' instead.",
            param="hyperparameters",
            code="unsupported_parameter",
        )


class JobCreate(Body):
    model: str
    training_file: str
    # Optional in OpenAI's reference, and required for reinforcement in its guide.
    validation_file: Annotated[str, BeforeValidator(_required)]
    method: Method
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    integrations: Integrations | None = None
    budget: Budget | None = None  # extension: extra_body={"budget": ...}
    # Azure's price tier. Accepted and ignored.
    training_type: str | None = Field(default=None, alias="trainingType", max_length=64)
    hyperparameters: Annotated[None, BeforeValidator(_null)] = None  # see refuse_unsupported_method

    @model_validator(mode="before")
    @classmethod
    def _supported_method(cls, sent: Any) -> Any:
        if isinstance(sent, dict):
            refuse_unsupported_method(sent)
        return sent

    @field_validator("validation_file")
    @classmethod
    def _differs(cls, file_id: str, info: ValidationInfo) -> str:
        if file_id == info.data.get("training_file"):
            raise ValueError(
                "it must not be the training file: its rewards would say nothing about new prompts"
            )
        return file_id

    def reinforcement(self) -> dict[str, Any]:
        """method.reinforcement as the job stores and shows it."""
        asked = self.method.reinforcement
        return {
            "grader": dump(asked.grader),
            "hyperparameters": asked.hyperparameters.model_dump(mode="json"),
            "response_format": asked.response_format.to_row() if asked.response_format else None,
        }


class QueueOut(BaseModel):
    """Position of a waiting job in its queue, from 1, and what blocks it."""

    position: int
    reason: str


class VerdictOut(BaseModel):
    """The delivered model compared with its base on the validation rows (docs/howto/training.md, Verdict)."""

    outcome: Literal["improved", "no_difference", "worse"]
    base_reward: float
    tuned_reward: float
    difference: float
    ci_low: float | None
    ci_high: float | None
    wins: int
    losses: int
    ties: int
    rows: int
    ungraded: int
    step: int
    ground: str | None = None  # null: decided by the interval alone


class JobOut(BaseModel):
    """Every key of OpenAI's job is always present, with null for no value."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    error: dict[str, Any] | None
    seed: int
    method: dict[str, Any]
    integrations: list[Any]
    metadata: dict[str, str] | None
    user_provided_suffix: str | None
    usage_metrics: dict[str, Any] | None
    queue: QueueOut | None  # null: the job is not waiting
    shared_with_openai: Literal[False] = False
    eval_id: str  # the eval of its validations; empty before the first one
    # Extensions.
    budget: dict[str, Any] | None
    estimate: dict[str, Any] | None
    verdict: VerdictOut | None  # null: the job has not ended, or there was nothing to compare

    @classmethod
    def of(cls, job: Job, price: Price, place: fairness.QueuePosition | None) -> "JobOut":
        """From the row and its place in the queue only. `render` reads the places of a hundred jobs with one query."""
        asked = integrations.of_method(job)
        shown = {
            "grader": hide_secrets(asked["grader"]),
            "hyperparameters": render_hyperparameters(asked["hyperparameters"], job.resolved),
        }
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            estimated_finish=job.estimated_finish,
            model=job.model,
            fine_tuned_model=job.fine_tuned_model,
            organization_id=job.organization_id,
            status=job.status,
            training_file=job.training_file,
            validation_file=job.validation_file,
            result_files=[job.result_file] if job.result_file else [],
            trained_tokens=job.trained_tokens if job.status in lifecycle.FINAL else None,
            error=job.error,
            seed=job.seed,
            method={
                "type": "reinforcement",
                "reinforcement": asked | shown,
            },
            integrations=integrations.render(job),
            metadata=job.metadata_,
            user_provided_suffix=job.suffix,
            usage_metrics=usage.render(job, price),
            queue=None if place is None else QueueOut(position=place.position, reason=place.reason),
            eval_id=evals.eval_id(job.id),
            budget=budgets.render(job),
            verdict=None if job.verdict is None else VerdictOut(**job.verdict),
            estimate=None if job.status in lifecycle.FINAL else usage.render_estimate(job, price),
        )


class EventOut(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: Measured | dict[str, Any]  # of the type `metrics`: the step's

    @classmethod
    def of(cls, event: Event) -> "EventOut":
        return cls(
            id=event.id,
            created_at=event.created_at,
            level=event.level,
            message=event.message,
            type=event.type,
            data=event.data,
        )


class CheckpointOut(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str | None  # null: the name was deleted
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, int | float]
    adapter: str | None  # the folder of its PEFT adapter, where server and user share a machine

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str | None, adapter: str | None) -> "CheckpointOut":
        return cls(
            id=checkpoint.id,
            created_at=checkpoint.created_at,
            fine_tuned_model_checkpoint=name,
            fine_tuning_job_id=checkpoint.job_id,
            step_number=checkpoint.step,
            metrics=checkpoint_metrics(checkpoint),
            adapter=adapter,
        )


def render(session: Session, service: Service, *some: Job) -> list[JobOut]:
    """The jobs as the API shows them; one query for all of them."""
    places = fairness.places(session, some, service.settings.default_limits)
    price = Price.of(service.settings)
    return [JobOut.of(job, price, places.get(job.id)) for job in some]


@router.post("", response_model=JobOut, responses=refusals(404))
async def create_job(
    body: JobCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> JobOut | JSONResponse:
    """Create a reinforcement fine-tuning job."""
    await refuse_unusable(body, service, project)
    return await to_thread.run_sync(_created, body, project, service, once)


def _created(body: JobCreate, project: Project, service: Service, once: Once) -> JobOut | JSONResponse:
    accepted = accept(body, service)

    def create(work: Work) -> JobOut:
        find = partial(files.get_dataset, work.session, project.id)
        job = lifecycle.create(
            work,
            project=project,
            model=accepted.base_model,
            training_file=find(body.training_file, param="training_file"),
            validation_file=find(body.validation_file, param="validation_file"),
            suffix=body.suffix,
            seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
            metadata=body.metadata,
            reinforcement=integrations.pin(body.reinforcement(), accepted.integrations),
            gpu_class=accepted.model.gpu_class or service.settings.gpu_class,
            budget=accepted.budget,
            warnings=body.method.reinforcement.hyperparameters.warnings,
        )
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_job_beyond(work.session, project.id, limits)
        return render(work.session, service, job)[0]

    return once(create)


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
    with uow() as work:
        job = lifecycle.get(work.session, project.id, job_id)
        lifecycle.cancel(work, job)
        return render(work.session, service, job)[0]


@router.post("/{job_id}/pause", responses=refusals(400))
def pause_job(job_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> JobOut:
    """Pause a job at its next checkpoint."""
    with uow() as work:
        job = lifecycle.get(work.session, project.id, job_id)
        lifecycle.pause(work, job)
        return render(work.session, service, job)[0]


@router.post("/{job_id}/resume", responses=refusals(400))
def resume_job(job_id: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> JobOut:
    """Resume a paused job from its last checkpoint."""
    with uow() as work:
        job = lifecycle.get(work.session, project.id, job_id)
        lifecycle.resume(work, job)
        limits = tenants.limits(project, service.settings.default_limits)
        tenants.refuse_job_beyond(work.session, project.id, limits)
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
    job_id: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[EventOut]:
    """List the events of a job, newest first."""
    job = lifecycle.get(session, project.id, job_id)
    page = events.page(session, job.id, after=after, limit=clamped(limit))
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


async def refuse_unusable(body: JobCreate, service: Service, project: Project) -> None:
    """Reject a grader that this server cannot run, and a schema that cannot be enforced.

    Together with `accept` these are the validation rules of a job. A queued check holds no thread.
    """
    asked = body.method.reinforcement
    await refuse(asked.grader, service, project, GRADER_PARAM)
    where = "method.reinforcement.response_format"
    await refuse_unusable_schema(asked.response_format, where, service, project)


@dataclass(frozen=True)
class Accepted:
    """The validated parts of a job request, without its files."""

    base_model: str  # aliases are resolved
    model: BaseModelEntry
    budget: dict[str, Any] | None
    integrations: list[dict[str, Any]]


def accept(body: JobCreate, service: Service) -> Accepted:
    """Check a request that passed `refuse_unusable` against this installation.

    Creating a job and validating one share these rules.
    """
    return Accepted(
        base_model=service.registry.resolve(body.model),
        model=usable_model(body, service),
        budget=body.budget.to_row(Price.of(service.settings)) if body.budget else None,
        integrations=to_rows(body.integrations, service.settings.enabled_integrations),
    )


def usable_model(body: JobCreate, service: Service) -> BaseModelEntry:
    """Return the model to train; reject requests that this service cannot fulfill with it."""
    name = service.registry.resolve(body.model)
    model = service.registry.get(name)
    if where := reads_tools(body.method.reinforcement.grader, GRADER_PARAM):
        message = (
            f"'{where}' reads sample.output_tools, but answers of a job have none: tools are not supported."
        )
        raise InvalidRequest(message, param=where, code="unsupported_parameter")
    advanced = body.method.reinforcement.hyperparameters.advanced
    if (
        advanced.schedule.type == "off_policy"
        and _known_sampler(name, model, service.settings) == "transformers"
    ):
        where = f"method.reinforcement.hyperparameters.advanced.{advanced.path('off_policy_steps')}"
        raise InvalidRequest(NO_SAMPLER_OF_ITS_OWN, param=where)
    return model


def _known_sampler(name: str, model: BaseModelEntry, settings: Settings) -> SamplerName | None:
    """None: it depends on the worker, which validates the request before it loads the model."""
    if name in settings.samplers:
        return "vllm"
    gpu_class = model.gpu_class or settings.gpu_class
    choice = settings.of_class(gpu_class).sampler
    return sampler_of(model, choice, device_of(settings, gpu_class), vllm_installed=None)


def render_hyperparameters(asked: dict[str, Any], resolved: dict[str, Any] | None) -> dict[str, Any]:
    """The requested hyperparameters, "auto" included, and their resolved values once a run has resolved them."""
    if resolved is None:
        return asked
    # OpenAI's own names stay at the top level, where its users expect them.
    known = {name: value for name, value in resolved.items() if name in asked}
    ours = {name: value for name, value in resolved.items() if name not in asked}
    return asked | known | {"advanced": shown_advanced(asked["advanced"], ours)}


def checkpoint_metrics(checkpoint: Checkpoint) -> dict[str, int | float]:
    """The numbers that clients rank checkpoints by, in both common spellings."""
    measured = checkpoint.metrics
    train, valid = measured.get("train_mean_reward"), measured.get("full_valid_mean_reward")
    shown = {
        "step": checkpoint.step,
        "train_mean_reward": train,
        "train_reward_mean": train,
        "full_valid_mean_reward": checkpoint.valid_reward if valid is None else valid,
        "valid_reward_mean": checkpoint.valid_reward if valid is None else valid,
        "full_valid_mean_parse_error": measured.get("full_valid_mean_parse_error"),
        "full_valid_stderr": measured.get("full_valid_stderr"),
        "full_valid_difference": measured.get("full_valid_difference"),
        "completion_tokens_mean": measured.get("completion_tokens_mean"),
        "reasoning_tokens_mean": measured.get("reasoning_tokens_mean"),
    }
    return {name: value for name, value in shown.items() if value is not None}
