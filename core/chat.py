"""A chat completion as requested by users, and as sent to the inference server."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from core import chat_templates
from core.masking import hide_addresses
from core.response_format import ResponseFormat, response_schema
from core.storage.manifests import is_whole_model
from core.storage.message_rows import MAX_TOOLS, TOOL_NAME
from core.strict import StrictModel, only

MAX_CHOICES = 128
NotEmpty = Annotated[str, Field(min_length=1)]
Temperature = Annotated[float, Field(ge=0, le=2)] | None
TopP = Annotated[float, Field(gt=0, le=1)] | None
MaxTokens = Annotated[int, Field(ge=1)] | None
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
TopLogprobs = Annotated[int, Field(ge=0, le=20)] | None


# Content types of OpenAI's models that this service does not support.
NOT_TEXT = {
    "image_url": "an image",
    "input_image": "an image",
    "input_audio": "audio",
    "file": "a file",
    "input_file": "a file",
    "refusal": "a refusal",
}


class ContentPart(StrictModel):
    """One part of a message; the subclasses are kinds of text."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in NOT_TEXT:
            raise ValueError(f"this part is {NOT_TEXT[kind]} ('{kind}'), and this server reads text only")
        return part


class TextPart(ContentPart):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, Field(exclude=True)] = None  # ignored


def _text_or_list(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


# Discriminates between a string and a list, so that an error inside the list is reported at its location.
TEXT_OR_LIST = Discriminator(
    _text_or_list, custom_error_type="text_or_list", custom_error_message="expected a string or an array"
)


# The server compares the end of an answer with each beginning of a stop text, for each token.
MAX_STOP_CHARACTERS = 1000
StopText = Annotated[NotEmpty, Field(max_length=MAX_STOP_CHARACTERS)]
Stop = (
    Annotated[
        Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=4), Tag("list")],
        TEXT_OR_LIST,
    ]
    | None
)


def _text_or_object(value: Any) -> str:
    return "text" if isinstance(value, str) else "object"


# As above, between a word and an object.
TEXT_OR_OBJECT = Discriminator(_text_or_object)


# Extra fields of an assistant message that is an earlier response of ours, sent back by OpenAI's client.
SENT_BACK = ("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_calls")


# The limits of OpenAI's API.
MAX_CALLS = 128
MAX_CALLED_NAME = 4096
MAX_BIASES = 1024
FunctionOnly = Annotated[Literal["function"], only("function")]
ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
CalledName = Annotated[str, Field(max_length=MAX_CALLED_NAME)]  # a model may invent names of functions
Penalty = Annotated[float, Field(ge=-2, le=2)] | None
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
LogitBias = (
    Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
)
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)] | None


# Per conversation, and per message. Without bounds, 2 MB of empty objects become gigabytes of validation errors.
MAX_MESSAGES, MAX_PARTS = 2048, 256


def refusal_as_text(message: dict[str, Any], text_type: str) -> dict[str, Any]:
    """An assistant's message with its refusal, a field or parts of the content, as text: it is what the model wrote."""
    content, refusal = message.get("content"), message.get("refusal")
    if not content and isinstance(refusal, str):
        return {name: value for name, value in message.items() if name != "refusal"} | {"content": refusal}
    if isinstance(content, list):
        return message | {"content": [_refusal_part_as_text(part, text_type) for part in content]}
    return message


def _refusal_part_as_text(part: Any, text_type: str) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal" and part.keys() == {"type", "refusal"}:
        return {"type": text_type, "text": part["refusal"]}
    return part


class CalledFunction(StrictModel):
    name: CalledName
    arguments: str = "{}"  # JSON, as the model wrote it
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None  # by the helpers of OpenAI's client


