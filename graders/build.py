"""Build graders from specs, and list the fields of a row that a spec reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as Folder
from typing import Any, TypeVar, assert_never

from graders.builtin.format_check import Pattern, ThinkAnswer
from graders.builtin.math_answer import MathAnswer
from graders.builtin.multi import Multi
from graders.builtin.python import PythonGrader
from graders.builtin.reward_model import RewardModel
from graders.builtin.select import Select
from graders.builtin.string_check import StringCheck
from graders.builtin.text_similarity import TextSimilarity, has_no_word
from graders.calls import RateLimit
from graders.endpoint import Endpoint, Endpoints, url_problem
from graders.environments.catalog import DEFAULT, default_folder, find
from graders.formula import Formula
from graders.judge.judges import Judges
from graders.judge.model_graders import LabelModel, PromptTemplate, ScoreModel, TemplatePart
from graders.sandbox.pool import refusal
from graders.spec import (
    EndpointSpec,
    FormatSpec,
    GraderSpec,
    InputAudio,
    InputImage,
    InvalidGrader,
    LabelModelSpec,
    MathSpec,
    MessageSpec,
    MultiSpec,
    PythonSpec,
    RewardModelSpec,
    SamplingParams,
    ScoreModelSpec,
    SelectSpec,
    SimpleSpec,
    StringCheckSpec,
    TextSimilaritySpec,
    no_word,
    parts_of,
)
from graders.template import (
    MissingPath,
    Path,
    Reference,
    RenderError,
    Template,
    dotted,
    quoted,
    resolve,
    unknown_choice,
)
from graders.types import Grader, Item, Sample
from graders.weighted_sum import weights_of_parts

Part = TypeVar("Part", bound=GraderSpec)


class NotConfigured(InvalidGrader):
    """The grader is valid, but this installation cannot run it: no judge model, no sandbox, no environment, or no
    endpoints allowed."""


def build(
    spec: GraderSpec,
    judges: Judges | None = None,
    endpoints: Endpoints | None = None,
    environments: Folder | None = None,
    *,
    owner: str = "",
    param: str = "grader",
) -> Grader:
    """Build a grader from a checked spec. Raises only NotConfigured or EnvironmentNotBuilt.

    Args:
        judges: Required by score_model and label_model.
        endpoints: Required by endpoint.
        environments: Folder of the python graders' environments; default: the one of this installation.
        owner: The project. The sandbox does not share processes between owners, and schedules owners fairly.
        param: Dotted path of the spec, for errors.
    """
    match spec:
        case StringCheckSpec():
            return StringCheck(
                spec.name, Template.parse(spec.input), Template.parse(spec.reference), spec.operation
            )
        case TextSimilaritySpec():
            return TextSimilarity(
                spec.name,
                Template.parse(spec.input),
                Template.parse(spec.reference),
                spec.evaluation_metric,
                spec.tokenizer,
            )
        case MathSpec():
            return MathAnswer(spec.name, Template.parse(spec.input), Template.parse(spec.reference))
        case FormatSpec():
            return _format(spec)
        case ScoreModelSpec() | LabelModelSpec():
            return _model_grader(spec, judges, param)
        case EndpointSpec():
            return _endpoint(spec, endpoints, param)
        case PythonSpec():
            return _python(spec, environments, owner, param)
        case RewardModelSpec():
            return RewardModel(spec.name, spec.model)
        case MultiSpec() | SelectSpec():
            graders = {
                key: build(sub, judges, endpoints, environments, owner=owner, param=f"{param}.graders.{key}")
                for key, sub in spec.graders.items()
            }
            if isinstance(spec, SelectSpec):
                return Select(spec.name, Template.parse(spec.key), graders)
            formula = Formula.parse(spec.calculate_output, spec.graders)
            return Multi(spec.name, graders, formula, spec.invalid_grade)
        case _:
            assert_never(spec)


def _format(spec: FormatSpec) -> Grader:
    text = Template.parse(spec.input)
    if spec.pattern is not None:
        return Pattern(spec.name, text, spec.pattern)
    return ThinkAnswer(spec.name, text, spec.credit or "full")


def _model_grader(spec: ScoreModelSpec | LabelModelSpec, judges: Judges | None, param: str) -> Grader:
    judge = _judge(spec.model, judges, param)
    prompt, sampling = _prompt(spec.input), _sampling(spec.sampling_params)
    if isinstance(spec, ScoreModelSpec):
        return ScoreModel(spec.name, judge, spec.model, prompt, sampling, *spec.bounds)
    passing = frozenset(spec.passing_labels)
    return LabelModel(spec.name, judge, spec.model, prompt, sampling, spec.labels, passing)


def _endpoint(spec: EndpointSpec, endpoints: Endpoints | None, param: str) -> Endpoint:
    if problem := url_problem(spec.url, endpoints, "Endpoint graders"):
        raise NotConfigured(problem, f"{param}.{'type' if endpoints is None else 'url'}", "invalid_value")
    assert endpoints is not None, "or there was a problem"
    pace = RateLimit(spec.rate_limit, endpoints.patience.sleep, endpoints.clock)
    return Endpoint(spec.name, spec.url, spec.headers or {}, endpoints, pace)


def _python(spec: PythonSpec, environments: Folder | None, owner: str, param: str) -> PythonGrader:
    if unsafe := refusal():
        message = f"This server cannot run python graders safely: {unsafe}"
        raise NotConfigured(message, f"{param}.type", "invalid_value")
    environment = find(environments or default_folder(), spec.image_tag or DEFAULT)
    return PythonGrader(spec.name, spec.source, environment=environment, owner=owner)


def _parts_of_type(spec: GraderSpec, param: str, *types: type[Part]) -> Iterator[tuple[str, Part]]:
    """Yield the graders of these types in the spec, itself among them, each with its path."""
    if isinstance(spec, types):
        yield param, spec
    for key, sub in parts_of(spec).items():
        yield from _parts_of_type(sub, f"{param}.graders.{key}", *types)


def python_parts(spec: GraderSpec, param: str = "grader") -> Iterator[tuple[str, PythonSpec]]:
    """Yield the python graders of the spec, each with its path."""
    return _parts_of_type(spec, param, PythonSpec)


def reward_model_parts(spec: GraderSpec, param: str = "grader") -> Iterator[tuple[str, RewardModelSpec]]:
    """Yield the reward models of the spec, each with its path."""
    return _parts_of_type(spec, param, RewardModelSpec)


def judge_parts(
    spec: GraderSpec, param: str = "grader"
) -> Iterator[tuple[str, ScoreModelSpec | LabelModelSpec]]:
    """Yield the parts of the spec that prompt a judge model, each with its path."""
    return _parts_of_type(spec, param, ScoreModelSpec, LabelModelSpec)


def is_judged(spec: GraderSpec) -> bool:
    """Return whether judges grade, and no reward model, whose scores are not computed again."""
    return any(judge_parts(spec)) and not any(reward_model_parts(spec))


def alarms_of(spec: GraderSpec, *, has_shadow: bool) -> list[str]:
    """Return the alarms (docs/howto/signal.md) that a job with this grader can raise, if it is large enough."""
    allowed = {
        "shadow_divergence": has_shadow,
        "one_sided_gain": sum(map(bool, weights_of_parts(spec).values())) > 1,
        "judge_drift": is_judged(spec),
        "validation_falls": True,
    }
    return [name for name, is_allowed in allowed.items() if is_allowed]


def calls_servers(spec: GraderSpec) -> bool:
    """Return whether a part asks a judge or an endpoint, whose grades take time and often cost money."""
    return any(_parts_of_type(spec, "", ScoreModelSpec, LabelModelSpec, EndpointSpec))


def environments_of(spec: GraderSpec) -> list[str]:
    """Return the distinct environments of the spec's python graders."""
    return list(dict.fromkeys(part.image_tag or DEFAULT for _, part in python_parts(spec)))


