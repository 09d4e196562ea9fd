"""Ollama's Modelfile for an export: the weights, the chat template in Ollama's language, and where answers end.

Ollama's templates are Go's, and no program translates Jinja into them. But some chat templates put fixed texts around
each message, and rendering a few chats shows these texts. A template that does more is left out, with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from core.chat_templates import reads_clock
from worker.refusals import first_line
from worker.serving.gguf_vocabulary import chat_template_of

Message = dict[str, Any]
# Messages, whether an answer follows, and the tools.
Render = Callable[[Sequence[Message], bool, Sequence[Any] | None], str]

_SYSTEM, _USER, _ASSISTANT, _TOOL, _SECOND = (
    *("Ssystemtext", "Uusertext", "Aassistanttext", "Ttooltext", "Vsecondtext"),
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
TOOLS_DESCRIBED = "the chat template describes tools or their calls"
_CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


class NotWritten(Exception):
    """The chat template cannot be written in Ollama's language. The message is the reason."""


@dataclass(frozen=True)
class FixedTexts:
    """The texts around the messages of a chat.

    Args:
        opening: before the answer. It may differ from the text before earlier answers, as where it closes a thought.
        default: in place of a system message, in a chat that begins with another.
        trims: the chat template removes spaces at both ends of messages. Ollama's language cannot.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    tool: tuple[str, str]
    opening: str
    default: str
    trims: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat, as `as_go` describes it."""
        around = self._by_role()
        texts = [str(message["content"]).join(around[message["role"]]) for message in messages]
        head = "" if messages[0]["role"] == "system" else self.default
        return "".join([head, *texts, self.opening])

    def as_go(self) -> str:
        """The same as a template of Ollama."""
        branches = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self._by_role().items()
        )
        head = (
            f'{{{{ if ne (index .Messages 0).Role "system" }}}}{self.default}{{{{ end }}}}'
            if self.default
            else ""
        )
        return f"{head}{{{{ range .Messages }}}}{{{{ {branches}{{{{ end }}}}{{{{ end }}}}{self.opening}"

    def is_literal(self) -> bool:
        """Whether neither Go nor the Modelfile reads a part of the texts as its own syntax."""
        texts = [*(text for pair in self._by_role().values() for text in pair), self.opening, self.default]
        is_plain = all("{{" not in text and '"""' not in text and not text.endswith("{") for text in texts)
        return is_plain and not self.opening.endswith('"')

    def _by_role(self) -> dict[str, tuple[str, str]]:
        return {"system": self.system, "user": self.user, "assistant": self.assistant, "tool": self.tool}


@dataclass(frozen=True)
class Modelfile:
    """The text of a Modelfile, and why it has no TEMPLATE ("" if it has one)."""

    text: str
    missing_template: str


def modelfile_of(
    tokenizer: PreTrainedTokenizerBase, file: str, *, context: int, temperature: float
) -> Modelfile:
    """Describe a whole model for Ollama.

    Args:
        file: the GGUF file of the export.
        context: tokens of prompt and answer.
    """
    lines, ends, reason = [f"FROM ./{file}"], [tokenizer.eos_token], ""
    try:
        texts = fixed_texts(renderer(tokenizer))
        ends.append(texts.assistant[1].strip())
        lines += [
            *(
                ["# The chat template of the job removes spaces around messages. This one does not."]
                * texts.trims
            ),
            f'TEMPLATE """{texts.as_go()}"""',
        ]
    except NotWritten as cause:
        reason = str(cause)
        lines += [
            f"# No TEMPLATE: {reason}.",
            "# Ollama may send the raw text of messages. Use llama-server --jinja, which renders the GGUF file's own",
            "# chat template.",
        ]
    lines += [f'PARAMETER stop "{end}"' for end in dict.fromkeys(ends) if end and '"' not in end]
    lines += [f"PARAMETER num_ctx {context}", f"PARAMETER temperature {temperature:g}"]
    return Modelfile("\n".join(lines) + "\n", reason)


def fixed_texts(render: Render) -> FixedTexts:
    """The texts around messages.

    Raises:
        NotWritten: the chat template does more than to put texts around messages.
    """
    texts = _read(render)
    if not texts.is_literal():
        raise NotWritten("the chat template has texts that are syntax in Ollama's language")
    if _differs(texts, render, _plain_chats()):
        raise NotWritten("the chat template does more than to put texts around messages")
    if _differs(texts, render, [_chat_with_thoughts()]):
        raise NotWritten("the chat template changes earlier thoughts")
    chats = [*_plain_chats(), _chat_with_tools(_ASSISTANT, _TOOL), _chat_with_tools("", "3")]
    if _differs(texts, render, chats[-2:]) or any(
        render(chat, True, _TOOLS) != render(chat, True, None) for chat in chats
    ):
        raise NotWritten(TOOLS_DESCRIBED)
    return _with_spaces(texts, render)


