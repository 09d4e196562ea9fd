"""math: is the final answer, as mathematics, the reference? 1 if so, else 0. Not in OpenAI's API.

The final answer is what stands in the last \\boxed{...}, else in the last <answer>...</answer>, else the last
number. A half, 0.5, 1/2 and \\frac{1}{2} are one answer. Units and text around a number are overlooked.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, Sample

# math-verify's own time limit is a signal, which only a main thread can get. So nothing goes in that takes long:
# these bounds are on the text, before a computer algebra system sees it.
MAX_LENGTH = 200
MAX_NESTING = 6
MAX_POWER = 300  # the product of all numbers in exponents; 12 where there are variables, for (x+y)^12 expands
MAX_SYMBOLIC_POWER = 12

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
# Sums, integrals and the like are questions, not answers; factorials and binomials of moderate numbers overflow.
_REFUSED = re.compile(
    r"!|\\(?:sum|prod|int|iint|oint|lim|binom|dbinom|tbinom|choose|gamma|Gamma|exp|uparrow|operatorname|d?frac\s*\{\s*d)"
    r"(?![a-zA-Z])"
)
# The parser and its caches are not said to be safe for several threads at once.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class MathAnswer:
    """A reference that is no mathematics leaves the sample ungraded; an answer that is none scores 0."""

    name: str
    input: Template
    reference: Template
    type: ClassVar[str] = "math"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        return judge(got, want)


def judge(output: str, reference: str) -> Grade:
    """The grade of a whole output against a reference, which may be a bare answer or be marked up like one."""
    marked = _marked_answer(reference)
    want = _parsed(reference if marked is None else marked)
    if not want:
        reason = f"the reference {quoted(reference)} cannot be read as mathematics"
        return Grade(None, reason, ErrorKind.invalid_variable_error)
    answer = final_answer(output)
    if answer is None:
        return Grade(0.0, f"no final answer in {quoted(output)}")
    return Grade(float(_equal(want, _parsed(answer))), f"expected {quoted(reference)}, got {quoted(answer)}")


def final_answer(text: str) -> str | None:
    """What the text gives as its answer, as written, or None."""
    marked = _marked_answer(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _marked_answer(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = _ANSWER.findall(text)
    return tagged[-1].strip() if tagged else None


def _last_boxed(text: str) -> str | None:
    opening = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if opening < 0:
        return None
    start = text.index("{", opening) + 1
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at].strip()
    return None  # cut off in the middle


def _parsed(answer: str) -> list[Any]:
    """Its readings as mathematics; none if it has none, or if working one out might take long."""
    if not _is_quick(answer):
        return []
    import math_verify.parser  # three seconds, paid by who uses it

    math_verify.parser.TIMEOUT_WARNING_SHOWN = True  # it warns of the bounds that we keep above
    kinds = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    text = answer.replace("$", "").strip()
    with _one_at_a_time:
        return list(math_verify.parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None))


def _equal(want: list[Any], got: list[Any]) -> bool:
    if not got:
        return False
    import math_verify.grader

    math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    with _one_at_a_time:
        return bool(math_verify.verify(want, got, timeout_seconds=None))


def _is_quick(answer: str) -> bool:
    text = answer.replace("**", "^")
    if not text.strip() or len(text) > MAX_LENGTH or _REFUSED.search(text) or _nesting(text) > MAX_NESTING:
        return False
    power = 1
    for exponent in _exponents(text):
        if "^" in exponent:  # a tower
            return False
        for digits in re.findall(r"\d+", exponent):
            power *= max(1, int(digits[:6]))
    has_variables = re.search(r"[a-zA-Z]", _COMMAND.sub("", text)) is not None
    return power <= (MAX_SYMBOLIC_POWER if has_variables else MAX_POWER)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _exponents(text: str) -> list[str]:
    """What follows each "^": a bracketed group, or all up to the next space or operator."""
    found = []
    for match in re.finditer(r"\^\s*[-+]?\s*", text):
        at = match.end()
        if at < len(text) and text[at] in "({[":
            found.append(_group(text, at))
        else:
            tail = re.match(r"\\?[a-zA-Z0-9.]*(?:\s*[\^{(].*)?", text[at:])
            found.append(tail[0] if tail else "")
    return found


def _group(text: str, start: int) -> str:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            # x^{2}^{3} and x^(2)^3 are towers as well
            more = re.match(r"\s*\^.*", text[at + 1 :])
            return text[start : at + 1] + (more[0] if more else "")
    return text[start:]
