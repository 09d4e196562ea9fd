"""Find the format of a model's reasoning in its chat template. No torch and no transformers: the API reads it too.

A reasoning model writes a thought and then its answer, with tags between them that its family chose: `<think>` and
`</think>`, or the channels of gpt-oss. `find_format` finds the tags and `find_switches` the switches by rendering
conversations, so a new family needs no entry in a list of models.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from core import chat_templates

# Parts of the probing conversation. Templates may trim or split texts, but none looks for these words.
QUESTION, _THOUGHT, _ANSWER = "Question7Q", "Thought7Q", "Answer7Q"
# Tags of families whose templates only remove earlier thoughts, and never render one.
_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
KNOWN_TAGS = tuple(tag for pair in _PAIRS for tag in pair)
_LAST_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_TOGGLES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Format:
    """The tags around a thought."""

    start: str  # opens a thought
    end: str  # the answer begins after the first of these
    closing: str  # the text that closes a thought; ends with `end`
    opened: bool  # the prompt ends within a thought, so the model does not write `start`
    off: bool = False  # the prompt ends behind a closed thought, so all is answer


@dataclass(frozen=True)
class Switches:
    """The arguments of the chat template that control reasoning."""

    toggle: str | None = None  # the name of a boolean one
    efforts: tuple[str, ...] = ()  # the values of `reasoning_effort`, if the template reads it


Render = Callable[..., str]


def find_format(render: Render, template: str) -> Format | None:
    """Find the tags around a thought; None if the model does not reason.

    Raises:
        TemplateError, ValueError, TypeError: the template rejects the conversations.
    """
    # With our own templates, graders read the whole output: r1_zero rewards its tags.
    if any(chat_templates.text_of(name) in template for name in chat_templates.NAMES):
        return None
    return _rendered_format(render) or _known_format(render, template)


def _rendered_format(render: Render) -> Format | None:
    """Read the tags off a conversation whose last message has a thought."""
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    # Some templates render thoughts only if thinking is on.
    for arguments in ({}, {"enable_thinking": True}, {"thinking": True}):
        whole = render({"role": "assistant", "content": _ANSWER, **thought}, **arguments)
        before, found, after = whole.partition(_THOUGHT)
        between, answered, _ = after.partition(_ANSWER)
        if found and answered:
            break
    else:
        return None
    prompt = render(prompt=True, **arguments)
    start = before[len(_common(before, prompt)) :].strip() or _last_tag(before)
    plain = render({"role": "assistant", "content": _ANSWER}, **arguments).partition(_ANSWER)[0]
    header = plain[len(_common(plain, prompt)) :]
    closing = between.strip()
    end = _common(between[::-1], header[::-1])[::-1].strip() or closing
    if not start or not end:
        return None
    # A header before every answer, as in gpt-oss: what comes before it is not the answer.
    headed = end in header and start not in header
    return Format(
        start, end, closing, opened=_opens(render, start, end) or headed, off=_closes(render, start, end)
    )


def _known_format(render: Render, template: str) -> Format | None:
    """Find the tags of a template that opens a thought, or removes earlier ones, and never renders one."""
    opening = _last_tag(_suffix(render))
    pairs = [(opening, _mirrored(opening))] if opening else []
    for start, end in (*pairs, *_PAIRS):
        if end in template:
            return Format(start, end, end, opened=_opens(render, start, end), off=_closes(render, start, end))
    return None


def _suffix(render: Render) -> str:
    """The end of a prompt for an answer, after the conversation."""
    return render(prompt=True).rpartition(QUESTION)[2]


def _opens(render: Render, start: str, end: str) -> bool:
    suffix = _suffix(render)
    return suffix.rfind(start) > suffix.rfind(end)


def _closes(render: Render, start: str, end: str) -> bool:
    suffix = _suffix(render)
    return suffix.rfind(end) > suffix.rfind(start)


def _common(text: str, other: str) -> str:
    """The longest common beginning."""
    length = next(
        (at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    return text[:length]


def _last_tag(text: str) -> str:
    found = _LAST_TAG.search(text)
    return found[1] if found else ""


def _mirrored(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


def find_switches(render: Render) -> Switches:
    """Compare renderings with and without each switch: a template that does not read one renders the same."""

    def prompt(**arguments: Any) -> str | None:
        try:
            return render(prompt=True, **arguments)
        except (TemplateError, ValueError, TypeError):
            return None  # a template may reject a value

    toggle = next(
        (name for name in _TOGGLES if prompt(**{name: True}) != prompt(**{name: False})),
        None,
    )
    rendered = {effort: prompt(reasoning_effort=effort) for effort in ("low", "medium", "high", "xhigh")}
    if len(set(rendered.values())) == 1:
        return Switches(toggle)
    return Switches(toggle, tuple(effort for effort, text in rendered.items() if text is not None))
