"""Checks of evals and runs before they are created: criteria against the schema, and rows against both."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import ValidationError

from api.http.deps import Service
from api.http.schema_checks import in_turn, refuse_unusable_schema
from api.resources import graders
from api.resources.eval_requests import (
    FileContent,
    FileId,
    JsonlSource,
    RunCreate,
    SampledSource,
)
from core.chat import Served, Tool, as_chat_tool
from core.database.tables import File, Project
from core.errors import (
    ContentDamaged,
    FileNotFound,
    InvalidRequest,
    ModelNotFound,
    ServiceError,
    TunedModelNotFound,
)
from core.evals import budgets, rows, targets
from core.evals.items import MAX_ROWS
from core.evals.rows import EvalRow
from core.inference import not_served
from core.model_templates import CHAT_TEMPLATE, files_of, tools_problem
from core.registry import sampler_of
from core.response_format import ResponseFormat, checked_bounds
from core.results import model_aliases, tuned_models
from core.storage import files
from core.storage.datasets import InvalidDataset, LineError, Problems
from core.storage.store import BlobNotFound
from core.tool_parsers import PARSED
from graders.build import item_paths, missing_item_paths, unusable_references
from graders.checks import item_schema_problem
from graders.hazards import table
from graders.hazards.pool import OWNER, HazardFailed, LimitExceeded, shared
from graders.prompts import PromptTemplate, parse_input_messages, sample_problem
from graders.spec import GraderSpec
from graders.template import Path, dotted

# Characters of JSON per call of the hazard pool.
BATCH_CHARACTERS = 256 * 1024
SCHEMA = "data_source_config.item_schema"
_SAMPLE = re.compile(r"\{\{\s*sample\b")


async def refuse_eval(
    config: Mapping[str, Any], criteria: Sequence[GraderSpec], service: Service, project: Project
) -> None:
    """Reject a schema that is none, criteria that read fields which it excludes, and graders that cannot run here."""
    schema = config.get("item_schema")
    if schema is not None:
        try:
            checked_bounds(schema)
        except ValueError as cause:
            raise _invalid(SCHEMA, f"{cause}.") from None
        await in_turn(partial(_refuse_schema, schema), service, project)
        for number, spec in enumerate(criteria):
            for path in item_paths(spec):
                if excludes(schema, path):
                    raise _invalid(
                        f"testing_criteria[{number}]",
                        f"it reads {{{{{dotted('item', path)}}}}}, which '{SCHEMA}' does not have.",
                    )
    for number, spec in enumerate(criteria):
        await graders.refuse(spec, service, project, f"testing_criteria[{number}]")


def _refuse_schema(schema: dict[str, Any]) -> None:
    if problem := _result(partial(item_schema_problem, schema), SCHEMA):
        raise _invalid(SCHEMA, f"it {problem}.")


def excludes(schema: Any, path: Path) -> bool:
    """Whether no valid item has a value at this path, as far as plain `properties` and `items` tell."""
    for step in path:
        if not isinstance(schema, Mapping):
            return False
        if any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties", "if")):
            return False
        if isinstance(step, int):
            schema = schema.get("items")
            continue
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return False
        if step not in properties:
            return not schema.get("additionalProperties")
        schema = properties[step]
    return False


async def refuse_run(
    body: RunCreate,
    config: Mapping[str, Any],
    criteria: Sequence[GraderSpec],
    service: Service,
    project: Project,
) -> None:
    """Reject an eval that cannot run here (any more, or as it was imported), and a schema that cannot be enforced.

    Also reject a budget that suffices for no item.
    """
    _refuse_budget(body, criteria)
    if (schema := config.get("item_schema")) is not None:
        await in_turn(partial(_refuse_schema, schema), service, project)
    for number, spec in enumerate(criteria):
        await graders.refuse(spec, service, project, f"testing_criteria[{number}]")
    source = body.data_source
    if isinstance(source, JsonlSource) or source.sampling_params is None:
        return
    form = source.sampling_params.form
    if isinstance(form, ResponseFormat):
        kind = "response_format" if source.type == "completions" else "text.format"
        await refuse_unusable_schema(form, f"data_source.sampling_params.{kind}", service, project)


def _refuse_budget(body: RunCreate, criteria: Sequence[GraderSpec]) -> None:
    cap = None if body.budget is None else body.budget.judge_calls
    needed = sum(spec.type in budgets.JUDGES for spec in criteria)
    if cap is not None and cap < needed:
        raise _invalid(
            "budget.judge_calls",
            f"{cap} is too small to finish one item: the eval has {needed} criteria that call a judge.",
        )


def refuse_model(source: SampledSource, service: Service, project: Project) -> None:
    """Raise ModelNotFound or TunedModelNotFound, or InvalidRequest for what the model does not support.

    Blocks on the database.
    """
    with service.database.read() as session:
        own = targets.served(session, service.blobs, service.registry, project.id, source.model)
        if own is None and source.model not in service.backends.models:
            model_aliases.refuse(session, project.id, source.model, "data_source.model")
            tuned = [model.name for model in tuned_models.models(session, project.id)]
            names = [*service.registry.names, *tuned, *service.backends.models]
            kind = TunedModelNotFound if source.model.startswith("ft:") else ModelNotFound
            missing = kind(source.model, names)
            missing.param = "data_source.model"
            raise missing
    if own is None:
        return
    if not service.settings.inference_address(own.base_model):
        raise not_served(own.base_model, "data_source.model")
    params = getattr(source, "sampling_params", None)
    if params is not None and params.tools:
        refuse_tools(params.tools, own, service)


def refuse_tools(tools: Sequence[Mapping[str, Any]], model: Served, service: Service) -> None:
    """Raise InvalidRequest for tools that chats with the model refuse, so that no item fails of them."""
    param = "data_source.sampling_params.tools"
    for number, tool in enumerate(tools):
        try:
            Tool.model_validate(as_chat_tool(tool))
        except ValidationError as invalid:
            first = invalid.errors()[0]
            where = ".".join([f"{param}[{number}]", *map(str, first["loc"])])
            raise InvalidRequest(f"Invalid '{where}': {first['msg']}.", param=where) from None
    entry = service.registry.get(model.base_model)
    template = _template_for_tools(model, service)
    # vLLM's server has its own parsers. An unknown engine answers for itself, item by item.
    by_transformers = sampler_of(entry, service.settings.sampler, None) == "transformers"
    parsers = PARSED if by_transformers else None
    if template is not None and (
        problem := tools_problem(model.base_model, entry.tool_parser, template, parsers=parsers)
    ):
        raise InvalidRequest(
            f"Unsupported parameter: '{param}': {problem}", param=param, code="unsupported_parameter"
        )


def _template_for_tools(model: Served, service: Service) -> str | None:
    """The template of the adapter's training, or the base model's; None: it is not on this machine."""
    if model.adapter is not None:
        with suppress(BlobNotFound):
            return service.blobs.read(f"{model.adapter.prefix}/{CHAT_TEMPLATE}").decode()
    found = files_of(service.registry.get(model.base_model), service.settings.model_cache)
    return None if found is None else found.template_for_tools


def find_file(body: RunCreate, service: Service, project: Project) -> File | None:
    """The file of the source. Raises InvalidRequest if there is none, or one of another purpose."""
    source = body.data_source.source
    if not isinstance(source, FileId):
        return None
    param = "data_source.source.id"
    with service.database.read() as session:
        try:
            file = files.get(session, project.id, source.id)
        except FileNotFound as missing:
            raise InvalidRequest(missing.message, param=param) from None
    if file.purpose not in ("evals", files.FINE_TUNE):
        raise InvalidRequest(
            f"The file {file.id} has purpose '{file.purpose}', but must have 'evals' or 'fine-tune'.",
            param=param,
        )
    return file


def count_rows(
    body: RunCreate,
    file: File | None,
    config: Mapping[str, Any],
    criteria: Sequence[GraderSpec],
    service: Service,
    project: Project,
) -> int:
    """Check every row and return their number. Holds a batch at a time. Blocks.

    Raises:
        InvalidRequest: with the first lines that are wrong.
    """
    OWNER.set(project.id)
    source = body.data_source
    prompt = None
    if isinstance(source, SampledSource):
        prompt = parse_input_messages(source.input_messages, "data_source.input_messages")
    param = "data_source.source." + ("id" if file is not None else "content")
    problems = Problems()
    count = 0
    try:
        for batch in _batches(_rows(body, file, service), problems):
            count += len(batch)
            if count > MAX_ROWS:
                raise InvalidRequest(f"A run has at most {MAX_ROWS} rows.", param=param)
            _check_batch(batch, config, criteria, prompt, problems, sampled=prompt is not None)
            if problems.full:
                break
        problems.refuse(count, 0)
    except InvalidDataset as invalid:
        raise InvalidRequest(
            f"Invalid rows in '{param}': {invalid}", param=param, code="invalid_rows"
        ) from None
    except files.FileDamaged as damaged:
        raise ContentDamaged(str(damaged)) from None
    if count == 0:
        raise InvalidRequest(f"Invalid value for '{param}': there are no rows.", param=param)
    return count


def _rows(body: RunCreate, file: File | None, service: Service) -> Iterator[EvalRow | LineError]:
    source = body.data_source.source
    if isinstance(source, FileContent):
        return rows.of_content(source.as_data())
    assert file is not None
    return rows.of_file(files.read_content(service.blobs, file))


def _batches(found: Iterator[EvalRow | LineError], problems: Problems) -> Iterator[list[EvalRow]]:
    batch: list[EvalRow] = []
    size = 0
    for row in found:
        if isinstance(row, LineError):
            problems.add(row)
            if problems.full:
                break
            continue
        batch.append(row)
        size += len(str(row.item))
        if size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_batch(
    batch: list[EvalRow],
    config: Mapping[str, Any],
    criteria: Sequence[GraderSpec],
    prompt: PromptTemplate | None,
    problems: Problems,
    *,
    sampled: bool,
) -> None:
    schema = config.get("item_schema")
    violations = [""] * len(batch)
    if schema is not None:
        call = shared().submit(table.ITEMS, json.dumps(schema), json.dumps([row.item for row in batch]))
        violations = _result(call.result, SCHEMA)
    keys = frozenset(schema.get("properties", ()) if schema is not None else ())
    for row, violation in zip(batch, violations, strict=True):
        if row.is_flat and (violation or keys.isdisjoint(row.item)):
            problems.add(LineError(row.line, _no_item(row, violation)))
            continue
        for problem in _problems(row, violation, criteria, prompt, sampled):
            problems.add(LineError(row.line, problem))


def _no_item(row: EvalRow, violation: str) -> str:
    why = f": {violation}" if violation else ""
    return (
        f"has the key '{next(iter(row.item))}'; a row has 'item' and perhaps 'sample', or is itself an item that fits "
        f"'{SCHEMA}'{why}"
    )


def _problems(
    row: EvalRow, violation: str, criteria: Sequence[GraderSpec], prompt: PromptTemplate | None, sampled: bool
) -> Iterator[str]:
    if violation:
        yield f"item: {violation}"
        return
    for spec in criteria:
        for path in missing_item_paths(spec, row.item):
            yield f"the criterion '{spec.name}' reads {{{{{path}}}}}, which this row does not have"
        yield from unusable_references(spec, row.item)
    if prompt is not None and (problem := prompt.problem(row.item)):
        yield problem
    if not sampled and row.sample is not None and (problem := sample_problem(row.sample)):
        yield problem
    if not sampled and row.sample is None and (name := _reads_sample(criteria)):
        yield f"has no 'sample', which the criterion '{name}' reads"


def _reads_sample(criteria: Sequence[GraderSpec]) -> str | None:
    """The first criterion with a template that reads the sample."""
    return next((spec.name for spec in criteria if _SAMPLE.search(spec.model_dump_json())), None)


def _result(check: Callable[[], Any], param: str) -> Any:
    """The result of a check in the hazard pool, whose failures become refusals."""
    try:
        return check()
    except LimitExceeded as exceeded:
        raise _invalid(param, f"it is too expensive to apply: {exceeded}.") from exceeded
    except HazardFailed as broken:
        raise ServiceError(f"The rows could not be checked: {broken}") from broken


def _invalid(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {why}", param=param)
