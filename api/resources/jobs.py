"""/v1/fine_tuning/jobs: create, watch and control jobs."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
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
from api.http.shapes import After, Body, EndedListing, Limit, Listing, Measured, SchemaOf, clamped, ends
from api.http.stored_graders import OrStored, ResolvedReference, ResolvesGraders
from api.resources import validation_split
from api.resources.graders import refuse
from api.resources.integrations import Integrations, to_rows
from core.database.engine import Work
from core.database.tables import Checkpoint, Event, Job, Preview, Project
from core.errors import InvalidParameter, InvalidRequest, NotFound
from core.jobs import (
    budgets,
    distillation,
    estimates,
    events,
    fairness,
    full,
    integrations,
    lifecycle,
    methods,
    offline_hyperparameters,
    usage,
)
from core.jobs.budgets import Price
from core.jobs.devices import device_of
from core.jobs.distillation import Distillation, OnPolicyDistillation
from core.jobs.hyperparameter_groups import Lora
from core.jobs.hyperparameters import (
    NO_ENGINES_OF_ITS_OWN,
    NO_SAMPLER_OF_ITS_OWN,
    Hyperparameters,
    shown_advanced,
)
from core.model_templates import is_reasoning
from core.registry import BaseModelEntry, SamplerName, sampler_of
from core.response_format import ResponseFormat
from core.results import evals, lineage, previews, tuned_models
from core.results.lineage import Parent
from core.settings import Settings
from core.storage import files
from core.storage.splitting import MAX_SHARE
from core.strict import StrictModel
from core.tenancy import tenants
from graders.build import reads_tools, reward_model_parts
from graders.spec import GIVE_STEPS, GraderSpec, dump, hide_secrets, parse_grader

router = APIRouter(prefix="/fine_tuning/jobs", tags=["Fine-tuning"])


GRADER_PARAM = "method.reinforcement.grader"
GRADER_PATH = tuple(GRADER_PARAM.split("."))
# The `dependencies` of endpoints whose body is that of a job.
TAKES_JOB = [Depends(ResolvesGraders(GRADER_PATH, keep=True))]
STORED_GRADER = "stored_grader"  # in the method of a job: the reference that its grader was created from
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


class RewardModelMethod(StrictModel):
    hyperparameters: Annotated[
        offline_hyperparameters.RewardHyperparameters, BeforeValidator(_empty_for_null)
    ] = offline_hyperparameters.RewardHyperparameters()


class Reinforcement(StrictModel):
    grader: Annotated[GraderSpec, Checked, OrStored()]
    hyperparameters: Annotated[Hyperparameters, BeforeValidator(_empty_for_null)] = Hyperparameters()
    response_format: ResponseFormat | None = None
    tools: Nothing = None  # Azure's field, as is the next one
    max_episode_steps: Nothing = None
    _stored: ResolvedReference | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _notes_the_reference(cls, sent: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the specification of a stored grader, and remember where it came from."""
        found = ResolvedReference.of(sent.get("grader")) if isinstance(sent, Mapping) else None
        if found is None:
            return handler(sent)
        made = handler({**sent, "grader": found.grader})
        made._stored = found
        return made

    def stored_grader(self) -> dict[str, str] | None:
        """The name and the version of the stored grader; None: the request has a specification."""
        return None if self._stored is None else self._stored.shown()

    @model_validator(mode="after")
    def _steps_come_from_somewhere(self) -> "Reinforcement":
        if self.hyperparameters.advanced.supervision == "process" and self.grader.type not in GIVE_STEPS:
            raise ValueError(
                f"supervision 'process' needs a grader that scores steps ({' or '.join(GIVE_STEPS)}), "
                f"and '{self.grader.type}' gives one score per answer"
            )
        return self

    @model_validator(mode="after")
    def _reward_models_have_the_weights_to_themselves(self) -> "Reinforcement":
        schedule = self.hyperparameters.advanced.schedule
        while_sampling = schedule.type == "off_policy" or schedule.overlap
        if while_sampling and any(reward_model_parts(self.grader)):
            raise ValueError(
                "a grader with a reward model needs the schedule on_policy without overlap: it computes with the "
                "weights of the policy, which sample or learn meanwhile"
            )
        return self


