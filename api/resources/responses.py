"""/v1/responses: chat completions in the shapes of OpenAI's Responses API.

A request is converted to a chat completion (api/resources/chat.py), and its response or events are converted back.
Nothing is stored: to continue a conversation, send the earlier messages again.
"""

import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

import httpx
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from api.http.deps import CurrentCaller, CurrentProject, ServiceDep
from api.http.json_responses import JSON, encode
from api.http.openapi import refusals
from api.resources.chat import ChatCreate as Chat
from api.resources.chat import (
    Generation,
    Inference,
    PassedOn,
    Unsupported,
    Verbosity,
    create_chat_completion,
    described,
)
from core.asgi import received_data, sent_event
from core.chat import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    AnyObject,
    CalledName,
    ContentPart,
    FunctionOnly,
    MaxTokens,
    NotEmpty,
    ReasoningEffort,
    StreamOptions,
    Temperature,
    Text,
    ToolName,
    TopLogprobs,
    TopP,
    refusal_as_text,
)
from core.conversations import merged
from core.errors import (
    InvalidParameter,
    InvalidRequest,
    ResponseNotFound,
    ServiceError,
    UnsupportedValue,
)
from core.response_format import JsonSchema
from core.storage.message_rows import MAX_TOOLS
from core.strict import StrictModel, only
from graders.template import quoted

router = APIRouter(prefix="/responses", tags=["Responses"])

# The path of the schema in a request, and in Chat.
SCHEMA, CHATS_SCHEMA = "text.format.schema", "response_format.json_schema.schema"
LOGPROBS = "message.output_text.logprobs"
# Parameters of a chat completion that do not change its prompt.
ONLY_FOR_ANSWERS = {"stream", "stream_options", "response_format", "logprobs", "top_logprobs"}


def _not_stored(value: Any, info: ValidationInfo) -> None:
    if value is not None:
        name = str(info.field_name)
        message = (
            f"Unsupported parameter: '{name}' is not supported by this server, which stores no responses; send the "
            "earlier messages in 'input'."
        )
        raise InvalidParameter(message, param=name, code="unsupported_parameter")


NotStored = Annotated[None, BeforeValidator(_not_stored)]


class ResponseText(ContentPart):
    """Text of a message; other fields of an earlier answer's text are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class InputMessage(StrictModel):
    """A message of the conversation; an earlier answer is sent back unchanged from `output`."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[ResponseText], Field(min_length=1, max_length=MAX_PARTS), Tag("list")],
        TEXT_OR_LIST,
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_message(cls, item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind != "message":
            raise UnsupportedValue(
                f"items of type {quoted(kind)} are not supported, this server reads messages, calls of functions and "
                "their results"
            )
        if isinstance(item, dict) and item.get("role") == "assistant":
            return refusal_as_text(item, "output_text")
        return item

    def chat(self) -> dict[str, Any]:
        parts = self.content
        content = parts if isinstance(parts, str) else [{"type": "text", "text": part.text} for part in parts]
        return {"role": self.role, "content": content}


class DirectCaller(StrictModel):
    """The model itself; this server runs no programs that call functions."""

    type: Literal["direct"]


class InputCall(StrictModel):
    """A call of an earlier answer, sent back unchanged from `output`."""

    type: Literal["function_call"]
    call_id: NotEmpty
    name: CalledName
    arguments: str
    parsed_arguments: Any = None  # by the helpers of OpenAI's client
    id: str | None = None
    status: str | None = None
    caller: DirectCaller | None = None
    namespace: None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None

    def chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class FunctionCallOutput(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[ResponseText], Field(min_length=1, max_length=MAX_PARTS), Tag("list")],
        TEXT_OR_LIST,
    ]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    caller: DirectCaller | None = None
    namespace: None = None

    def chat(self) -> dict[str, Any]:
        text = self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)
        return {"role": "tool", "content": text, "tool_call_id": self.call_id}


class EarlierReasoning(StrictModel):
    """A thought of an earlier answer. It is dropped, between calls and their results, too; chats take
    `reasoning_content`.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]

    def chat(self) -> None:
        return None


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if kind in ("function_call", "function_call_output", "reasoning") else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[EarlierReasoning, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(StrictModel):
    """A function that an answer may call; Chat has the same fields under `function`."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedValue(
                f"tools of type {quoted(kind)} are not supported, this server has functions only"
            )
        return tool

    def chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ChosenFunction(StrictModel):
    type: FunctionOnly
    name: ToolName


class TextSchema(JsonSchema):
    """text.format; Chat has the same fields under `json_schema`."""

    type: Literal["json_schema"]


