"""Grader specs as typed values that reject unknown fields.

Every static error is an InvalidGrader that names the parameter: a template or formula that does not parse, an undefined
name, an unsupported type. A parsed spec can be built.
"""

from __future__ import annotations

import difflib
import json
import secrets
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.masking import hide_secrets
from graders import complaints
from graders.builtin.format_check import MAX_PATTERN, Credit, Form
from graders.builtin.string_check import Operation
from graders.builtin.text_similarity import Metric, Tokenizer, has_no_word
from graders.complaints import Mistake
from graders.endpoint import checked_headers, checked_url
from graders.environments.catalog import pins
from graders.formula import Formula, is_name
from graders.template import Reference, Template, quoted


class InvalidGrader(ValueError):
    """The grader is invalid. `param` is the dotted path of the error, `code` its kind."""

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message, param, code)
        self.message, self.param, self.code = message, param, code

    def __str__(self) -> str:
        return self.message


def _checked_template(text: str) -> str:
    Template.parse(text)
    return text


def _checked_source(source: str) -> str:
    """Return the source if it is text that Python accepts. Backends.compile compiles it in the sandbox."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError as cause:
        raise ValueError("the source is not valid text: it holds a lone surrogate") from cause
    if size >= MAX_SOURCE_BYTES:
        raise ValueError(f"the source has {size} bytes; it must have less than {MAX_SOURCE_BYTES}")
    if "\0" in source:
        line = source.count("\n", 0, source.index("\0")) + 1
        raise ValueError(f"line {line}: the source holds a NUL character")
    return source


def _checked_environment(tag: str) -> str:
    pins(tag)
    return tag


def _generated_name() -> str:
    letters = string.ascii_letters + string.digits
    return "grader-" + "".join(secrets.choice(letters) for _ in range(12))


MAX_SOURCE_BYTES = 256 * 1000
MAX_LABELS = 1000
MAX_MESSAGES = 100
MAX_PARTS = 100  # of one message
MAX_GRADERS = 100  # in a multi
MAX_HEADERS = 50
MAX_REFERENCES = 20_000  # in all templates of a grader: parsing them takes 0.1 s
GIVE_STEPS = ("python", "endpoint", "reward_model")  # the types whose grades may have steps
Source = Annotated[str, AfterValidator(_checked_source)]
Name = Annotated[str, Field(min_length=1)]
# OpenAI's API generates missing names, and the examples of its guide rely on that.
GraderName = Annotated[Name, Field(default_factory=_generated_name)]
TemplateText = Annotated[str, AfterValidator(_checked_template)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


# strict: "0.5" is not a number and 1 is not a string, as in OpenAI's API.
class StringCheckSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Compare two texts."""

    type: Literal["string_check"] = "string_check"
    name: GraderName
    input: TemplateText
    reference: TemplateText
    operation: Operation
    pass_threshold: Finite | None = None


class TextSimilaritySpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Measure the similarity of two texts. `tokenizer` is an extension of OpenAI's API."""

    type: Literal["text_similarity"] = "text_similarity"
    name: GraderName
    input: TemplateText
    reference: TemplateText
    evaluation_metric: Metric
    tokenizer: Tokenizer | None = None  # None means that of the metric
    pass_threshold: Finite | None = None

    @field_validator("tokenizer")
    @classmethod
    def _splits_words(cls, value: Tokenizer | None, info: ValidationInfo) -> Tokenizer | None:
        if value is not None and info.data.get("evaluation_metric") == "fuzzy_match":
            raise ValueError("fuzzy_match compares characters and has no tokenizer: leave 'tokenizer' out")
        return value

    @model_validator(mode="after")
    def _can_match(self) -> TextSimilaritySpec:
        reference = Template.parse(self.reference)
        is_constant = all(isinstance(part, str) for part in reference.parts)
        if is_constant and has_no_word(self.evaluation_metric, self.reference, self.tokenizer):
            raise ValueError(no_word(self, self.reference))
        return self


