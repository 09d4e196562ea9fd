"""format: check the format of the output. An extension of OpenAI's API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import regex

from graders.deadline import standing_still
from graders.hazards import table
from graders.hazards.pool import HazardFailed, HazardPool, LimitExceeded, shared
from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, Sample

Form = Literal["think_answer"]
Credit = Literal["full", "partial"]

MAX_PATTERN = 1000

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def problems(*patterns: str) -> list[str]:
    """Return the error of each pattern, or "" if it is valid. Runs only in the hazard pool."""
    found = [match(pattern, "") for pattern in patterns]
    return [f"not a regular expression: {one}" if isinstance(one, str) else "" for one in found]


def match(pattern: str, text: str) -> bool | str:
    """Return whether the whole text matches, or the error of the pattern. Runs only in the hazard pool.

    Matching can take exponential time, and counted repeats are unrolled: ((a{1000}){1000}){1000} has a billion nodes.
    """
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, ValueError) as mistake:
        return str(mistake) or type(mistake).__name__
    return compiled.fullmatch(text) is not None


@dataclass(frozen=True)
class Pattern:
    """1 if the whole text matches, else 0. A match that takes too long leaves the sample ungraded."""

    name: str
    input: Template
    pattern: str
    pool: HazardPool = field(default_factory=shared, repr=False, compare=False)
    type: ClassVar[str] = "format"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            text = self.input.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        try:
            with standing_still():  # each call has its own limit, from its start
                matches = await asyncio.wrap_future(self.pool.submit(table.PATTERN, self.pattern, text))
        except LimitExceeded as exceeded:
            return _cannot(f"cannot match {quoted(self.pattern)}: {exceeded}")
        except HazardFailed as broken:
            return _cannot(str(broken))
        if isinstance(matches, str):
            return _cannot(f"{quoted(self.pattern)} is not a regular expression: {matches}")
        return Grade(float(matches), f"{'matches' if matches else 'does not match'} {quoted(self.pattern)}")


@dataclass(frozen=True)
class ThinkAnswer:
    """<think>...</think><answer>...</answer>, each tag once, with only white space outside.

    Full credit is 0 or 1. Partial credit gives 0.2 for each tag that occurs exactly once, and 0.2 for the correct
    format of the whole.
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
        in_form = not wrong and _is_in_order(text)
        reason = _what_is_off(wrong, in_form)
        if self.credit == "full" or in_form:
            return Grade(float(in_form), reason)
        return Grade((len(_TAGS) - len(wrong)) / 5, reason)


def _is_in_order(text: str) -> bool:
    """Return whether the tags, each of which occurs once, are in order with only white space outside."""
    parts: list[str] = []
    rest = text
    for tag in _TAGS:
        part, found, rest = rest.partition(tag)
        if not found:
            return False
        parts.append(part)
    before, _, between, _ = parts
    return not (before + between + rest).strip()


def _what_is_off(wrong: list[str], in_form: bool) -> str:
    if wrong:
        return f"not exactly once: {', '.join(wrong)}"
    return "in form" if in_form else "the tags are out of order, or there is text outside of them"


def _cannot(reason: str) -> Grade:
    return Grade(None, reason, ErrorKind.other_error)