def _with_spaces(texts: FixedTexts, render: Render) -> FixedTexts:
    """The texts, marked if the chat template removes spaces at both ends of messages."""
    chats = [
        [one | {"content": f" \n{one['content']} \n"} for one in chat]
        for chat in [*_plain_chats(), _chat_with_tools("a", "3")]
    ]
    if not _differs(texts, render, chats):
        return texts
    if all(
        texts.render([one | {"content": one["content"].strip()} for one in chat]) == render(chat, True, None)
        for chat in chats
    ):
        return replace(texts, trims=True)
    raise NotWritten("the chat template changes the text of messages")


def _differs(texts: FixedTexts, render: Render, chats: Iterable[list[Message]]) -> bool:
    return any(texts.render(chat) != render(chat, True, None) for chat in chats)


def renderer(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Renders chats without the token before each text, which Ollama adds itself.

    Raises:
        NotWritten: there is no chat template, or its text changes with time. Rendering raises it for a chat that the
            template rejects.
    """
    template = chat_template_of(tokenizer)
    if template is None:
        raise NotWritten("the model has no chat template")
    if reads_clock(template):
        raise NotWritten("the chat template writes the present time")
    begin = tokenizer.bos_token if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else None

    def render(messages: Sequence[Message], is_prompt: bool, tools: Sequence[Any] | None) -> str:
        try:
            text = tokenizer.apply_chat_template(
                list(messages),
                tools=tools and list(tools),
                tokenize=False,
                add_generation_prompt=is_prompt,
            )
        except Exception as cause:  # a template is a program, and may take no system message
            roles = ", ".join(message["role"] for message in messages)
            raise NotWritten(f"the chat template rejects a chat of {roles} ({first_line(cause)})") from cause
        return str(text).removeprefix(begin or "")

    return render


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _plain_chats() -> Iterator[list[Message]]:
    """Chats of each shape, with which the texts must give what the chat template gives."""
    turns = [_message("user", "One\n\ntwo"), _message("assistant", "3 {x}"), _message("user", "Four?")]
    for length in (1, 3):
        yield turns[:length]
        yield [_message("system", "Be\nbrief."), *turns[:length]]


def _chat_with_thoughts() -> list[Message]:
    answer = _message("assistant", "<think>\nThree?\n</think>\n\n3")
    return [
        _message("user", "One"),
        answer,
        _message("user", "Two"),
        answer | {"content": "4", "reasoning_content": "Four?"},
        _message("user", "Three"),
    ]


def _chat_with_tools(answer: str, result: str) -> list[Message]:
    return [
        _message("user", _USER),
        _message("assistant", answer) | {"tool_calls": [_CALL]},
        _message("tool", result) | {"name": "add", "tool_call_id": _CALL["id"]},
        _message("user", _SECOND),
    ]


def _read(render: Render) -> FixedTexts:
    """The texts, from chats whose messages differ."""
    question, answer = _message("user", _USER), _message("assistant", _ASSISTANT)
    head, after_user = _split(render([question], False, None), [_USER])
    *_, closing = _split(render([question, answer], False, None), [_USER, _ASSISTANT])
    chat = [_message("system", _SYSTEM), question, answer, _message("user", _SECOND)]
    start, between, to_answer, to_user, end = _split(
        render(chat, True, None), [_SYSTEM, _USER, _ASSISTANT, _SECOND]
    )
    before_user = _without(to_user, closing, "")
    return FixedTexts(
        system=(start, _without(between, "", before_user)),
        user=(before_user, after_user),
        assistant=(_without(to_answer, after_user, ""), closing),
        tool=_around_tools(render, closing, before_user),
        opening=_without(end, after_user, ""),
        default=_without(head, "", before_user),
    )


def _around_tools(render: Render, closing: str, before_user: str) -> tuple[str, str]:
    """The texts around the result of a tool, after the `closing` of an answer and before a message of the user."""
    text = render(_chat_with_tools(_ASSISTANT, _TOOL), True, None)
    try:
        _, _, before, after, _ = _split(text, [_USER, _ASSISTANT, _TOOL, _SECOND])
        return _without(before, closing, ""), _without(after, "", before_user)
    except NotWritten as cause:
        raise NotWritten(TOOLS_DESCRIBED) from cause


def _without(text: str, start: str, end: str) -> str:
    if not (text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end)):
        raise NotWritten("the texts around a message depend on the other messages")
    return text.removeprefix(start).removesuffix(end)


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """The texts around marks that occur once each and in this order."""
    places = [text.find(mark) for mark in marks]
    if any(text.count(mark) != 1 for mark in marks) or any(one > other for one, other in pairwise(places)):
        raise NotWritten("the chat template leaves out, repeats or moves messages")
    parts = []
    for mark in marks:
        part, _, text = text.partition(mark)
        parts.append(part)
    return [*parts, text]
