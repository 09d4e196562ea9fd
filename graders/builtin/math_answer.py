"""math: 1 if the final answer is mathematically equal to the reference, else 0. An extension of OpenAI's API.

The final answer is the content of the last \\boxed{...}, else of the last <answer>...</answer>, else the last number.
0.5, 1/2 and \\frac{1}{2} are equal. Units and text around a number are ignored.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from graders.final_answers import final_answer, marked_answer
from graders.hazards import table
from graders.hazards.pool import HazardFailed, HazardPool, LimitExceeded, shared
from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, Sample

MAX_LENGTH = 1000

# This module parses these texts itself, with the same result as math-verify at 1 % of its cost.
_INTEGER = re.compile(r"-?\d{1,12}", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,9}\.\d{1,6}", re.ASCII)
_FRACTION = re.compile(
    r"(-?)(?:\\d?frac\{(\d{1,12})\}\{([1-9]\d{0,11})\}|(\d{1,12})/([1-9]\d{0,11}))", re.ASCII
)


@dataclass(frozen=True)
class MathAnswer:
    """Compare final answers. An unparsable reference leaves the sample ungraded; an unparsable answer scores 0."""

    name: str
    input: Template
    reference: Template
    pool: HazardPool = field(default_factory=shared, repr=False, compare=False)
    type: ClassVar[str] = "math"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        return await judge(got, want, self.pool)


async def judge(output: str, reference: str, pool: HazardPool) -> Grade:
    """Grade a whole output against a reference, which may be a bare answer or have the same markup."""
    marked = marked_answer(reference)
    want, answer = reference if marked is None else marked, final_answer(output)
    # An answer that is too long counts as missing.
    readable = answer if answer is not None and len(answer) <= MAX_LENGTH else None
    try:
        equal = None
        if want.strip() and len(want) <= MAX_LENGTH:
            equal = await asyncio.wrap_future(pool.submit(table.MATH, want, readable))
    except LimitExceeded as exceeded:
        what = f"cannot compare {quoted(answer or '')} with the reference {quoted(reference)}"
        return Grade(None, f"{what}: {exceeded}", ErrorKind.other_error)
    except HazardFailed as broken:
        return Grade(None, str(broken), ErrorKind.other_error)
    if equal is None:
        reason = f"the reference {quoted(reference)} cannot be read as mathematics"
        return Grade(None, reason, ErrorKind.invalid_variable_error)
    if answer is None:
        return Grade(0.0, f"no final answer in {quoted(output)}")
    return Grade(float(equal), f"expected {quoted(reference)}, got {quoted(answer)}")


def compare(reference: str, answer: str | None) -> bool | None:
    """Return whether both are mathematically equal; None if the reference cannot be parsed. Runs in the hazard pool."""
    want = _parsed(reference)
    if not want:
        return None
    got = [] if answer is None else _parsed(answer)
    if not got:
        return False
    import math_verify.grader

    math_verify.grader.TIMEOUT_WARNING_SHOWN = (
        True  # silences its warning about time limits, which the pool enforces
    )
    return bool(math_verify.verify(want, got, timeout_seconds=None))


@lru_cache(maxsize=256)  # the answers of a group share one reference, and many of them are equal
def _parsed(answer: str) -> list[Any]:
    """Parse a text as mathematics; empty if it cannot be parsed."""
    import math_verify.parser  # takes three seconds, once per process of the pool

    text = answer.replace("$", "").strip()
    plain = plain_number(text)
    if plain is not None:
        return [plain]
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    kinds = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    return list(math_verify.parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None))


def plain_number(text: str) -> Any:
    """Convert an integer, a fraction of integers or a decimal to a SymPy number. Returns None for any other text."""
    import sympy

    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    if fraction := _FRACTION.fullmatch(text):
        sign, a, b, c, d = fraction.groups()
        return sympy.Rational(int(sign + (a or c)), int(b or d))
    if _DECIMAL.fullmatch(text) and text != "0.5":  # math-verify parses 0.5 as 1/2
        return sympy.Float(text)
    return None
