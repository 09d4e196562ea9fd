"""Prompts of eval runs: messages with templates over `item`, and samples that rows bring along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graders import complaints
from graders.spec import (
    MAX_REFERENCES,
    InputAudio,
    InputImage,
    InvalidGrader,
    MessageSpec,
    count_references,
)
from graders.template import (
    MAX_RENDERED,
    MissingPath,
    Path,
    Reference,
    RenderedTooLarge,
    Template,
    dotted,
    quoted,
    resolve,
)
from graders.types import Item, Sample

MAX_MESSAGES = 100
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]

_MESSAGES = TypeAdapter(list[MessageSpec])


class InvalidTrajectory(ValueError):
    """The value that `item_reference` names is not a list of messages."""


class PromptTooLarge(RenderedTooLarge):
    """The messages of a row are too large together."""

    def __str__(self) -> str:
        return f"the messages have more than {MAX_RENDERED} characters together"


@dataclass(frozen=True)
class PromptTemplate:
    """Messages whose texts are templates, or a reference to messages in the row."""

    messages: tuple[tuple[str, tuple[Template, ...]], ...] = ()
    reference: Path | None = None

    @property
    def item_paths(self) -> list[Path]:
        """The distinct paths that a prompt reads from the row."""
        if self.reference is not None:
            return [self.reference]
        texts = (template for _, parts in self.messages for template in parts)
        return list(dict.fromkeys(path for template in texts for path in template.item_paths))

    def render(self, item: Item) -> list[Message]:
        """The messages for one row.

        Raises:
            RenderError: the row lacks a value, or all texts together have more than MAX_RENDERED characters.
            InvalidTrajectory: the referenced value is not a list of messages.
        """
        if self.reference is not None:
            messages = self._referenced(item)
            if sum(map(_length, messages)) > MAX_RENDERED:
                raise PromptTooLarge
            return messages
        nothing = Sample("")
        rendered: list[Message] = []
        room = MAX_RENDERED
        for role, parts in self.messages:
            texts = []
            for template in parts:
                texts.append(template.render(nothing, item))
                room -= len(texts[-1])
                if room < 0:
                    raise PromptTooLarge
            content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
            rendered.append({"role": role, "content": content})
        return rendered

    def problem(self, item: Item) -> str:
        """The reason why this row has no prompt; "" if it has one. Renders no text, whose size is unbounded."""
        try:
            for path in self.item_paths:
                resolve(item, path)
            if self.reference is not None:
                self._referenced(item)
        except MissingPath as missing:
            return f"the input messages read {{{{{missing.path}}}}}, which this row does not have"
        except InvalidTrajectory as cause:
            return str(cause)
        return ""

    def _referenced(self, item: Item) -> list[Message]:
        assert self.reference is not None
        return _trajectory(resolve(item, self.reference), dotted("item", self.reference))


def parse_input_messages(raw: Mapping[str, Any], param: str) -> PromptTemplate:
    """Parse `input_messages`: {"type": "template", "template": [...]} or {"type": "item_reference", ...}.

    Raises:
        InvalidGrader: it is invalid; names the parameter.
    """
    field = _kind(raw, f"{param}.type")
    for key in raw:
        if key not in ("type", field):
            raise InvalidGrader(f"Unknown parameter: '{param}.{key}'.", f"{param}.{key}", "unknown_parameter")
    if field not in raw:
        raise _refused(complaints.missing(f"{param}.{field}"))
    where = f"{param}.{field}"
    return _reference(raw[field], where) if field == "item_reference" else _template(raw[field], where)


def _kind(raw: Mapping[str, Any], where: str) -> str:
    if "type" not in raw:
        raise _refused(complaints.missing(where))
    kind = raw["type"]
    if not isinstance(kind, str):
        raise _refused(complaints.wrong_type(where, "'template' or 'item_reference'", kind))
    if kind not in ("template", "item_reference"):
        raise _refused(
            complaints.invalid_value(where, f"{quoted(kind)}. Supported: 'template', 'item_reference'.")
        )
    return kind


def _reference(text: object, where: str) -> PromptTemplate:
    if not isinstance(text, str):
        raise _refused(complaints.wrong_type(where, "a string", text))
    try:
        parts = Template.parse("{{" + text.strip().removeprefix("{{").removesuffix("}}") + "}}").parts
    except ValueError as invalid:
        raise _refused(complaints.invalid_value(where, f"{invalid}.")) from None
    match parts:
        case (Reference("item", (_, *_) as path),):
            return PromptTemplate(reference=tuple(path))
    raise _refused(complaints.invalid_value(where, "expected a field of the row, such as 'item.messages'."))


def _template(raw: object, where: str) -> PromptTemplate:
    if not isinstance(raw, list):
        raise _refused(complaints.wrong_type(where, "an array of messages", raw))
    if not raw:
        raise _refused(complaints.invalid_value(where, "expected at least one message."))
    if len(raw) > MAX_MESSAGES:
        raise _refused(complaints.invalid_value(where, f"at most {MAX_MESSAGES} messages are supported."))
    if count_references(raw) > MAX_REFERENCES:
        text = f"its templates may have at most {MAX_REFERENCES} references in all."
        raise _refused(complaints.invalid_value(where, text))
    try:
        messages = _MESSAGES.validate_python(raw)
    except ValidationError as invalid:
        at, about = complaints.first_of(invalid.errors(), raw, where)
        raise _refused(complaints.explain(at, about)) from None
    refuse_media(messages, where)
    parsed = []
    for number, message in enumerate(messages):
        templates = tuple(Template.parse(text) for text in message.templates)
        if any(isinstance(p, Reference) and p.namespace == "sample" for t in templates for p in t.parts):
            text = "the prompt cannot read 'sample', which it produces."
            raise _refused(complaints.invalid_value(f"{where}[{number}].content", text))
        parsed.append((message.role, templates))
    return PromptTemplate(messages=tuple(parsed))


def refuse_media(messages: Sequence[MessageSpec], where: str) -> None:
    """Raise InvalidGrader for images and audio in messages to a model of this service, which reads text only.

    Args:
        where: the path of the messages in the request.
    """
    for number, message in enumerate(messages):
        for part in message.parts:
            if isinstance(part, InputImage | InputAudio):
                what = "images" if isinstance(part, InputImage) else "audio"
                text = f"{what} ('{part.type}') are not supported by this server, which reads text only."
                raise _refused(complaints.invalid_value(f"{where}[{number}].content", text))


def _refused(mistake: complaints.Mistake) -> InvalidGrader:
    return InvalidGrader(mistake.message, mistake.param, mistake.code)


def _trajectory(value: object, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InvalidTrajectory(f"{name} must be a list of messages")
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(value)]


def _message(message: object, name: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise InvalidTrajectory(f"{name} must be a message whose role is one of {', '.join(ROLES)}")
    content = message.get("content")
    calls = _calls(message, name)
    if calls and content is None:
        return {"role": message["role"], "content": "", **calls}
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts) or not texts:
            raise InvalidTrajectory(
                f"{name}.content must be text: this server reads neither images nor audio"
            )
        content = [{"type": "text", "text": text} for text in texts]
    elif not isinstance(content, str):
        raise InvalidTrajectory(f"{name}.content must be a string or a list of text parts")
    return {"role": message["role"], "content": content, **calls}


def _calls(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The calls of an assistant's message, or the call that a tool's message answers, whose form the model checks."""
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if message["role"] == "assistant" and isinstance(calls, list) and calls:
        return {"tool_calls": calls}
    if message["role"] != "tool":
        return {}
    if not isinstance(call_id, str) or not call_id:
        raise InvalidTrajectory(f"{name}.tool_call_id is missing: the id of the call whose result this is")
    return {"tool_call_id": call_id}