def item_paths(spec: GraderSpec) -> list[Path]:
    """Return the distinct paths that the spec reads from a row."""
    return list(dict.fromkeys(path for template in _templates(spec) for path in template.item_paths))


def reads_more(spec: GraderSpec) -> bool:
    """Return whether a part may read fields that `item_paths` does not list: a python grader or an endpoint."""
    return any(_parts_of_type(spec, "", PythonSpec, EndpointSpec))


def for_row(spec: GraderSpec, row: Item) -> SimpleSpec | MultiSpec | None:
    """Return the grader of this row: the one that a select chooses, else the spec itself. None: it chooses none."""
    if not isinstance(spec, SelectSpec):
        return spec
    try:
        return spec.graders.get(Template.parse(spec.key).render(Sample.from_text(""), row))
    except RenderError:
        return None


def missing_item_paths(spec: GraderSpec, row: Item) -> list[str]:
    """Return the paths that the spec reads and this row lacks, such as "item.answer". A null is not missing.

    Of a select, only the grader of the row counts.
    """
    paths = item_paths(spec)
    if isinstance(spec, SelectSpec):
        chosen = for_row(spec, row)
        paths = [*Template.parse(spec.key).item_paths, *([] if chosen is None else item_paths(chosen))]
    return [dotted("item", path) for path in dict.fromkeys(paths) if not _present(row, path)]


def row_problems(spec: GraderSpec, row: Item) -> list[str]:
    """Return an error message for each reason why the spec cannot grade answers to this row.

    A field is missing (missing_item_paths), the row chooses no grader, or its reference has no word
    (unusable_references).
    """
    missing = missing_item_paths(spec, row)
    problems = [f"the grader reads {{{{{path}}}}}, which this row does not have" for path in missing]
    if isinstance(spec, SelectSpec) and not problems and for_row(spec, row) is None:
        chosen = Template.parse(spec.key).render(Sample.from_text(""), row)
        problems.append(unknown_choice(chosen, spec.graders))
    return [*problems, *unusable_references(spec, row)]