class ToolCall(StrictModel):
    """A call of an earlier answer."""

    # Clients that put the pieces of a stream together send the place of the call back. The order says the same.
    index: Annotated[int | None, Field(ge=0, exclude=True)] = None
    id: NotEmpty
    type: FunctionOnly = "function"
    function: CalledFunction


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[
                list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("list")
            ],
            TEXT_OR_LIST,
        ]
        | None
    ) = None
    name: str | None = None
    refusal: str | None = None  # of the assistant, whose text it becomes
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = (
        None  # of the assistant: the thought of an earlier answer, for the chat template
    )

    @model_validator(mode="after")
    def _role_has_what_it_needs(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' is only for messages of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("'tool_call_id' belongs to messages with the role 'tool', which need it")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("'reasoning_content' is only for messages of the assistant")
        if self.refusal is not None:
            raise ValueError("'refusal' is only for messages of the assistant without content")
        if self.content is None and not self.tool_calls:
            raise ValueError("'content' is missing")
        return self

    @property
    def text(self) -> str:
        """The text of all parts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_sent_back(cls, message: Any) -> Any:
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        empty = {name for name in SENT_BACK if not message.get(name)}
        kept = {name: value for name, value in message.items() if name not in {*empty, "parsed"}}
        return refusal_as_text(kept, "text")


class Text(StrictModel):
    type: Literal["text"]


class AnyObject(StrictModel):
    type: Literal["json_object"]


class Function(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(StrictModel):
    """A function that an answer may call."""

    type: FunctionOnly
    function: Function


def as_chat_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function of the Responses API, which has its fields beside `type`, as chat completions have it."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


class ChosenName(StrictModel):
    name: ToolName


class ChosenTool(StrictModel):
    """The function that the answer must call."""

    type: FunctionOnly
    function: ChosenName


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SampledText(StrictModel):
    """The fields that affect the response of chat and of text completions alike."""

    model: str
    temperature: Temperature = None
    top_p: TopP = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = None
    seed: Seed = None
    # Only vLLM's server has these three; models that transformers serves refuse them.
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: LogitBias = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' needs 'stream' to be true")
        return self


class Chat(SampledText):
    """The fields that affect the response. api/resources/chat.py accepts or rejects all others."""

    # It ends at the first mistake: 256 empty objects in each of 2048 messages would become a million complaints.
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    response_format: Annotated[Text | AnyObject | ResponseFormat, Field(discriminator="type")] | None = None
    # By the chat template's own switch, or else by a limit of the thought; no effect on a model that does not reason.
    reasoning_effort: ReasoningEffort = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("text")]
            | Annotated[ChosenTool, Tag("object")],
            TEXT_OR_OBJECT,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if isinstance(self.tool_choice, ChosenTool):
            chosen = self.tool_choice.function.name
            if chosen not in {tool.function.name for tool in self.tools or ()}:
                raise ValueError(f"'tool_choice' names {chosen}, which is not in 'tools'")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("'tool_choice' is 'required', and there are no 'tools'")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs' to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("'max_tokens' and 'max_completion_tokens' are the same; give one of them")
        return self

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def response_schema(self) -> str:
        """The schema to enforce, in the format of the samplers; "" for free text."""
        wanted = self.response_format
        if isinstance(wanted, ResponseFormat):
            return response_schema(wanted.json_schema.schema_)
        return response_schema({"type": "object"}) if isinstance(wanted, AnyObject) else ""


class Adapter(StrictModel):
    """The weights to apply to the base model, by the hash of their manifest, which is unique to them."""

    prefix: str
    manifest_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    # They are all weights of a model, to use in place of the base model's.
    is_whole: bool = False

    @classmethod
    def of(cls, prefix: str, manifest: bytes) -> "Adapter":
        """The adapter of a checkpoint, by the content of its manifest."""
        return cls(
            prefix=prefix, manifest_sha256=sha256(manifest).hexdigest(), is_whole=is_whole_model(manifest)
        )


class Served(StrictModel):
    """The resolved model name. Without it the name is that of a base model."""

    base_model: str
    adapter: Adapter | None = None
    # Of a preview: they override the model's own.
    chat_template: chat_templates.Name | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    thinking_budget: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """The JSON for the inference server, without fields that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class InternalRequest(StrictModel):
    """The fields of every request to the inference server."""

    model: str
    regraft: Served | None = None

    @property
    def served(self) -> Served:
        return self.regraft or Served(base_model=self.model)


class InternalChat(Chat, InternalRequest):
    """The request for the inference server."""


MAX_PROMPTS = 128
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=2**20, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class TextCompletion(SampledText):
    """A text completion: a prompt without a chat template. Only vLLM's server has it."""

    prompt: str | Texts | Tokens | TokenLists
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _few_answers(self) -> Self:
        if self.answers > MAX_CHOICES:
            raise ValueError(f"asks for {self.answers} answers, and {MAX_CHOICES} are accepted at once")
        return self

    @property
    def answers(self) -> int:
        many = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return (len(self.prompt) if many else 1) * (self.n or 1)


class InternalCompletion(TextCompletion, InternalRequest):
    """The request for the inference server, with more for teachers than the public API has."""

    logprobs: TopLogprobs = None
    return_tokens_as_token_ids: bool = False


def token_usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """The counts of tokens of an answer, with the details that OpenAI's always have."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def envelope(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape. All errors of the inference server pass here; engines name files in theirs."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": hide_addresses(message), "type": kind, "param": param, "code": code}}
