"""Bodies of evals.create, evals.update and evals.runs.create."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from api.http.shapes import Body
from api.http.stored_graders import OrStored
from api.resources.job_body import MetadataKey, MetadataValue, NoNul
from core.chat import AnyObject, MaxTokens, ReasoningEffort, Seed, Temperature, Text, TopP
from core.errors import InvalidParameter
from core.evals.items import MAX_ROWS
from core.evals.rows import is_flat
from core.response_format import ResponseFormat
from core.storage.message_rows import MAX_TOOLS
from core.strict import StrictModel
from graders.prompts import parse_input_messages
from graders.spec import GraderSpec, InvalidGrader, parse_grader

MAX_CRITERIA = 100
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None
Name = Annotated[str, Field(max_length=256, pattern=NoNul)]
# Sources that need stored chat completions or responses, which this server does not keep.
_STORED = ("stored_completions", "logs", "responses")


def _criteria(raw: Any) -> Any:
    """Parse the graders, so that an error names its place in `testing_criteria`."""
    if not isinstance(raw, list):
        return raw
    if not raw:
        raise InvalidParameter(
            "Invalid value for 'testing_criteria': expected at least one criterion.",
            param="testing_criteria",
            code="invalid_value",
        )
    if len(raw) > MAX_CRITERIA:
        raise InvalidParameter(
            f"Invalid value for 'testing_criteria': at most {MAX_CRITERIA} criteria are supported.",
            param="testing_criteria",
            code="invalid_value",
        )
    specs = parse_criteria(raw)
    names: set[str] = set()
    for number, spec in enumerate(specs):
        if spec.name in names:
            param = f"testing_criteria[{number}].name"
            raise InvalidParameter(
                f"Invalid value for '{param}': '{spec.name}' is already the name of another criterion.",
                param=param,
                code="invalid_value",
            )
        names.add(spec.name)
    return specs


def parse_criteria(raw: list[Any]) -> list[GraderSpec]:
    """Parse stored or requested criteria.

    Raises:
        InvalidGrader: names the criterion and the field.
    """
    specs = []
    for number, sent in enumerate(raw):
        param = f"testing_criteria[{number}]"
        if isinstance(sent, Mapping) and sent.get("type") in ("multi", "select"):
            message = f"An eval has several criteria instead of a {sent['type']} grader: list its graders."
            raise InvalidGrader(
                f"Invalid value for '{param}.type': {message}", f"{param}.type", "invalid_value"
            )
        spec = parse_grader(sent, param, unlisted=("multi", "select", "reward_model"))
        if spec.type == "text_similarity" and spec.pass_threshold is None:
            name = f"{param}.pass_threshold"
            raise InvalidGrader(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        specs.append(spec)
    return specs


class CustomConfig(StrictModel):
    type: Literal["custom"]
    item_schema: dict[str, Any]
    include_sample_schema: bool = False


def _supported_config(sent: Any) -> Any:
    if isinstance(sent, dict) and sent.get("type") in ("stored_completions", "logs"):
        raise InvalidParameter(
            f"'{sent['type']}' is not supported: this server stores no chat completions. Use 'custom', and send "
            "the rows with each run.",
            param="data_source_config.type",
            code="unsupported_parameter",
        )
    return sent


class EvalCreate(Body):
    name: Name | None = None
    metadata: Metadata = None
    data_source_config: Annotated[CustomConfig, BeforeValidator(_supported_config)]
    testing_criteria: Annotated[list[Annotated[GraderSpec, OrStored()]], BeforeValidator(_criteria)]


class EvalUpdate(Body):
    name: Name | None = None
    metadata: Metadata = None


class Row(StrictModel):
    item: dict[str, Any]
    sample: dict[str, Any] | None = None
    _is_flat: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _or_itself_the_item(cls, sent: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if not (isinstance(sent, dict) and is_flat(sent)):
            return check(sent)
        row = check({"item": sent})
        row._is_flat = True
        return row

    def as_data(self) -> dict[str, Any]:
        """The row as it was sent."""
        if self._is_flat:
            return self.item
        return {"item": self.item} | ({} if self.sample is None else {"sample": self.sample})


class FileContent(StrictModel):
    type: Literal["file_content"]
    content: Annotated[list[Row], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]

    def as_data(self) -> list[dict[str, Any]]:
        return [row.as_data() for row in self.content]


class FileId(StrictModel):
    type: Literal["file_id"]
    id: str


def _supported_source(sent: Any) -> Any:
    if isinstance(sent, dict) and sent.get("type") in _STORED:
        raise InvalidParameter(
            f"The source '{sent['type']}' is not supported: this server stores no completions or responses. Use "
            "'file_id' or 'file_content'.",
            param="data_source.source.type",
            code="unsupported_parameter",
        )
    return sent


Source = Annotated[
    Annotated[FileContent | FileId, Field(discriminator="type")], BeforeValidator(_supported_source)
]


class SamplingParams(StrictModel):
    # The second spelling is that of runs in OpenAI's reference.
    max_completion_tokens: MaxTokens = Field(
        default=None, validation_alias=AliasChoices("max_completion_tokens", "max_completions_tokens")
    )
    temperature: Temperature = None
    top_p: TopP = None
    seed: Seed = None
    reasoning_effort: ReasoningEffort = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


Format = Annotated[Text | AnyObject | ResponseFormat, Field(discriminator="type")] | None


class CompletionsParams(SamplingParams):
    response_format: Format = None

    @property
    def form(self) -> Text | AnyObject | ResponseFormat | None:
        return self.response_format


class TextFormat(StrictModel):
    format: Format = None


class ResponsesParams(SamplingParams):
    text: TextFormat | None = None

    @property
    def form(self) -> Text | AnyObject | ResponseFormat | None:
        return None if self.text is None else self.text.format


class JsonlSource(StrictModel):
    type: Literal["jsonl"]
    source: Source


class SampledSource(StrictModel):
    source: Source
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input_messages: dict[str, Any]

    @field_validator("input_messages", mode="after")
    @classmethod
    def _parses(cls, sent: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        parse_input_messages(sent, "data_source.input_messages")
        return sent


class CompletionsSource(SampledSource):
    type: Literal["completions"]
    sampling_params: CompletionsParams | None = None


class ResponsesSource(SampledSource):
    type: Literal["responses"]
    sampling_params: ResponsesParams | None = None


# Above any realistic budget, and exact in JSON.
Cap = Annotated[int, Field(ge=1, le=2**53)]


class RunBudget(StrictModel):
    """Caps on a run's usage: tokens of all its models, and calls of judges."""

    tokens: Cap | None = None
    judge_calls: Cap | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_runs(cls, sent: Any) -> Any:
        for name in ("gpu_seconds", "amount", "currency"):
            if isinstance(sent, dict) and name in sent:
                raise InvalidParameter(
                    f"'budget.{name}' is a budget of jobs: the GPU time of eval runs is not measured. Use "
                    "'budget.tokens' or 'budget.judge_calls'.",
                    param=f"budget.{name}",
                    code="unsupported_parameter",
                )
        return sent

    @model_validator(mode="after")
    def _caps_something(self) -> "RunBudget":
        if not self.to_row():
            raise ValueError("give tokens, judge_calls or both")
        return self

    def to_row(self) -> dict[str, int]:
        return self.model_dump(exclude_none=True)


class RunCreate(Body):
    name: Name | None = None
    metadata: Metadata = None
    budget: RunBudget | None = None  # extension: extra_body={"budget": ...}
    data_source: Annotated[JsonlSource | CompletionsSource | ResponsesSource, Field(discriminator="type")]

    def stored_source(self) -> dict[str, Any]:
        """`data_source` as it is stored and echoed, without the rows of `file_content`."""
        dumped = self.data_source.model_dump(mode="json", by_alias=True, exclude_unset=True)
        dumped["source"].pop("content", None)
        text = (dumped.get("sampling_params") or {}).get("text") or {}
        if (text.get("format") or {}).get("type") == "json_schema":
            text["format"] = _flat(text["format"])
        return dumped


def _flat(form: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` of chat completions in the shape of `text.format` of responses."""
    return {"type": form["type"], **form["json_schema"]}