def graders_of(spec: GraderSpec, row: Item) -> list[SimpleSpec | MultiSpec]:
    """Return the graders of this row: the one that a select chooses, and those of a multi in place of it."""
    chosen = for_row(spec, row)
    return [] if chosen is None else [*(parts_of(chosen).values() or [chosen])]


def reference_of(spec: StringCheckSpec | TextSimilaritySpec | MathSpec, row: Item) -> str | None:
    """Return the reference for answers to this row; None if it depends on the answer, or a field is missing."""
    template = Template.parse(spec.reference)
    if any(isinstance(part, Reference) and part.namespace == "sample" for part in template.parts):
        return None
    try:
        return template.render(Sample.from_text(""), row)
    except RenderError:
        return None


def unusable_references(spec: GraderSpec, row: Item) -> list[str]:
    """Return an error message for each text_similarity whose metric finds no word in its reference for this row."""
    return [
        no_word(part, reference)
        for part in graders_of(spec, row)
        if isinstance(part, TextSimilaritySpec)
        and (reference := reference_of(part, row)) is not None
        and has_no_word(part.evaluation_metric, reference, part.tokenizer)
    ]


# Fields of a sample that are null unless the answer is an episode.
EPISODE_FIELDS = ("messages", "turns", "stop", "trace_id")


def reads_sample(spec: GraderSpec, param: str, fields: Sequence[str]) -> tuple[str, str] | None:
    """Return the path of the first grader whose template reads one of these fields of `sample`, and the field, or None.

    Args:
        param: The path of the spec.
    """
    if parts := parts_of(spec):
        found = (reads_sample(sub, f"{param}.graders.{key}", fields) for key, sub in parts.items())
        return next((one for one in found if one), None)
    references = (part for one in _templates(spec) for part in one.parts if isinstance(part, Reference))
    read = (one.path[0] for one in references if one.namespace == "sample" and one.path)
    return next(((param, str(name)) for name in read if name in fields), None)


def _templates(spec: GraderSpec) -> Iterator[Template]:
    match spec:
        case MultiSpec():
            for sub in spec.graders.values():
                yield from _templates(sub)
        case SelectSpec():
            yield Template.parse(spec.key)
            for choice in spec.graders.values():
                yield from _templates(choice)
        case ScoreModelSpec() | LabelModelSpec():
            for message in spec.input:
                yield from map(Template.parse, message.templates)
        case FormatSpec():
            yield Template.parse(spec.input)
        case PythonSpec():
            return  # the fields that the function reads are unknown
        case EndpointSpec():
            return  # endpoints get the whole row
        case RewardModelSpec():
            return  # reads the conversation
        case _:
            yield Template.parse(spec.input)
            yield Template.parse(spec.reference)


def _present(row: Item, path: Path) -> bool:
    try:
        resolve(row, path)
    except MissingPath:
        return False
    return True


def _judge(model: str, judges: Judges | None, param: str) -> Judges:
    if judges is None or not judges.models:
        message = (
            "No judge model is configured on this server, so it cannot run model graders. The operator "
            "can add some ([judges] in REGRAFT_GRADERS_FILE)."
        )
        raise NotConfigured(message, f"{param}.model", "invalid_value")
    if model not in judges.models:
        known = ", ".join(map(quoted, sorted(judges.models)))
        message = f"Invalid value: {quoted(model)}. The judge models configured on this server are: {known}."
        raise NotConfigured(message, f"{param}.model", "invalid_value")
    return judges


def _prompt(messages: list[MessageSpec]) -> PromptTemplate:
    return PromptTemplate(tuple((message.role, tuple(_parts(message))) for message in messages))


def _parts(message: MessageSpec) -> Iterator[TemplatePart]:
    for part, template in zip(message.parts, message.templates, strict=True):
        yield TemplatePart(Template.parse(template), _shape(part))


def _shape(part: object) -> Callable[[str], dict[str, Any]]:
    """Convert input_text, input_image and input_audio of the graders API to parts of the chat completions API."""
    match part:
        case InputImage(detail=detail):
            extra = {} if detail is None else {"detail": detail}
            return lambda url: {"type": "image_url", "image_url": {"url": url, **extra}}
        case InputAudio(input_audio=audio):
            form = audio.format
            return lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": form}}
        case _:
            return lambda text: {"type": "text", "text": text}


def _sampling(params: SamplingParams | None) -> dict[str, Any]:
    sampling = params.model_dump(exclude_none=True) if params else {}
    for spelling in ("max_completions_tokens", "max_tokens"):
        if spelling in sampling:
            sampling["max_completion_tokens"] = sampling.pop(spelling)
    return sampling