class SupervisedMethod(StrictModel):
    hyperparameters: Annotated[
        offline_hyperparameters.SupervisedHyperparameters, BeforeValidator(_empty_for_null)
    ] = offline_hyperparameters.SupervisedHyperparameters()


class DpoMethod(StrictModel):
    hyperparameters: Annotated[
        offline_hyperparameters.DpoHyperparameters, BeforeValidator(_empty_for_null)
    ] = offline_hyperparameters.DpoHyperparameters()


def _of_its_type(value: Any, info: ValidationInfo) -> Any:
    """Accept the object of the method's own type; null means its defaults, which reinforcement does not have."""
    kind = info.data.get("type")
    if kind is None:  # reported already
        return None
    if info.field_name != kind:
        if value is not None:  # a client's typed object serializes unused methods as nulls
            raise ValueError(f"it must be absent if the type is '{kind}'")
        return None
    if value is None and kind == "reinforcement":
        raise PydanticKnownError("missing")
    return {} if value is None else value


OfItsType = BeforeValidator(_of_its_type)


class Method(StrictModel):
    type: methods.Method
    supervised: Annotated[SupervisedMethod | None, OfItsType] = Field(default=None, validate_default=True)
    dpo: Annotated[DpoMethod | None, OfItsType] = Field(default=None, validate_default=True)
    reward_model: Annotated[RewardModelMethod | None, OfItsType] = Field(default=None, validate_default=True)
    reinforcement: Annotated[Reinforcement | None, OfItsType] = Field(default=None, validate_default=True)
    distillation: Annotated[Distillation | None, OfItsType] = Field(default=None, validate_default=True)

    @property
    def learns_from_file(self) -> bool:
        """Whether the answers are in the file, so that none are sampled."""
        mode = None if self.distillation is None else self.distillation.mode
        return methods.variant(self.type, {"mode": mode}) in methods.OFFLINE


# Times the smallest automatic learning rate it is about 1.
MAX_MULTIPLIER = 1e5
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
    """Only null and empty values reach this: see `with_method`."""


def with_method(sent: Mapping[str, Any]) -> dict[str, Any]:
    """The request with its method spelled out. Without a method it is supervised, as at OpenAI.

    Raises:
        InvalidParameter: the top-level `hyperparameters`, which are those of supervised jobs, do not fit the method.
    """
    method, top = sent.get("method"), sent.get("hyperparameters")
    rest = {name: value for name, value in sent.items() if name != "hyperparameters"}
    if method is None:
        method = {"type": "supervised"}
    if not top or not isinstance(method, Mapping):
        return {**rest, "method": method}
    kind = method.get("type")
    if kind != "supervised":
        raise InvalidParameter(
            "The top-level 'hyperparameters' is deprecated and belongs to supervised jobs. Send "
            f"'method.{kind}.hyperparameters' instead.",
            param="hyperparameters",
            code="unsupported_parameter",
        )
    inner = method.get("supervised")
    given = inner.get("hyperparameters") if isinstance(inner, Mapping) else None
    if given and given != top:
        raise InvalidParameter(
            "'hyperparameters' and 'method.supervised.hyperparameters' differ. Send the latter only.",
            param="hyperparameters",
            code="invalid_value",
        )
    return {**rest, "method": {**method, "supervised": {"hyperparameters": top}}}