def _length(message: Message) -> int:
    content = message["content"]
    size = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    return size + (len(json.dumps(calls, ensure_ascii=False)) if (calls := message.get("tool_calls")) else 0)


# Samples of rows.


def sample_problem(raw: Mapping[str, Any]) -> str:
    """The reason why graders cannot read the sample of a row; "" if they can."""
    text = raw.get("output_text")
    if not isinstance(text, str | None):
        return "sample.output_text must be a string"
    if not isinstance(raw.get("output_tools", []), list | None):
        return "sample.output_tools must be an array"
    if text is None and _first_choice(raw) is None and raw.get("output_tools") is None:
        return "sample has neither 'output_text' nor 'choices'"
    return ""


def sample_of(raw: Mapping[str, Any]) -> Sample:
    """The sample of a row that `sample_problem` accepts."""
    message = _first_choice(raw) or {}
    text = raw.get("output_text")
    if text is None:
        content = message.get("content")
        text = content if isinstance(content, str) else ""
    parsed = Sample.from_text(text, str(raw.get("finish_reason") or "stop"), parse_json=True)
    tools = raw.get("output_tools") or message.get("tool_calls") or ()
    return replace(
        parsed,
        output_json=raw["output_json"] if raw.get("output_json") is not None else parsed.output_json,
        output_tools=tuple(tools) if isinstance(tools, Sequence) else (),
    )


def _first_choice(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = raw.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    return message if isinstance(message, Mapping) else None
