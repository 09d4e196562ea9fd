"""format: does the output have the form it should? Not in OpenAI's API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import regex

from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, Sample

Form = Literal["think_answer"]
Credit = Literal["full", "partial"]

# A pattern may try exponentially many ways to match. `re` cannot be told to stop, the `regex` package can, in any
# thread. It unrolls counted repeats, though, before there is anything to stop: ((a{1000}){1000}){1000} is a
# billion nodes. Hence a bound on the product of all counts, too.
MAX_PATTERN = 1000
MAX_TEXT = 200_000
MAX_REPEATS = 10_000
MATCH_SECONDS = 0.5

_COUNTED = re.compile(r"\{(\d*),?(\d*)\}")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_ANSWER = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


class PatternError(ValueError):
    """The text is not a regular expression that we run."""


def checked_pattern(text: str) -> str:
    """The same text; raise PatternError unless it is a regular expression, and one of moderate size."""
    if len(text) > MAX_PATTERN:
        raise PatternError(f"the pattern is longer than {MAX_PATTERN} characters")
    repeats = 1
    for low, high in _COUNTED.findall(text):
        repeats *= max(int(low[:9] or 0), int(high[:9] or 0), 1)
    if repeats > MAX_REPEATS:
        raise PatternError(f"the counted repeats multiply to more than {MAX_REPEATS}")
    try:
        regex.compile(text)
    except (regex.error, RecursionError, OverflowError, ValueError) as mistake:
        raise PatternError(f"not a regular expression: {str(mistake) or type(mistake).__name__}") from None
    return text


@dataclass(frozen=True)
class Pattern:
    """1 if the whole text matches, else 0. A match that takes too long leaves the sample ungraded."""

    name: str
    input: Template
    pattern: str
    type: ClassVar[str] = "format"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            text = self.input.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        if len(text) > MAX_TEXT:
            return _cannot(f"{len(text)} characters are too many, at most {MAX_TEXT}")
        compiled: Any = regex.compile(self.pattern)
        try:
            matches = compiled.fullmatch(text, timeout=MATCH_SECONDS) is not None
        except (TimeoutError, MemoryError):
            return _cannot(f"matching {quoted(self.pattern)} took longer than {MATCH_SECONDS} s")
        return Grade(float(matches), f"{'matches' if matches else 'does not match'} {quoted(self.pattern)}")


@dataclass(frozen=True)
class ThinkAnswer:
    """<think>...</think><answer>...</answer>, each tag once and nothing outside but space.

    Full credit is all or nothing. Partial credit gives a fifth for each tag that is there exactly once, and the
    last fifth for the whole being in form.
    """

    name: str
    input: Template
    credit: Credit = "full"
    type: ClassVar[str] = "format"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            text = self.input.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        wrong = [tag for tag in _TAGS if text.count(tag) != 1]
        in_form = not wrong and _THINK_ANSWER.fullmatch(text) is not None
        reason = _what_is_off(wrong, in_form)
        if self.credit == "full" or in_form:
            return Grade(float(in_form), reason)
        return Grade((len(_TAGS) - len(wrong)) / 5, reason)


def _what_is_off(wrong: list[str], in_form: bool) -> str:
    if wrong:
        return f"not exactly once: {', '.join(wrong)}"
    return "in form" if in_form else "the tags are out of order, or there is text outside of them"


def _cannot(reason: str) -> Grade:
    return Grade(None, reason, ErrorKind.other_error)