class TextConfig(StrictModel):
    format: Annotated[Text | AnyObject | TextSchema, Field(discriminator="type")] | None = None
    verbosity: Verbosity = None

    def response_format(self) -> dict[str, Any] | None:
        """The same in the shape of Chat."""
        if self.format is None:
            return None
        sent = self.format.model_dump(mode="json", by_alias=True, exclude_none=True)
        if not isinstance(self.format, TextSchema):
            return sent
        return {"type": sent.pop("type"), "json_schema": sent}

    def render(self) -> dict[str, Any]:
        format_ = self.format or Text(type="text")
        return {
            "format": format_.model_dump(mode="json", by_alias=True),
            "verbosity": self.verbosity or "medium",
        }


class Reasoning(StrictModel):
    """The effort is that of chat completions; a summary is never written."""

    effort: ReasoningEffort = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseCreate(Generation):
    """The parameters that OpenAI's client may send: honored, ignored, or rejected by name."""

    model: str
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("list")
        ],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    text: TextConfig | None = None
    include: (
        Annotated[
            list[
                Annotated[
                    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
                    only("message.output_text.logprobs", "reasoning.encrypted_content"),
                ]
            ],
            Field(max_length=100, fail_fast=True),
        ]
        | None
    ) = None
    top_logprobs: TopLogprobs = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("text")]
            | Annotated[ChosenFunction, Tag("object")],
            TEXT_OR_OBJECT,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    reasoning: Reasoning | None = None
    truncation: Annotated[Literal["disabled"], only("disabled")] | None = None

    previous_response_id: NotStored = None
    conversation: NotStored = None
    background: Unsupported = None
    max_tool_calls: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    access_programs: Unsupported = None
    image: Unsupported = None
    personality: Unsupported = None  # of the count of input tokens

    @model_validator(mode="after")
    def _is_a_chat(self) -> "ResponseCreate":
        if isinstance(self.tool_choice, ChosenFunction):
            if self.tool_choice.name not in {tool.name for tool in self.tools or ()}:
                raise ValueError(f"'tool_choice' names {self.tool_choice.name}, which is not in 'tools'")
        elif self.tool_choice == "required" and not self.tools:
            raise ValueError("'tool_choice' is 'required', and there are no 'tools'")
        if isinstance(self.input, list) and all(isinstance(item, EarlierReasoning) for item in self.input):
            raise ValueError("'input' has no message")
        messages = self._messages()
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"'input' has more than {MAX_MESSAGES} messages, with that of 'instructions'")
        if any(len(message.get("tool_calls", ())) > MAX_CALLS for message in messages):
            raise ValueError(f"'input' has more than {MAX_CALLS} calls of one answer")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self) -> Chat:
        """The same request as a chat completion. Validation here implies validity there."""
        return Chat.model_validate(self.chat_parameters())

    def chat_parameters(self) -> dict[str, Any]:
        """The parameters of the same request as a chat completion."""
        return {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self.text and self.text.response_format(),
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "tools": [tool.chat() for tool in self.tools or ()] or None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += merged(item.chat() for item in self.input)
        return messages

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, ChosenFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice if self.tools else None


@dataclass
class MessageInProgress:
    """A message of the answer."""

    id: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def item(self, status: str) -> dict[str, Any]:
        """openai.types.responses.ResponseOutputMessage."""
        return self.beginning(status) | {"content": [self.part()]}

    def beginning(self, status: str) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant"}
        return message | {"status": status, "content": []}


@dataclass
class CallInProgress:
    """A call of the answer."""

    id: str
    call_id: str
    name: str
    arguments: str = ""

    def item(self, status: str) -> dict[str, Any]:
        """openai.types.responses.ResponseFunctionToolCall."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


@dataclass
class ResponseInProgress:
    """A response in progress: the parameters that it repeats, and its messages and calls in their order."""

    request: ResponseCreate
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(24))
    created_at: int = field(default_factory=lambda: int(time.time()))
    items: list[MessageInProgress | CallInProgress] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None

    def add_message(self, text: str = "", logprobs: Sequence[dict[str, Any]] = ()) -> MessageInProgress:
        message = MessageInProgress(self._item_id("msg"), text, list(logprobs))
        self.items.append(message)
        return message

    def add_call(self, call_id: str, name: str, arguments: str = "") -> CallInProgress:
        call = CallInProgress(self._item_id("fc"), call_id, name, arguments)
        self.items.append(call)
        return call

    def _item_id(self, kind: str) -> str:
        """The id of the next item, by its place: a response that is made again has the same ones."""
        digest = hashlib.sha256(f"{self.id}/{len(self.items)}".encode()).hexdigest()
        return f"{kind}_{digest[:48]}"

    @property
    def calls(self) -> list[CallInProgress]:
        return [item for item in self.items if isinstance(item, CallInProgress)]

    @property
    def status(self) -> str:
        if self.finish_reason is None:
            return "in_progress"
        return "incomplete" if self.finish_reason == "length" else "completed"

    def response(self) -> dict[str, Any]:
        """openai.types.responses.Response, in its current state."""
        request, status = self.request, self.status
        reasoning = request.reasoning or Reasoning()
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [] if status == "in_progress" else [item.item(status) for item in self.items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": (request.text or TextConfig()).render(),
            "tool_choice": _rendered(request.tool_choice) or "auto",
            "tools": [_rendered(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self.usage and response_usage(self.usage),
            "user": request.user,
        }


def _rendered(value: Any) -> Any:
    return value.model_dump() if isinstance(value, StrictModel) else value


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The token counts of a chat completion under the names of the Responses API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


@dataclass(frozen=True)
class Described:
    """A request and its chat completion for the inference server."""

    request: ResponseCreate
    chat: dict[str, Any]


async def _described(
    body: ResponseCreate, project: CurrentProject, service: ServiceDep, upstream: Inference
) -> Described:
    try:
        chat = await to_thread.run_sync(body.chat)
        return Described(body, await described(chat, project, service, upstream))
    except InvalidRequest as cause:
        param = (cause.param or "").replace(CHATS_SCHEMA, SCHEMA).replace("].function.", "].")
        if param == (cause.param or ""):
            raise
        message = cause.message.replace(str(cause.param), param)
        raise InvalidRequest(message, param=param, code=cause.code) from cause


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A response, or its events.", "content": {"text/event-stream": {}}}
}


@router.post("", responses=ANSWERS | refusals(404, 503))
async def create_response(
    request: Request, body: Annotated[Described, Depends(_described)], upstream: Inference
) -> Response:
    """Create a response, in one piece or as typed server-sent events. Nothing is stored."""
    chat = await create_chat_completion(request, body.chat, upstream)
    model = body.chat["model"]
    if isinstance(chat, PassedOn):
        return PassedOn(chat.answer, events(ResponseInProgress(body.request, model), chunks(chat.answer)))
    if chat.status_code != 200:
        return chat
    return JSON(response_of(ResponseInProgress(body.request, model), json.loads(bytes(chat.body))))


def response_of(answer: ResponseInProgress, completion: dict[str, Any]) -> dict[str, Any]:
    """The whole response whose chat completion this is."""
    [choice] = completion["choices"]
    calls = choice["message"].get("tool_calls") or ()
    text, logprobs = choice["message"]["content"] or "", (choice["logprobs"] or {}).get("content") or []
    if text or logprobs or not calls:
        answer.add_message(text, logprobs)
    for call in calls:
        answer.add_call(call["id"], call["function"]["name"], call["function"]["arguments"])
    answer.finish_reason, answer.usage = choice["finish_reason"], completion["usage"]
    return answer.response()


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post("/input_tokens", response_model=InputTokens, responses=refusals(404, 503))
async def count_input_tokens(
    request: Request, body: Annotated[Described, Depends(_described)], upstream: Inference
) -> InputTokens | Response:
    """Count the tokens of the input as the model reads it: `usage.input_tokens` of a response to the same request.

    The inference server counts, so it samples one token, which is dropped.
    """
    chat = {name: value for name, value in body.chat.items() if name not in ONLY_FOR_ANSWERS}
    answer = await create_chat_completion(request, chat | {"max_completion_tokens": 1}, upstream)
    if answer.status_code != 200:
        return answer
    return InputTokens(input_tokens=json.loads(bytes(answer.body))["usage"]["prompt_tokens"])


@router.get("/{response_id}", include_in_schema=False)
@router.delete("/{response_id}", include_in_schema=False)
@router.get("/{response_id}/input_items", include_in_schema=False)
@router.post("/{response_id}/cancel", include_in_schema=False)
async def look_up(response_id: str, caller: CurrentCaller) -> None:
    """Reject the request: responses are not stored."""
    raise ResponseNotFound(response_id)


async def chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Parse the chunks of a streamed chat completion.

    Raises:
        ServiceError: the inference server failed or closed the connection early.
    """
    try:
        async for events in received_data(answer.aiter_raw()):
            for data in events:
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if error := chunk.get("error"):
                    raise _Failed(error)
                yield chunk
    except httpx.TransportError as cause:
        raise ServiceError(
            "The inference server closed the connection before its response was complete."
        ) from cause
    raise ServiceError("The inference server closed the connection before its response was complete.")


class _Failed(ServiceError):
    """The error in an event of the inference server."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.type = error["type"]


class EventWriter:
    """Writes the events of a response, as OpenAI's client parses them (openai.types.responses.ResponseStreamEvent)."""

    def __init__(self, answer: ResponseInProgress) -> None:
        self.answer = answer
        self._numbers = count()

    def event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": next(self._numbers)} | fields
        return sent_event(encode(body), kind=kind)

    def beginning(self) -> Iterator[bytes]:
        yield self.event("response.created", response=self.answer.response())
        yield self.event("response.in_progress", response=self.answer.response())
        # A model that may call functions shows by its first words or call which item comes first.
        if not self.answer.request.tools:
            yield from self._message()

    def choice(self, choice: Mapping[str, Any]) -> Iterator[bytes]:
        """The events of a choice of a chunk."""
        logprobs = (choice["logprobs"] or {}).get("content") or []
        text = choice["delta"].get("content") or ""
        self.answer.finish_reason = choice["finish_reason"]
        if self._belongs_to_message(text, logprobs):
            yield from self._text_delta(text, logprobs)
        for delta in choice["delta"].get("tool_calls") or ():
            yield from self._call(delta)

    def end(self) -> Iterator[bytes]:
        answer = self.answer
        if not answer.items:
            yield from self._message()
        for index, item in enumerate(answer.items):
            yield from self._ends(item)
            done = item.item(answer.status)
            yield self.event("response.output_item.done", output_index=index, item=done)
        yield self.event(f"response.{answer.status}", response=answer.response())

    def failure(self, cause: ServiceError) -> bytes:
        code = "invalid_prompt" if cause.type == "invalid_request_error" else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": cause.message}}
        return self.event("response.failed", response=self.answer.response() | failed)

    def _belongs_to_message(self, text: str, logprobs: Sequence[Any]) -> bool:
        """Whether a piece belongs to a message.

        After a call, log-probabilities are those of calls, and whitespace only divides these.
        """
        if self.answer.items and isinstance(self.answer.items[-1], CallInProgress):
            return bool(text.strip())
        return bool(text or logprobs)

    def _text_delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        yield from self._message()
        message = self.answer.items[-1]
        assert isinstance(message, MessageInProgress)
        message.text += text
        message.logprobs += logprobs
        where = self._place_of(message) | {"content_index": 0}
        yield self.event("response.output_text.delta", **where, delta=text, logprobs=logprobs)

    def _message(self) -> Iterator[bytes]:
        """The beginning of a message, unless the answer is in one."""
        answer = self.answer
        if answer.items and isinstance(answer.items[-1], MessageInProgress):
            return
        message = answer.add_message()
        place, begun = self._place_of(message), message.beginning(answer.status)
        yield self.event("response.output_item.added", output_index=place["output_index"], item=begun)
        yield self.event("response.content_part.added", **place, content_index=0, part=message.part())

    def _call(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        number, function = delta["index"], delta.get("function") or {}
        if number >= len(self.answer.calls):
            call = self.answer.add_call(delta["id"], function["name"])
            index, added = len(self.answer.items) - 1, call.item("in_progress")
            yield self.event("response.output_item.added", output_index=index, item=added)
        call = self.answer.calls[number]
        if written := function.get("arguments"):
            call.arguments += written
            where = self._place_of(call)
            yield self.event("response.function_call_arguments.delta", **where, delta=written)

    def _ends(self, item: MessageInProgress | CallInProgress) -> Iterator[bytes]:
        """The events before the end of an item."""
        where = self._place_of(item)
        if isinstance(item, CallInProgress):
            done = {"name": item.name, "arguments": item.arguments}
            yield self.event("response.function_call_arguments.done", **where, **done)
            return
        where |= {"content_index": 0}
        text = {"text": item.text, "logprobs": item.logprobs}
        yield self.event("response.output_text.done", **where, **text)
        yield self.event("response.content_part.done", **where, part=item.part())

    def _place_of(self, item: MessageInProgress | CallInProgress) -> dict[str, Any]:
        [index] = (index for index, other in enumerate(self.answer.items) if other is item)
        return {"item_id": item.id, "output_index": index}


async def events(
    answer: ResponseInProgress, chunks: AsyncIterator[dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    """The events of a response, from the chunks of a chat completion."""
    writer = EventWriter(answer)
    for event in writer.beginning():
        yield event
    try:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                for event in writer.choice(choice):
                    yield event
            answer.usage = chunk.get("usage")
        if answer.finish_reason is None:
            raise ServiceError("The inference server ended its response before it was complete.")
    except ServiceError as cause:  # too late for a status code
        yield writer.failure(cause)
        return
    for event in writer.end():
        yield event
