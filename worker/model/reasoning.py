"""Split answers by the format of the model's reasoning, which core/reasoning.py finds. No torch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from core.chat_templates import Arguments
from core.reasoning import QUESTION, Format, Switches, find_format, find_switches

log = logging.getLogger(__name__)

Effort = Literal["default", "none", "minimal", "low", "medium", "high", "xhigh", "max"]

# The thought's share of max_completion_tokens, for a template without a switch for the effort.
_BUDGET_SHARES: dict[str, float] = {"minimal": 0.125, "low": 0.25, "medium": 0.5}


@dataclass(frozen=True)
class Split:
    """An answer in its parts. The answer's own tokens are those from `answer_start` on."""

    text: str  # without the thought and special tokens
    thought: str = ""
    answer_start: int = 0
    thought_tokens: int = 0  # including the tags that the model wrote
    is_cut: bool = False  # the thought has no end, so there is no answer
    forced: int = 0  # tokens before `answer_start` that closed the thought because its budget was spent


class Reasoning:
    """The format of one model, on its tokens."""

    def __init__(self, form: Format, switches: Switches, tokenizer: PreTrainedTokenizerBase) -> None:
        self.form, self.switches, self.tokenizer = form, switches, tokenizer

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        return self._ids(self.form.start)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        return self._ids(self.form.end)

    @cached_property
    def closing_ids(self) -> tuple[int, ...]:
        return self._ids(self.form.closing)

    @cached_property
    def _window(self) -> int:
        # No token of a tag is empty, but a tokenizer may put one between them that shows as nothing.
        return 2 * len(self.form.end)

    def split(self, ids_T: Sequence[int], *, budget: int | None = None) -> Split:
        """Divide the tokens of an answer. `budget`: the thought's, in tokens, with which they were sampled."""
        place = AnswerPart(self)
        for token in ids_T:
            if place.at == "answer":
                break
            place.take(token)
        if place.at == "thought":
            return Split("", self._thought(ids_T), len(ids_T), len(ids_T), is_cut=True)
        if not place.answer_start:
            return Split(self.decode(ids_T))
        at = place.answer_start
        text = (place.overflow + self.decode(ids_T[at:])).lstrip("\n")
        closing = len(self.closing_ids)
        is_forced = (
            budget is not None
            and place.thinking == budget + closing
            and tuple(ids_T[at - closing : at]) == self.closing_ids
        )
        forced = closing if is_forced else 0
        return Split(text, self._thought(ids_T[:at]), at, at, forced=forced)

    def decode(self, ids_T: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids_T), skip_special_tokens=True))

    def raw(self, ids_T: Sequence[int]) -> str:
        """The text with special tokens, because tags often are."""
        return str(self.tokenizer.decode(list(ids_T), skip_special_tokens=False))

    def _thought(self, ids_T: Sequence[int]) -> str:
        form = self.form
        text = self.raw(ids_T).split(form.end)[0].lstrip().removeprefix(form.start)
        lead = form.closing.removesuffix(form.end)
        if lead:
            text = text.removesuffix(lead).replace(lead + form.start, "\n")
        return text.strip()

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


