"""Calls of functions in chats of the engines that are ours: what an answer is held to, and how its calls are read."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from core.chat import ChosenTool, InternalChat, Tool
from core.errors import NotReady
from core.model_templates import tools_problem
from core.response_format import response_schema
from core.tool_parsers import PARSED, tool_parser_of
from core.tool_schemas import NO_ARGUMENTS, InvalidToolSchema, schema_of_calls
from worker.model.tool_calls import CallReader
from worker.serving.engines import EngineRefused
from worker.types import Call, ParsedAnswer


class AnswerCalls(Protocol):
    """A way to read the calls of a request's answers."""

    @property
    def schema(self) -> str:
        """The schema that forces the calls, in the format of the samplers; "": they are free."""
        ...

    @property
    def finish_reason(self) -> str:
        """That of an answer with calls."""
        ...

    def read(self, text: str, ids: Sequence[int], *, is_cut: bool) -> ParsedAnswer: ...


@dataclass(frozen=True)
class FreeCalls:
    """With tool_choice "auto": calls as the model writes them."""

    reader: CallReader
    row: Mapping[str, Any]  # tools and parallel_tool_calls
    stops: tuple[str, ...]
    schema: str = ""
    finish_reason: str = "tool_calls"

    def read(self, text: str, ids: Sequence[int], *, is_cut: bool) -> ParsedAnswer:
        return self.reader.read(text, ids, self.row, is_cut=is_cut, stops=self.stops) or ParsedAnswer(text)


@dataclass(frozen=True)
class RequiredCalls:
    """With tool_choice "required": the answer is a JSON list of calls."""

    schema: str
    has_short_ids: bool
    finish_reason: str = "tool_calls"

    def read(self, text: str, ids: Sequence[int], *, is_cut: bool) -> ParsedAnswer:
        if is_cut:
            return ParsedAnswer(text)
        try:
            given = json.loads(text)
        except ValueError:  # a stop string has ended it
            return ParsedAnswer(text)
        calls = [Call(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in given]
        return ParsedAnswer("", tuple(calls), has_short_ids=self.has_short_ids)


@dataclass(frozen=True)
class NamedCall:
    """With a tool_choice that names a function: the answer is its arguments."""

    name: str
    schema: str
    has_short_ids: bool
    finish_reason: str = "stop"  # as OpenAI's

    def read(self, text: str, ids: Sequence[int], *, is_cut: bool) -> ParsedAnswer:
        if is_cut and not text:  # within its thought, or before its first character
            return ParsedAnswer("")
        return ParsedAnswer("", (Call(self.name, text),), has_short_ids=self.has_short_ids)


def refuse_unseen_tools(
    model: str, tool_parser: str | None, template: object, *, parsers: Sequence[str] | None = PARSED
) -> None:
    """Raises EngineRefused: prompts cannot have tools, as `tools_problem` says, or it could not be found out."""
    try:
        problem = tools_problem(model, tool_parser, template, parsers=parsers)
    except NotReady as cause:
        raise EngineRefused(str(cause), 503, code=cause.code, retry_after=cause.retry_after or 0) from cause
    if problem:
        raise EngineRefused(
            f"Unsupported parameter: 'tools': {problem}", code="unsupported_parameter", param="tools"
        )


def calls_of(
    request: InternalChat, tokenizer: PreTrainedTokenizerBase, tool_parser: str | None, template: str | None
) -> AnswerCalls | None:
    """The way to read the calls of the answers; None: they have none.

    Args:
        tool_parser: of the model's entry in the registry.
        template: Jinja text in place of the tokenizer's own.

    Raises:
        EngineRefused: the model's chat template leaves out tools, or it is not known how the model writes calls.
    """
    tools = tools_of(request)
    if not tools or request.tool_choice == "none":
        return None
    used = template or tokenizer.chat_template
    refuse_unseen_tools(request.served.base_model, tool_parser, used)
    parser = tool_parser_of(tool_parser, used)
    assert parser is not None, "a model without one is refused"
    has_short_ids = parser == "mistral"
    parallel = request.parallel_tool_calls is not False
    if isinstance(request.tool_choice, ChosenTool):
        name = request.tool_choice.function.name
        schema = response_schema(_parameters(request.tools or (), name))
        return NamedCall(name, schema, has_short_ids)
    if request.tool_choice == "required":
        return RequiredCalls(_schema_of_calls(request.tools or (), parallel=parallel), has_short_ids)
    row = {"tools": tools, "parallel_tool_calls": parallel}
    return FreeCalls(CallReader.of(parser, tokenizer), row, request.stops)


def tools_of(request: InternalChat) -> list[dict[str, Any]]:
    """The functions of the request, as chat templates get them."""
    return [tool.model_dump(exclude_none=True) for tool in request.tools or ()]


def message_of(parsed: ParsedAnswer) -> dict[str, Any]:
    """The fields of OpenAI's message that depend on calls."""
    if not parsed.calls:
        return {"content": parsed.content}
    calls = parsed.tool_calls(secrets.token_hex(12))
    return {"content": parsed.content or None, "tool_calls": list(calls)}


def deltas_of(parsed: ParsedAnswer) -> list[dict[str, Any]]:
    """The calls as a part of a stream has them."""
    calls = parsed.tool_calls(secrets.token_hex(12))
    return [{"index": number} | call for number, call in enumerate(calls)]


def _parameters(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    return next(tool.function.parameters or NO_ARGUMENTS for tool in tools if tool.function.name == name)


def _schema_of_calls(tools: Sequence[Tool], *, parallel: bool) -> str:
    try:
        return schema_of_calls(tools, parallel=parallel)
    except InvalidToolSchema as cause:
        raise EngineRefused(f"Invalid value for '{cause.param}': {cause}.", param=cause.param) from None