class JobCreate(Body):
    model: str
    training_file: str
    method: Method
    # Extension: extra_body={"validation_split": 0.1}. This part of the training rows becomes the validation file.
    validation_split: Annotated[float, Field(gt=0, le=MAX_SHARE)] | None = None
    # Required by jobs that sample answers, as in OpenAI's guide.
    validation_file: str | None = Field(default=None, validate_default=True)
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    integrations: Integrations | None = None
    budget: Budget | None = None  # extension: extra_body={"budget": ...}
    # Extension: a preview of this request, which the job shows. Without it, the newest one is found.
    preview: Annotated[str, Field(max_length=64, pattern=NoNul)] | None = None
    # Azure's price tier. Accepted and ignored.
    training_type: str | None = Field(default=None, alias="trainingType", max_length=64)
    # Deprecated by OpenAI: those of method.supervised, where `with_method` puts them.
    hyperparameters: Annotated[
        offline_hyperparameters.SupervisedHyperparameters | None, BeforeValidator(_null)
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _with_method(cls, sent: Any) -> Any:
        return with_method(sent) if isinstance(sent, dict) else sent

    @field_validator("validation_file", mode="before")
    @classmethod
    def _required(cls, file_id: Any, info: ValidationInfo) -> Any:
        method = info.data.get("method")
        split = info.data.get("validation_split")
        if file_id is not None and split is not None:
            raise ValueError("send either validation_file or validation_split")
        if file_id is None and split is None and method is not None and not method.learns_from_file:
            raise PydanticKnownError("missing")
        return file_id

    @field_validator("preview")
    @classmethod
    def _has_previews(cls, preview: str | None, info: ValidationInfo) -> str | None:
        method = info.data.get("method")
        if preview is not None and method is not None and method.reinforcement is None:
            raise ValueError("only reinforcement jobs have previews")
        return preview

    @field_validator("validation_file")
    @classmethod
    def _differs(cls, file_id: str | None, info: ValidationInfo) -> str | None:
        if file_id is not None and file_id == info.data.get("training_file"):
            raise ValueError(
                "it must not be the training file: its figures would say nothing about new prompts"
            )
        return file_id

    def reinforcement(self, what: str) -> Reinforcement:
        """method.reinforcement, for a request that is about `what` of it.

        Raises:
            InvalidRequest: the job has another method.
        """
        if self.method.reinforcement is None:
            raise InvalidRequest(
                f"{what} needs a job with method 'reinforcement', and this one has '{self.method.type}'.",
                param="method.type",
                code="unsupported_method",
            )
        return self.method.reinforcement

    def method_body(self) -> dict[str, Any]:
        """The object of the method as the job stores and shows it."""
        offline = self.method.supervised or self.method.dpo or self.method.reward_model
        if offline is not None:
            return {"hyperparameters": offline.hyperparameters.model_dump(mode="json")}
        if self.method.distillation is not None:
            return self.method.distillation.model_dump(mode="json")
        asked = self.reinforcement("A grader")
        body = {
            "grader": dump(asked.grader),
            "hyperparameters": asked.hyperparameters.model_dump(mode="json"),
            "response_format": asked.response_format.to_row() if asked.response_format else None,
        }
        stored = asked.stored_grader()
        return body if stored is None else body | {STORED_GRADER: stored}

    @property
    def warnings(self) -> list[str]:
        """One sentence for each accepted value without effect."""
        asked = self.method.reinforcement
        return [] if asked is None else asked.hyperparameters.warnings


class QueueOut(BaseModel):
    """Position of a waiting job in its queue, from 1, and what blocks it."""

    position: int
    reason: str


class VerdictOut(BaseModel):
    """The delivered model against the start of the job on the validation rows (docs/howto/training.md, Verdict)."""

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
    start: str | None = None  # the tuned model that the job trained further; null: the base model


class ProgressOut(BaseModel):
    """The work of the job's run inside of its step, about a second ago."""

    step: int | None  # null: no step has begun. 0: the validation of the model that the job starts from
    phase: Literal[
        "loading",
        "sampling",
        "grading",
        "training",
        "validation",
        "saving",
        "waiting for the database",
        "waiting for the blob store or the disk",
    ]
    done: int | None  # answers of this phase, or rows of a file; null: none are counted
    of: int | None
    since: int  # Unix time in seconds


class JobErrorOut(BaseModel):
    code: str
    message: str
    param: str | None


class MethodOut(BaseModel, extra="allow"):
    """The method, and under its type its object, as in the request."""

    type: methods.Method


class PreviewedOut(BaseModel):
    """The results of the preview of the same request (docs/howto/preview.md)."""

    id: str
    created_at: int
    answers: int
    passed: int
    mean_reward: float | None
    signal: float  # the expected share of groups with signal at the job's group size
    verdict: str


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
    error: Annotated[dict[str, Any], SchemaOf(JobErrorOut)] | None
    seed: int
    hyperparameters: dict[str, Any] | None  # of a supervised job, as in method.supervised; else null
    method: Annotated[dict[str, Any], SchemaOf(MethodOut)]
    integrations: list[Any]
    metadata: dict[str, str] | None
    user_provided_suffix: str | None
    usage_metrics: dict[str, Any] | None
    queue: QueueOut | None  # null: the job is not waiting
    shared_with_openai: Literal[False] = False
    eval_id: str | None  # the eval of its validations; null: nothing is graded
    # Extensions.
    lineage: dict[str, Any] | None  # the tuned model that the job trains further; null: a base model
    budget: dict[str, Any] | None
    estimate: dict[str, Any] | None
    verdict: VerdictOut | None  # null: the job has not ended, or there was nothing to compare
    progress: ProgressOut | None  # null: the job is not running
    preview: PreviewedOut | None  # null: the request had no preview

    @classmethod
    def of(cls, job: Job, price: Price, place: fairness.QueuePosition | None) -> "JobOut":
        """From the row and its place in the queue only. `render` reads the places of a hundred jobs with one query."""
        asked = integrations.of_method(job)
        parent = Parent.of(job)
        shown = asked | {"hyperparameters": render_hyperparameters(job)}
        if "grader" in asked:
            shown["grader"] = hide_secrets(asked["grader"])
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            estimated_finish=job.estimated_finish,
            model=job.model if parent is None else parent.model,
            fine_tuned_model=job.fine_tuned_model,
            organization_id=job.organization_id,
            status=job.status,
            training_file=job.training_file,
            validation_file=job.validation_file,
            result_files=[job.result_file] if job.result_file else [],
            trained_tokens=job.trained_tokens if job.status in lifecycle.FINAL else None,
            error=job.error,
            seed=job.seed,
            hyperparameters=shown["hyperparameters"] if job.method == "supervised" else None,
            method={"type": job.method, job.method: shown},
            integrations=integrations.render(job),
            metadata=job.metadata_,
            user_provided_suffix=job.suffix,
            usage_metrics=usage.render(job, price),
            queue=None if place is None else QueueOut(position=place.position, reason=place.reason),
            eval_id=evals.eval_id(job.id) if evals.has_eval(job) else None,
            budget=budgets.render(job),
            lineage=None if parent is None else parent.shown() | {"base_model": job.model},
            verdict=None if job.verdict is None else VerdictOut(**job.verdict),
            progress=lifecycle.progress_of(job),
            preview=None if job.preview is None else PreviewedOut(**job.preview),
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
    # The folder of its PEFT adapter, or of its whole model, where server and user share a machine.
    adapter: str | None

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


@dataclass(frozen=True)
class Accepted:
    """The validated parts of a job request, without its files."""

    base_model: str  # aliases are resolved
    parent: Parent | None  # the tuned model that the job trains further
    model: BaseModelEntry
    budget: dict[str, Any] | None
    integrations: list[dict[str, Any]]


@router.post("", response_model=JobOut, responses=refusals(404), dependencies=TAKES_JOB)
async def create_job(
    body: JobCreate, project: CurrentProject, service: ServiceDep, once: Once
) -> JobOut | JSONResponse:
    """Create a fine-tuning job."""
    await refuse_unusable(body, service, project)
    if body.validation_split is None:
        return await to_thread.run_sync(_created, body, project, service, once)
    made = partial(_created_with_split, body, body.validation_split, project, service, once)
    return await service.admission.file_reads.in_thread(project.id, made, service.file_readers)


def _created_with_split(
    body: JobCreate, share: float, project: Project, service: Service, once: Once
) -> JobOut | JSONResponse:
    accept(body, service, project)  # before anything is stored
    method = body.method
    parts = validation_split.split(
        service, project, body.training_file, share, method.type, learns_from_file=method.learns_from_file
    )
    kept: tuple[str, ...] = ()
    try:
        made = _created(body, project, service, once, parts)
        if isinstance(made, JobOut):
            kept = tuple(filter(None, (made.training_file, made.validation_file)))
        return made
    finally:
        validation_split.discard(service, parts, kept)


def _created(
    body: JobCreate,
    project: Project,
    service: Service,
    once: Once,
    parts: validation_split.SplitFiles | None = None,
) -> JobOut | JSONResponse:
    accepted = accept(body, service, project)
    preview = preview_of(body, accepted.model, project, service)

    def create(work: Work) -> JobOut:
        job = added(work, body, accepted, project, service, parts, preview)
        return render(work.session, service, job)[0]

    return once(create)


def added(
    work: Work,
    body: JobCreate,
    accepted: Accepted,
    project: Project,
    service: Service,
    parts: validation_split.SplitFiles | None = None,
    preview: Preview | None = None,
) -> Job:
    """Create the job in a transaction. The body passed `refuse_unusable`, and `accept` made the rest of it.

    Raises:
        InvalidRequest: there is no such file, or none of training data.
        QuotaExceeded: the project may queue no further job.
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
        gpu_class=accepted.model.gpu_class or service.settings.gpu_class,
        budget=accepted.budget,
        warnings=body.warnings,
    )
    if preview is not None:
        job.preview = previews.summary(preview)
        events.append(work.session, job.id, previews.sentence(job.preview))
    if parts is not None:
        events.append(work.session, job.id, f"Divided {source.id} into these files by validation_split")
    limits = tenants.limits(project, service.settings.default_limits)
    tenants.refuse_job_beyond(work.session, project.id, limits)
    return job


def preview_of(body: JobCreate, model: BaseModelEntry, project: Project, service: Service) -> Preview | None:
    """The preview that the request names, else the newest completed one of the same request.

    Raises:
        InvalidRequest: the named one is of another request.
    """
    asked = body.method.reinforcement
    if asked is None:
        return None
    with service.database.read() as session:
        training = files.get_dataset(session, project.id, body.training_file, param="training_file")
        if body.preview is None and not previews.has_some(session, project.id, training.sha256):
            return None
    chosen = asked.hyperparameters
    reasons = is_reasoning(model, service.settings.model_cache, chosen.advanced.sampling.chat_template)
    settings = estimates.sizes(chosen, rows=1, context=model.context, reasons=reasons)
    wanted = previews.parts_of(body.model, model, body.method_body(), settings, training.sha256)
    with service.database.read() as session:
        if body.preview is not None:
            return previews.named(session, project.id, body.preview, wanted)
        return previews.matching(session, project.id, training.sha256, wanted)


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


async def refuse_unusable(body: JobCreate, service: Service, project: Project) -> None:
    """Reject a grader that this server cannot run, and a schema that cannot be enforced.

    Together with `accept` these are the validation rules of a job. A queued check holds no thread.
    """
    asked = body.method.reinforcement
    if asked is None:
        return
    await refuse(asked.grader, service, project, GRADER_PARAM, in_job=True)
    where = "method.reinforcement.response_format"
    await refuse_unusable_schema(asked.response_format, where, service, project)


def accept(body: JobCreate, service: Service, project: Project) -> Accepted:
    """Check a request that passed `refuse_unusable` against this installation.

    Creating a job and validating one share these rules.
    """
    base_model, parent = start(body, service, project)
    if body.method.distillation is not None:
        refuse_unusable_teacher(body.method.distillation, base_model, parent, service, project)
    if body.method.reinforcement is not None:
        refuse_unusable_reward_models(body.method.reinforcement, base_model, service, project)
    refuse_full_context(body.method, service.registry.get(base_model).context)
    refuse_unusable_full(body.method, base_model, service)
    refuse_absurd_learning_rate(body.method)
    return Accepted(
        base_model=base_model,
        parent=parent,
        model=usable_model(body, base_model, service),
        budget=body.budget.to_row(Price.of(service.settings)) if body.budget else None,
        integrations=to_rows(body.integrations, service.settings.enabled_integrations),
    )


def refuse_absurd_learning_rate(method: Method) -> None:
    """Refuse a multiplier that makes any learning rate larger than 1, which ruins every model.

    Only on creation: jobs of earlier versions may have one.

    Raises:
        InvalidRequest: it is above MAX_MULTIPLIER.
    """
    asked = getattr(getattr(method, method.type), "hyperparameters", None)
    multiplier = getattr(asked, "learning_rate_multiplier", "auto")
    if isinstance(multiplier, float) and multiplier > MAX_MULTIPLIER:
        param = f"method.{method.type}.hyperparameters.learning_rate_multiplier"
        raise InvalidRequest(
            f"Invalid value for '{param}': {multiplier:g} is above {MAX_MULTIPLIER:g}. Times the automatic learning "
            "rate it would exceed 1.",
            param=param,
        )


def refuse_unusable_full(method: Method, base_model: str, service: Service) -> None:
    """Refuse what cannot be done with all weights of a model (`train: "full"`). The worker knows the model's size.

    Raises:
        InvalidRequest: runs have several machines, the model is sampled by something that takes adapters only, or a
            reward model is to grade.
    """
    asked = method.reinforcement
    whole = asked or method.supervised or method.dpo
    if whole is None or whole.hyperparameters.advanced.train != "full":
        return
    param = f"method.{method.type}.hyperparameters.advanced.train"
    if problem := full.several_machines(service.settings):
        raise InvalidRequest(problem, param=param)
    if asked is None:
        return
    for where, part in reward_model_parts(asked.grader, GRADER_PARAM):
        raise InvalidRequest(
            f"The reward model '{part.model}' is an adapter on the base model, whose weights change in a job with "
            "train 'full'. Use another grader, or train 'lora'.",
            param=f"{where}.model",
        )
    entry = service.registry.get(base_model)
    if problem := full.problem(base_model, entry, service.settings):
        raise InvalidRequest(problem, param=param)


def refuse_full_context(method: Method, context: int) -> None:
    """Refuse answers that leave no room for a prompt in the context.

    Raises:
        InvalidRequest: `max_completion_tokens` is not less than the context.
    """
    if method.reinforcement is not None:
        asked = method.reinforcement.hyperparameters
    elif isinstance(method.distillation, OnPolicyDistillation):
        asked = method.distillation.hyperparameters.as_reinforcement()
    else:
        return
    longest = asked.advanced.sampling.max_completion_tokens
    if longest != "auto" and longest >= context:
        raise InvalidRequest(
            f"max_completion_tokens {longest} leaves no room for a prompt in the model's context of {context} tokens.",
            param=f"method.{method.type}.hyperparameters.advanced.{asked.advanced.path('max_completion_tokens')}",
        )


def start(body: JobCreate, service: Service, project: Project) -> tuple[str, Parent | None]:
    """The base model of the job, and the tuned model that it trains further.

    Raises:
        InvalidRequest: the job asks for an adapter of another shape than the one that it continues.
    """
    with service.database.read() as session:
        base_model, parent = lineage.start_of(
            session,
            project.id,
            body.model,
            service.registry,
            reward_model=body.method.type == methods.REWARD_MODEL,
        )
    if parent is None:
        return base_model, None
    method = body.method
    asked = (
        method.supervised
        or method.dpo
        or method.reward_model
        or method.distillation
        or body.reinforcement("An adapter")
    )
    advanced = asked.hyperparameters.advanced
    if advanced.train != parent.train:
        raise _trained_otherwise(body.model, parent, f"method.{method.type}.hyperparameters.advanced.train")
    if parent.is_whole:
        return base_model, parent
    lora = advanced.lora
    parent = _grown(lora, parent)
    if (other := _other_shape(lora, parent.shape)) is not None:
        param = f"method.{method.type}.hyperparameters.advanced.lora.{other}"
        if parent.grown_rank is not None and other == "alpha":
            raise InvalidRequest(
                f"lora rank {lora.rank} on top of the adapter of '{body.model}' needs alpha "
                f"{parent.shape['lora_alpha']}, which keeps its alpha / rank: send that, or leave alpha out.",
                param=param,
            )
        raise InvalidRequest(
            f"'{body.model}' has an adapter with lora {other} {parent.settings[f'lora_{other}']}, which the job trains "
            "further: leave that out. A larger rank, at the same alpha / rank, freezes it and learns a new one on top.",
            param=param,
        )
    return base_model, parent


def _trained_otherwise(name: str, parent: Parent, param: str) -> InvalidRequest:
    """The refusal of a job that would train an adapter on a whole model, or all weights below an adapter."""
    if parent.is_whole:
        return InvalidRequest(
            f"'{name}' is a whole model, trained with train 'full'. Only jobs with train 'full' train it further in "
            "this version.",
            param=param,
        )
    return InvalidRequest(
        f"'{name}' is a LoRA adapter, and train 'full' trains the weights of a base model or of a model that was "
        "trained with it. Leave train out, or have the operator add the merged model to the registry (`regraft-server "
        "export --merged`).",
        param=param,
    )


def _grown(lora: Lora, parent: Parent) -> Parent:
    """The parent with the larger rank that the request asks for, if any."""
    rank, alpha = (parent.settings[f"lora_{name}"] for name in ("rank", "alpha"))
    asks = "rank" in lora.model_fields_set and isinstance(lora.rank, int) and lora.rank > rank
    # An alpha that is no whole number cannot have the parent's alpha / rank.
    return replace(parent, grown_rank=lora.rank) if asks and alpha * lora.rank % rank == 0 else parent


def _other_shape(lora: Lora, shape: Mapping[str, Any]) -> str | None:
    """The field in which an adapter of this shape differs from what a request asks for."""
    return next(
        (
            name
            for name in sorted(lora.model_fields_set)
            if getattr(lora, name) not in ("auto", shape[f"lora_{name}"])
        ),
        None,
    )


def refuse_unusable_reward_models(
    asked: Reinforcement, base_model: str, service: Service, project: Project
) -> None:
    """Check the reward models that grade answers of a job on `base_model`.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: it is no reward model, on another base model, or gives no steps to a job that needs them.
    """
    for where, part in reward_model_parts(asked.grader, GRADER_PARAM):
        param = f"{where}.model"
        try:
            with service.database.read() as session:
                model = lineage.grading_model(
                    session, project.id, part.model, base_model, service.registry, param=param
                )
        except NotFound as absent:
            absent.param = param
            raise
        of_steps = asked.hyperparameters.advanced.supervision == "process"
        if of_steps and part is asked.grader and model.reward_kind != "steps":
            raise InvalidRequest(
                f"supervision 'process' needs a grader that scores steps, and the reward model '{part.model}' gives "
                "one score per answer: it learned from rows without step_labels.",
                param=param,
            )


def _checkpoint_of(tuned: Parent | None) -> str | None:
    return None if tuned is None else tuned.checkpoint_id


TEACHER_PARAM = "method.distillation.teacher.model"


def refuse_unusable_teacher(
    asked: Distillation, base_model: str, parent: Parent | None, service: Service, project: Project
) -> None:
    """Check the teacher of a student on `base_model`. Whether both have the same tokenizer is for the worker to say.

    Raises:
        TunedModelNotFound, ModelNotFound: the project may use no model of this name.
        InvalidRequest: it is what the student starts from, or its adapter is on another base model or has another shape
            than the student's.
    """
    name = asked.teacher.model
    try:
        with service.database.read() as session:
            teacher_base, teacher = lineage.start_of(
                session, project.id, name, service.registry, param=TEACHER_PARAM
            )
    except NotFound as absent:
        if name in service.backends.models:
            refuse_unusable_server(asked)
            return
        absent.param = TEACHER_PARAM
        absent.message += (
            " A model on a server teaches once the operator has named it under [models] in REGRAFT_GRADERS_FILE "
            "(docs/howto/distillation.md)."
        )
        raise
    if (teacher_base, _checkpoint_of(teacher)) == (base_model, _checkpoint_of(parent)):
        raise InvalidRequest(
            f"The teacher '{name}' is the model that the student starts from: there is nothing to learn from it.",
            param=TEACHER_PARAM,
        )
    if teacher is None:
        return
    if teacher.is_whole:
        raise InvalidRequest(
            f"The teacher '{name}' is a whole model, trained with train 'full'. Only base models, adapters and models "
            "on a server teach in this version (docs/howto/distillation.md).",
            param=TEACHER_PARAM,
        )
    if teacher_base != base_model:
        raise InvalidRequest(distillation.other_base(name, teacher_base, base_model), param=TEACHER_PARAM)
    student = asked.hyperparameters.advanced.lora
    differs = _other_shape(student, teacher.shape)
    if differs is None and parent is not None:
        differs = next((one for one in lineage.SHAPE if parent.shape[one] != teacher.shape[one]), None)
    if differs is not None:
        raise InvalidRequest(
            f"The adapter of the teacher '{name}' has another {differs.removeprefix('lora_')} than the student's. "
            "They take turns on one base model, so they need the same shape: leave 'lora' out.",
            param=TEACHER_PARAM,
        )


def refuse_unusable_server(asked: Distillation) -> None:
    """Check what a teacher on a server cannot do. Whether it has the student's tokenizer is for the worker to say.

    Raises:
        InvalidRequest: the loss needs the whole vocabulary, or another temperature than 1.
    """
    path = "method.distillation.hyperparameters.advanced"
    if isinstance(asked, distillation.OnPolicyDistillation):
        temperature, param = (
            asked.hyperparameters.advanced.sampling.temperature,
            f"{path}.sampling.temperature",
        )
    else:
        loss = asked.hyperparameters.advanced.loss
        temperature, param = loss.temperature, f"{path}.loss.temperature"
        if loss.top_k == "auto" or loss.top_k > distillation.MAX_SERVED_TOP_K:
            raise InvalidRequest(
                f"The teacher '{asked.teacher.model}' is on a server, which gives the probabilities of its likeliest "
                f"tokens and not those of the whole vocabulary: set top_k, to at most "
                f"{distillation.MAX_SERVED_TOP_K}. vLLM gives 20 unless it was started with --max-logprobs.",
                param=f"{path}.loss.top_k",
            )
    if temperature != 1:
        raise InvalidRequest(
            f"The teacher '{asked.teacher.model}' is on a server, which gives log-probabilities at temperature 1, not "
            f"{temperature:g}.",
            param=param,
        )


def usable_model(body: JobCreate, base_model: str, service: Service) -> BaseModelEntry:
    """Return the model to train; reject requests that this service cannot fulfill with it."""
    model = service.registry.get(base_model)
    asked = body.method.reinforcement
    if asked is None:
        return model
    if where := reads_tools(asked.grader, GRADER_PARAM):
        message = (
            f"'{where}' reads sample.output_tools, but answers of a job have none: tools are not supported."
        )
        raise InvalidRequest(message, param=where, code="unsupported_parameter")
    advanced = asked.hyperparameters.advanced
    sampler = _known_sampler(base_model, model, service.settings)
    if advanced.schedule.type == "off_policy" and sampler == "transformers":
        where = f"method.reinforcement.hyperparameters.advanced.{advanced.path('off_policy_steps')}"
        raise InvalidRequest(NO_SAMPLER_OF_ITS_OWN, param=where)
    continues = advanced.schedule.type == "off_policy" and advanced.schedule.continue_in_flight
    if continues and base_model in service.settings.samplers:
        where = f"method.reinforcement.hyperparameters.advanced.{advanced.path('continue_in_flight')}"
        raise InvalidRequest(NO_ENGINES_OF_ITS_OWN, param=where)
    return model


def _known_sampler(name: str, model: BaseModelEntry, settings: Settings) -> SamplerName | None:
    """None: it depends on the worker, which validates the request before it loads the model."""
    if name in settings.samplers:
        return "vllm"
    gpu_class = model.gpu_class or settings.gpu_class
    choice = settings.of_class(gpu_class).sampler
    return sampler_of(model, choice, device_of(settings, gpu_class), vllm_installed=None)


def render_hyperparameters(job: Job) -> dict[str, Any]:
    """The requested hyperparameters, "auto" included, and their resolved values once a run has resolved them."""
    asked: dict[str, Any] = job.body["hyperparameters"]
    resolved = job.resolved
    if resolved is None:
        return asked
    if methods.variant(job.method, job.body) in methods.OFFLINE:
        return offline_hyperparameters.shown(asked, resolved)
    if job.method == distillation.METHOD:
        return distillation.shown(asked, resolved)
    # OpenAI's own names stay at the top level, where its users expect them.
    known = {name: value for name, value in resolved.items() if name in asked}
    ours = {name: value for name, value in resolved.items() if name not in asked}
    return asked | known | {"advanced": shown_advanced(asked["advanced"], ours)}


OFFLINE_CHECKPOINT_METRICS = (
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
    "train_mean_reward_accuracy",
    "full_valid_mean_reward_accuracy",
    "full_valid_mean_reward_margin",
)


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
        **{name: measured.get(name) for name in OFFLINE_CHECKPOINT_METRICS},
        "completion_tokens_mean": measured.get("completion_tokens_mean"),
        "reasoning_tokens_mean": measured.get("reasoning_tokens_mean"),
    }
    return {name: value for name, value in shown.items() if value is not None}