def no_word(spec: TextSimilaritySpec, reference: str) -> str:
    """Return the error for a reference in which the metric of the spec finds no word."""
    if not reference:
        return (
            f"the reference of '{spec.name}' is empty, so {spec.evaluation_metric} would score every answer with words "
            "0. Use another reference"
        )
    what = "no letter or digit" if spec.tokenizer else "no word of a-z and 0-9"
    remedy = "" if spec.tokenizer else ', or set "tokenizer": "unicode"'
    return (
        f"the reference {quoted(reference)} of '{spec.name}' has {what}, so {spec.evaluation_metric} would score every "
        f"answer 0. Use another reference{remedy}"
    )


class MathSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Check that the final answer is mathematically equal to the reference."""

    type: Literal["math"] = "math"
    name: GraderName
    input: TemplateText
    reference: TemplateText
    pass_threshold: Finite | None = None


class FormatSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Check the format of a text against a regular expression that matches all of it, or a predefined template."""

    type: Literal["format"] = "format"
    name: GraderName
    input: TemplateText
    pattern: Annotated[str, Field(max_length=MAX_PATTERN)] | None = None  # compiled by graders/checks.py
    template: Form | None = None
    credit: Credit | None = None  # None means "full"
    pass_threshold: Finite | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> FormatSpec:
        if (self.pattern is None) == (self.template is None):
            raise ValueError("give either 'pattern' or 'template'")
        if self.pattern is not None and self.credit == "partial":
            raise ValueError("'credit' can be 'partial' only with 'template': a pattern matches or does not")
        return self


class InputText(BaseModel, extra="forbid", frozen=True, strict=True):
    type: Literal["input_text"]
    text: TemplateText


class OutputText(BaseModel, extra="forbid", frozen=True, strict=True):
    type: Literal["output_text"]
    text: TemplateText


class InputImage(BaseModel, extra="forbid", frozen=True, strict=True):
    type: Literal["input_image"]
    image_url: TemplateText
    detail: Literal["auto", "low", "high"] | None = None


class AudioData(BaseModel, extra="forbid", frozen=True, strict=True):
    data: TemplateText
    format: Literal["mp3", "wav"]


class InputAudio(BaseModel, extra="forbid", frozen=True, strict=True):
    type: Literal["input_audio"]
    input_audio: AudioData