class AnswerPart:
    """Follows one answer token by token: before its thought, in it, or in the answer."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.reasoning = reasoning
        self.at: Literal["undecided", "thought", "answer"] = "undecided"
        if reasoning.form.opened:
            self.at = "thought"
        elif reasoning.form.off:
            self.at = "answer"
        self.ids: list[int] = []  # before the answer
        self._blank = 0  # of them at the start: white space, which is not decoded again for each token
        self.thinking = 0  # tokens since the thought began
        self.answer_start = 0
        self.overflow = ""  # text of the answer in the last token of the tag

    def take(self, token: int) -> None:
        """Take the next token."""
        if self.at == "answer":
            return
        self.ids.append(token)
        if self.at == "thought":
            self.thinking += 1
            self._look_for_end(token)
            return
        written, start = self.reasoning.raw(self.ids[self._blank :]).lstrip(), self.reasoning.form.start
        if not written:
            self._blank = len(self.ids)
        elif written.startswith(start):
            self.at = "thought"
        elif not start.startswith(written):
            self.at = "answer"

    def _look_for_end(self, token: int) -> None:
        reasoning, end = self.reasoning, self.reasoning.form.end
        if len(reasoning.end_ids) == 1:
            found, after = token == reasoning.end_ids[0], ""
        else:
            first = max(len(self.ids) - self.thinking, len(self.ids) - reasoning._window)
            _, tag, after = reasoning.raw(self.ids[first:]).partition(end)
            found = bool(tag)
        if found:
            self.at, self.answer_start, self.overflow = "answer", len(self.ids), after


@dataclass(frozen=True)
class TextParts:
    """The text of an answer in its parts, as far as they are settled."""

    thought: str
    answer: str
    is_answering: bool
    pending: str = ""  # could still become a start tag


def split_text(form: Format | None, text: str, *, is_whole: bool) -> TextParts:
    """Divide the text of an answer, of which more may come unless `is_whole`."""
    if form is None or form.off:
        return TextParts("", text, True)
    body, started = text, form.opened
    stripped = text.lstrip()
    if stripped.startswith(form.start):
        body, started = stripped.removeprefix(form.start), True
    elif not is_whole and form.start.startswith(stripped):
        return TextParts("", "", False, text)
    if not started:
        return TextParts("", text, True)
    thought, ended, answer = body.partition(form.end)
    if not ended and not is_whole:
        thought = _settled(thought, form)
    lead = form.closing.removesuffix(form.end)
    if lead:
        thought = thought.removesuffix(lead).replace(lead + form.start, "\n")
    return TextParts(thought.strip(), answer.lstrip("\n"), bool(ended))


def _settled(thought: str, form: Format) -> str:
    """Without the end that could be the beginning of the closing text, or white space before it."""
    for length in range(min(len(form.closing), len(thought)), 0, -1):
        if form.closing.startswith(thought[-length:]) or form.end.startswith(thought[-length:]):
            return thought[:-length].rstrip()
    return thought.rstrip()


def detect(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> Reasoning | None:
    """Find how the model reasons; None if it does not.

    Args:
        template: Jinja text in place of the tokenizer's own.
    """
    return _detected(tokenizer, template)


@lru_cache(maxsize=32)
def _detected(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Reasoning | None:
    text = template or tokenizer.chat_template
    if not isinstance(text, str):
        return None

    def render(*messages: dict[str, str], prompt: bool = False, **arguments: Any) -> str:
        chat = [{"role": "user", "content": QUESTION}, *messages]
        return str(
            tokenizer.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=prompt, tokenize=False, **arguments
            )
        )

    try:
        form = find_format(render, text)
    except Exception as cause:  # a template is a program; rendering a chat with it says what is wrong
        log.warning("a chat template cannot be rendered: %r", cause)
        return None
    return None if form is None else Reasoning(form, find_switches(render), tokenizer)


@dataclass(frozen=True)
class EffortPlan:
    """What an effort means for one model."""

    arguments: Arguments  # of its chat template
    budget: int | None  # tokens of the thought; None: unlimited


def plan_effort(reasoning: Reasoning, effort: Effort | None, max_completion_tokens: int) -> EffortPlan:
    """Translate OpenAI's `reasoning_effort` to the model's own switches, or else to a budget.

    A model whose template has levels of effort gets its nearest one. Any other is switched on or off, and thinks for
    at most a share of `max_completion_tokens`.
    """
    switches = reasoning.switches
    if effort in (None, "default"):
        return EffortPlan({}, None)
    if effort == "none" and switches.toggle:
        return EffortPlan({switches.toggle: False}, None)
    on: Arguments = {switches.toggle: True} if switches.toggle else {}
    if switches.efforts:
        return EffortPlan({**on, "reasoning_effort": _nearest(effort, switches.efforts)}, None)
    if effort == "none":
        return EffortPlan({}, 0)
    share = _BUDGET_SHARES.get(effort or "")
    return EffortPlan(on, None if share is None else int(share * max_completion_tokens))


def _nearest(effort: str | None, efforts: Sequence[str]) -> str:
    levels: dict[str | None, tuple[str, ...]] = {
        "none": ("low",),
        "minimal": ("low",),
        "high": ("high", "xhigh"),
        "xhigh": ("xhigh", "high"),
        "max": ("xhigh", "high"),
    }
    return next((level for level in levels.get(effort, (str(effort),)) if level in efforts), efforts[0])
