"""The body of a request for a job, as POST /v1/fine_tuning/jobs reads it."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Depends
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from api.http.shapes import Body
from api.http.stored_graders import OrStored, ResolvedReference, ResolvesGraders
from api.resources.integrations import Integrations
from api.resources.job_tools import AgentEnvironment, EpisodeSteps, JobTools, ToolSpec
from core.errors import InvalidParameter, InvalidRequest
from core.jobs import budgets, methods, offline_hyperparameters
from core.jobs.budgets import Price
from core.jobs.distillation import Distillation
from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Hyperparameters
from core.jobs.params import ENVIRONMENT_PARAM, FORMAT_PARAM, GRADER_PARAM, SHADOW_PARAM, STEPS_PARAM
from core.jobs.tools import DEFAULT_STEPS
from core.jobs.verdict import NOT_HELD_OUT
from core.response_format import ResponseFormat
from core.storage.splitting import MAX_SHARE
from core.strict import StrictModel
from core.tool_parsers import NO_FORMAT
from graders.build import reward_model_parts
from graders.formula import Formula, FormulaError
from graders.spec import GIVE_STEPS, GraderSpec, MultiSpec, SelectSpec, dump, parse_grader
from graders.weighted_sum import weighted_parts

# The places of graders in a request for a job.
GRADER_PATHS = (tuple(GRADER_PARAM.split(".")), tuple(SHADOW_PARAM.split(".")))
# The `dependencies` of endpoints whose body is that of a job.
TAKES_JOB = [Depends(ResolvesGraders(*GRADER_PATHS, keep=True))]
STORED_GRADER = "stored_grader"  # in the method of a job: the reference that its grader was created from
Checked = BeforeValidator(partial(parse_grader, param=GRADER_PARAM))


def _parsed_shadow(sent: Any) -> GraderSpec | None:
    if (found := ResolvedReference.of(sent)) is not None:
        sent = found.grader
    return None if sent is None else parse_grader(sent, SHADOW_PARAM)


NoNul = r"^[^\x00]*$"  # PostgreSQL can store it, but not search for it


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("only letters, digits, punctuation and plain spaces are allowed")
    return text


def _invalid(param: str, why: str) -> InvalidParameter:
    return InvalidParameter(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


Suffix = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
MetadataKey = Annotated[str, Field(max_length=64, pattern=NoNul)]
MetadataValue = Annotated[str, Field(max_length=512, pattern=NoNul)]


def _empty_for_null(value: Any) -> Any:
    return {} if value is None else value


class RewardModelMethod(StrictModel):
    hyperparameters: Annotated[
        offline_hyperparameters.RewardHyperparameters, BeforeValidator(_empty_for_null)
    ] = offline_hyperparameters.RewardHyperparameters()


class Reinforcement(StrictModel):
    grader: Annotated[GraderSpec, Checked, OrStored()]
    # Scores the validation answers and never trains: a gain that it does not share is the training grader's alone.
    shadow_grader: Annotated[GraderSpec | None, BeforeValidator(_parsed_shadow), OrStored()] = None
    hyperparameters: Annotated[Hyperparameters, BeforeValidator(_empty_for_null)] = Hyperparameters()
    response_format: ResponseFormat | None = None
    tools: JobTools = None  # Azure's field, as is the next one
    max_episode_steps: EpisodeSteps | None = None
    environment: AgentEnvironment | None = None  # extension: the user's agent plays the episodes
    _stored: ResolvedReference | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _notes_the_reference(cls, sent: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the specification of a stored grader, and remember where it came from.

        The method of a job with one, as responses show it, has both the specification and the reference: it may be sent
        again, and the specification counts.
        """
        if isinstance(sent, Mapping):
            sent = {name: value for name, value in sent.items() if name != STORED_GRADER}
        found = ResolvedReference.of(sent.get("grader")) if isinstance(sent, Mapping) else None
        if found is None:
            return handler(sent)
        made = handler({**sent, "grader": found.grader})
        made._stored = found
        return made

    def stored_grader(self) -> dict[str, str] | None:
        """The name and the version of the stored grader; None: the request has a specification."""
        return None if self._stored is None else self._stored.reference()

    @model_validator(mode="after")
    def _steps_come_from_somewhere(self) -> "Reinforcement":
        if self.hyperparameters.advanced.supervision == "process" and self.grader.type not in GIVE_STEPS:
            raise ValueError(
                f"supervision 'process' needs a grader that scores steps ({' or '.join(GIVE_STEPS)}), "
                f"and '{self.grader.type}' gives one score per answer"
            )
        return self

    @model_validator(mode="after")
    def _parts_are_added_up(self) -> "Reinforcement":
        if self.hyperparameters.advanced.loss.advantage_scale == "each":
            try:
                weighted_parts(self.grader)
            except ValueError as problem:
                raise ValueError(
                    f"advantage_scale 'each' normalizes the parts of a grader: {problem}"
                ) from None
        return self

    @model_validator(mode="after")
    def _episodes_are_supported(self) -> "Reinforcement":
        """Refuse what an episode, with executed tools or of an agent, cannot have in this version."""
        if self.tools is not None and self.environment is not None:
            raise _invalid(
                ENVIRONMENT_PARAM, "the job has 'tools', which an agent calls itself; leave out one"
            )
        if self.tools is None and self.environment is None:
            if self.max_episode_steps is not None:
                raise _invalid(STEPS_PARAM, "it needs 'tools' or 'environment'")
            return self
        kind, advanced = "tools" if self.environment is None else "an agent", self.hyperparameters.advanced
        if self.response_format is not None:
            raise _invalid(FORMAT_PARAM, f"the job has {kind}: {NO_FORMAT}")
        if advanced.schedule.type == "off_policy":
            raise _invalid(
                param_of("reinforcement", "off_policy_steps"),
                f"a job with {kind} needs the schedule on_policy",
            )
        if advanced.supervision == "process":
            raise _invalid(
                param_of("reinforcement", "supervision"),
                f"a job with {kind} is rewarded for whole episodes: 'process' is not supported",
            )
        if self.environment is not None and advanced.loss.advantage_scale == "each":
            raise _invalid(
                param_of("reinforcement", "advantage_scale"),
                "'each' needs the scores of a grader's parts, and an agent may give one reward in their place",
            )
        if any(reward_model_parts(self.grader)):
            raise _invalid(
                GRADER_PARAM, f"a reward model scores one answer, and a job with {kind} has episodes"
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
    """Accept the object of the method's own type; null means its defaults, where it has them."""
    kind = info.data.get("type")
    if kind is None:  # reported already
        return None
    if info.field_name != kind:
        if value is not None:  # a client's typed object serializes unused methods as nulls
            raise ValueError(f"it must be absent if the type is '{kind}'")
        return None
    if value is None and kind in (
        "reinforcement",
        "distillation",
    ):  # there is no default grader, and no teacher
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

    @property
    def is_full(self) -> bool:
        """Whether all weights of the model are trained."""
        whole = self.reinforcement or self.supervised or self.dpo
        return whole is not None and whole.hyperparameters.advanced.train == "full"


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


class JobResources(StrictModel):
    """The GPUs and nodes of a job, up to what the operator allows. Without a value: those of its class."""

    gpus: Annotated[int, Field(ge=1, le=1024, description="On each node.")] | None = None
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None


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


class AuditGate(StrictModel):
    """Refuses a job whose grader lets wrong answers pass (docs/howto/grader-audits.md)."""

    block_above: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="The share of answers of any one kind that may pass without knowledge, in the newest audit.",
        ),
    ]


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
    # Extension: extra_body={"resources": {"gpus": 4}}.
    resources: Annotated[JobResources, BeforeValidator(_empty_for_null)] = JobResources()
    # Extension: a preview of this request, which the job shows. Without it, the newest one is found.
    preview: Annotated[str, Field(max_length=64, pattern=NoNul)] | None = None
    # Extension: extra_body={"audit": {"block_above": 0.3}}. Requires an audit of this grader on this file.
    audit: AuditGate | None = None
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

    @field_validator("preview", "audit")
    @classmethod
    def _is_for_reinforcement(
        cls, value: str | AuditGate | None, info: ValidationInfo
    ) -> str | AuditGate | None:
        method = info.data.get("method")
        if value is not None and method is not None and method.reinforcement is None:
            raise ValueError("only reinforcement jobs can have it")
        return value

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

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """The same request for a job with tools, with these in their place."""
        asked = self.reinforcement("A tool").model_copy(update={"tools": list(tools)})
        return self.model_copy(update={"method": self.method.model_copy(update={"reinforcement": asked})})

    def method_body(self) -> dict[str, Any]:
        """The object of the method as the job stores and shows it."""
        offline = self.method.supervised or self.method.dpo or self.method.reward_model
        if offline is not None:
            return {"hyperparameters": offline.hyperparameters.model_dump(mode="json")}
        if self.method.distillation is not None:
            return self.method.distillation.model_dump(mode="json")
        asked = self.reinforcement("A grader")
        body: dict[str, Any] = {
            "grader": dump(asked.grader),
            "hyperparameters": asked.hyperparameters.model_dump(mode="json"),
            "response_format": asked.response_format.to_row() if asked.response_format else None,
        }
        if asked.shadow_grader is not None:
            body["shadow_grader"] = dump(asked.shadow_grader)
        if asked.tools is not None:
            body["tools"] = [tool.to_row() for tool in asked.tools]
        if asked.environment is not None:
            body["environment"] = asked.environment.model_dump(mode="json")
        if asked.tools is not None or asked.environment is not None:
            body["max_episode_steps"] = asked.max_episode_steps or DEFAULT_STEPS
        stored = asked.stored_grader()
        return body if stored is None else body | {STORED_GRADER: stored}

    @property
    def warnings(self) -> list[str]:
        """One sentence for each accepted value that has no effect, or another one than it seems."""
        asked = self.method.reinforcement
        values = [] if asked is None else [*asked.hyperparameters.warnings, *_unnamed_parts(asked.grader)]
        return values + ([NOT_HELD_OUT] if self.validation_file == self.training_file else [])


def _unnamed_parts(grader: Any) -> list[str]:
    """One sentence for each part of a multi grader that its formula does not name."""
    if isinstance(grader, SelectSpec):
        return [sentence for one in grader.graders.values() for sentence in _unnamed_parts(one)]
    if not isinstance(grader, MultiSpec):
        return []
    return [
        f"the part '{name}' of the grader '{grader.name}' has no effect: calculate_output does not name it."
        for name in grader.graders
        if _is_formula(grader.calculate_output, grader.graders.keys() - {name})
    ]


def _is_formula(text: str, names: Collection[str]) -> bool:
    try:
        Formula.parse(text, names)
    except FormulaError:
        return False
    return True