def _kind_of_part(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"<{kind}>"


def _kind_of_content(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, (list, tuple)):
        return "<parts>"
    return "<part>" if isinstance(value, (Mapping, BaseModel)) else None


# The brackets distinguish the tags from field names in the path of an error.
Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputAudio, Tag("<input_audio>")],
    Discriminator(
        _kind_of_part,
        custom_error_type="content",
        custom_error_message="expected an object whose type is 'input_text', 'output_text', 'input_image' or "
        "'input_audio'",
    ),
]
Content = Annotated[
    Annotated[TemplateText, Tag("<text>")]
    | Annotated[Part, Tag("<part>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(
        _kind_of_content,
        custom_error_type="content",
        custom_error_message="expected a string, a content part, or an array of content parts",
    ),
]


class MessageSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """One message to a judge model."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: Literal["message"] | None = None

    @property
    def parts(self) -> list[str | InputText | OutputText | InputImage | InputAudio]:
        return list(self.content) if isinstance(self.content, list) else [self.content]

    @property
    def templates(self) -> list[str]:
        return [_template_of(part) for part in self.parts]


def _template_of(part: str | InputText | OutputText | InputImage | InputAudio) -> str:
    match part:
        case str():
            return part
        case InputText() | OutputText():
            return part.text
        case InputImage():
            return part.image_url
        case InputAudio():
            return part.input_audio.data


class SamplingParams(BaseModel, extra="forbid", frozen=True, strict=True):
    """Sampling parameters of a judge model.

    OpenAI's API spells max_completions_tokens with two plurals; OpenAI's guide also uses max_tokens.
    """

    seed: int | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_completions_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_completions_tokens is not None:
            raise ValueError("give either 'max_completions_tokens' or 'max_tokens', which mean the same")
        return self


class ScoreModelSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Prompt a judge model for a number."""

    type: Literal["score_model"] = "score_model"
    name: GraderName
    model: Name
    input: Annotated[list[MessageSpec], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    range: Annotated[list[Finite], Field(min_length=2, max_length=2)] | None = None  # None means [0, 1]
    sampling_params: SamplingParams | None = None
    pass_threshold: Finite | None = None

    @field_validator("range")
    @classmethod
    def _ascends(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the lower bound must be below the upper")
        return value

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest score."""
        low, high = self.range or (0.0, 1.0)
        return low, high


class LabelModelSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Prompt a judge model for a label. The score is 1 if it is a passing label, else 0."""

    type: Literal["label_model"] = "label_model"
    name: GraderName
    model: Name
    input: Annotated[list[MessageSpec], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    labels: Annotated[list[Name], Field(min_length=1, max_length=MAX_LABELS)]
    passing_labels: Annotated[list[Name], Field(max_length=MAX_LABELS)]
    sampling_params: SamplingParams | None = None
    pass_threshold: Finite | None = None

    @field_validator("passing_labels")
    @classmethod
    def _are_labels(cls, passing: list[str], info: ValidationInfo) -> list[str]:
        known = set(info.data.get("labels", passing))
        unknown = next((label for label in passing if label not in known), None)
        if unknown is not None:
            raise ValueError(f"{quoted(unknown)} is not among 'labels'")
        return passing


class EndpointSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Call the user's web server. The headers contain secrets, which `dump` can mask."""

    type: Literal["endpoint"] = "endpoint"
    name: GraderName
    url: Annotated[str, AfterValidator(checked_url)] = Field(repr=False)
    headers: (
        Annotated[dict[str, str], Field(max_length=MAX_HEADERS), AfterValidator(checked_headers)] | None
    ) = Field(default=None, repr=False)
    rate_limit: Annotated[int, Field(ge=1)] | None = None  # requests per second
    pass_threshold: Finite | None = None


class PythonSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Run the user's own `grade(sample, item)`."""

    type: Literal["python"] = "python"
    name: GraderName
    source: Source
    image_tag: Annotated[str, AfterValidator(_checked_environment)] | None = (
        None  # None means the default environment, and stays None in responses
    )
    pass_threshold: Finite | None = None


class RewardModelSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Score the conversation and the answer with a reward model of the project. An extension of OpenAI's API."""

    type: Literal["reward_model"] = "reward_model"
    name: GraderName
    model: Name
    pass_threshold: Finite | None = None


SimpleSpec = (
    StringCheckSpec
    | TextSimilaritySpec
    | PythonSpec
    | MathSpec
    | FormatSpec
    | ScoreModelSpec
    | LabelModelSpec
    | EndpointSpec
    | RewardModelSpec
)
SubGraderSpec = Annotated[SimpleSpec, Field(discriminator="type")]


class MultiSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Combine other graders by a formula whose variables are the keys of `graders`."""

    type: Literal["multi"] = "multi"
    name: GraderName
    graders: dict[str, SubGraderSpec]
    calculate_output: str
    pass_threshold: Finite | None = None
    invalid_grade: Finite | None = None  # substitute score of a failed sub-grader

    @field_validator("calculate_output")
    @classmethod
    def _formula_parses(cls, text: str, info: ValidationInfo) -> str:
        if "graders" in info.data:  # absent if they are invalid, which is the error to report
            Formula.parse(text, info.data["graders"])
        return text


class SelectSpec(BaseModel, extra="forbid", frozen=True, strict=True):
    """Grade each row with the grader that it names. An extension of OpenAI's API."""

    type: Literal["select"] = "select"
    name: GraderName
    key: TemplateText  # reads the name of the grader from the row, as in {{item.grader}}
    graders: dict[str, Annotated[SimpleSpec | MultiSpec, Field(discriminator="type")]]

    @field_validator("key")
    @classmethod
    def _reads_the_row(cls, text: str) -> str:
        references = [part for part in Template.parse(text).parts if isinstance(part, Reference)]
        if not references or any(one.namespace != "item" for one in references):
            raise ValueError("the key must read the row, as in {{item.grader}}, and not the sample")
        return text


GraderSpec = Annotated[SimpleSpec | MultiSpec | SelectSpec, Field(discriminator="type")]

_MODELS: dict[str, type[SimpleSpec | MultiSpec | SelectSpec]] = {
    "string_check": StringCheckSpec,
    "text_similarity": TextSimilaritySpec,
    "python": PythonSpec,
    "math": MathSpec,
    "format": FormatSpec,
    "score_model": ScoreModelSpec,
    "label_model": LabelModelSpec,
    "endpoint": EndpointSpec,
    "reward_model": RewardModelSpec,
    "multi": MultiSpec,
    "select": SelectSpec,
}
GRADER_TYPES = frozenset(_MODELS)
# Hints for some unsupported values.
_NOTES = {
    "cosine": " It needs an embedding model, and is not offered for reinforcement fine-tuning.",
    "neq": " Did you mean 'ne'?",
}


def parse_grader(raw: object, param: str = "grader", *, unlisted: Collection[str] = ()) -> GraderSpec:
    """Parse a spec from `raw`, parsed JSON. Raises InvalidGrader with a `param` below the given one.

    Args:
        unlisted: types that the caller rejects itself, so that an error about an unknown type does not offer them.
    """
    if count_references(raw) > MAX_REFERENCES:
        raise _invalid_value(param, f"its templates may have at most {MAX_REFERENCES} references in all.")
    return _parsed(_object(raw, param), param, unlisted)


def count_references(raw: object) -> int:
    """Return an upper bound of the number of references in the templates of `raw`, without parsing them."""
    try:
        return json.dumps(raw, default=str).count("{{")
    except (ValueError, RecursionError):  # circular, or nested too deeply to be a grader
        return 0


def _parsed(fields: dict[str, Any], param: str, unlisted: Collection[str] = ()) -> GraderSpec:
    model = _MODELS[_known_type(fields, f"{param}.type", unlisted)]
    fields = _with_one_unknown(fields, model)
    if "name" in fields and fields["name"] is None:  # typed clients send null for unset fields
        del fields["name"]
    if model is MultiSpec and "graders" in fields:
        fields["graders"] = _sub_graders(fields["graders"], f"{param}.graders")
    if model is SelectSpec and "graders" in fields:
        fields["graders"] = _choices(fields["graders"], f"{param}.graders")
    try:
        return model.model_validate(fields)
    except ValidationError as invalid:
        where, about = complaints.first_of(invalid.errors(), fields, param)
        mistake = complaints.explain(where, about, _NOTES)
        if mistake.code == "unknown_parameter":
            name = where.removeprefix(f"{param}.")
            close = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.75)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            mistake = replace(mistake, message=mistake.message + hint)
        raise _refusal(mistake) from None


def _with_one_unknown(fields: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the known fields and the first unknown one: only that is reported, but pydantic adds an error for each."""
    unknown = next((key for key in fields if key not in model.model_fields), None)
    return {key: value for key, value in fields.items() if key in model.model_fields or key == unknown}


def parts_of(spec: GraderSpec) -> Mapping[str, SimpleSpec | MultiSpec]:
    """Return the graders inside a multi or a select by key; empty for any other."""
    return spec.graders if isinstance(spec, MultiSpec | SelectSpec) else {}


def dump(spec: GraderSpec, *, masked: bool = False) -> dict[str, Any]:
    """Return the spec as JSON for a response: `type` and `name` on every grader, without unset fields.

    `masked` hides secrets (core/masking.py); a masked spec cannot be run.
    """
    dumped: dict[str, Any] = spec.model_dump(mode="json", exclude_none=True)
    return dict(hide_secrets(dumped)) if masked else dumped


def _sub_graders(raw: object, param: str) -> dict[str, SubGraderSpec]:
    """Return the graders of a multi by variable name. In a list, the grader's name is its variable name."""
    if isinstance(raw, list | Mapping) and len(raw) > MAX_GRADERS:
        raise _invalid_value(
            param, f"a multi grader may have at most {MAX_GRADERS} graders, but got {len(raw)}."
        )
    graders = _listed_graders(raw, param) if isinstance(raw, list) else _keyed_graders(raw, param)
    if not graders:
        raise _invalid_value(param, "expected at least one grader.")
    return graders


def _choices(raw: object, param: str) -> dict[str, SubGraderSpec | MultiSpec]:
    """Return the graders of a select by the names that rows have."""
    keyed = _object(raw, param)
    if not 0 < len(keyed) <= MAX_GRADERS:
        raise _invalid_value(param, f"expected 1 to {MAX_GRADERS} graders, but got {len(keyed)}.")
    graders: dict[str, SubGraderSpec | MultiSpec] = {}
    for key, sub in keyed.items():
        fields = _object(sub, f"{param}.{key}")
        if fields.get("type") == "select":
            raise _invalid_value(
                f"{param}.{key}.type", "a select grader cannot contain another select grader."
            )
        graders[key] = spec = _parsed(fields, f"{param}.{key}", ("select",))  # type: ignore[assignment]
        assert not isinstance(spec, SelectSpec)
    return graders


def _keyed_graders(raw: object, param: str) -> dict[str, SubGraderSpec]:
    keyed = _object(raw, param)
    for key in keyed:
        _check_variable(key, param)
    return {key: _sub_grader(sub, f"{param}.{key}") for key, sub in keyed.items()}


def _listed_graders(raw: list[object], param: str) -> dict[str, SubGraderSpec]:
    graders: dict[str, SubGraderSpec] = {}
    for index, sub in enumerate(raw):
        where = f"{param}[{index}].name"
        if isinstance(sub, Mapping) and sub.get("name") is None:
            raise _missing(where)  # the formula cannot refer to a generated name
        spec = _sub_grader(sub, f"{param}[{index}]")
        _check_variable(spec.name, where)
        if spec.name in graders:
            raise _invalid_value(where, f"{quoted(spec.name)} is already the name of another grader.")
        graders[spec.name] = spec
    return graders


def _sub_grader(raw: object, param: str) -> SubGraderSpec:
    fields = _object(raw, param)
    if (kind := fields.get("type")) in ("multi", "select"):
        raise _invalid_value(
            f"{param}.type",
            f"a multi grader cannot contain {'another' if kind == 'multi' else 'a'} {kind} grader.",
        )
    spec = _parsed(fields, param, ("multi", "select"))
    assert not isinstance(spec, MultiSpec | SelectSpec)
    return spec


def _check_variable(key: str, param: str) -> None:
    if not is_name(key):
        shown = f"{quoted(key)} cannot be a variable of 'calculate_output'"
        raise _invalid_value(param, f"{shown}; use letters, digits and underscores.")


def _object(raw: object, param: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise _wrong_type(param, "an object", raw)
    return dict(raw)


def _known_type(fields: Mapping[str, Any], param: str, unlisted: Collection[str]) -> str:
    """Return the grader type in `fields`. Raises InvalidGrader if it is missing or unsupported."""
    if "type" not in fields:
        raise _missing(param)
    kind = fields["type"]
    if not isinstance(kind, str):
        raise _wrong_type(param, "a string", kind)
    if kind not in _MODELS:
        raise _unsupported(kind, param, _listed(repr(name) for name in _MODELS if name not in unlisted))
    return kind


def _refusal(mistake: Mistake) -> InvalidGrader:
    return InvalidGrader(mistake.message, mistake.param, mistake.code)


def _missing(param: str) -> InvalidGrader:
    return _refusal(complaints.missing(param))


def _wrong_type(param: str, expected: str, value: object) -> InvalidGrader:
    return _refusal(complaints.wrong_type(param, expected, value))


def _invalid_value(param: str, why: str) -> InvalidGrader:
    return _refusal(complaints.invalid_value(param, why))


def _unsupported(value: str, param: str, supported: str) -> InvalidGrader:
    return _refusal(complaints.unsupported(value, param, supported, _NOTES))


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last  # the same style as pydantic's messages
