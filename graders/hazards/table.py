"""The functions of the hazard pool, and the limits of one call of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hazard:
    """A trusted function whose time or memory depends on untrusted input, and the limits of one call.

    Its arguments and its result are JSON. Only the pool's processes import its module.
    """

    name: str
    function: str  # "module:function"
    cpu_s: float = 2.0
    memory: int = 1 << 30  # address space in bytes, including the interpreter and the libraries
    batch: int = 32  # calls per fork
    turn_s: float = 2.0  # wall-clock time after which a fork starts no other call
    warm_up: tuple[tuple[Any, ...], ...] = ()  # arguments of calls that run before the first fork
    slack_s: float = 30.0  # wall-clock time beyond `cpu_s`: on a busy machine a call may wait for a core

    @property
    def wall_s(self) -> float:
        return self.cpu_s + self.slack_s


MATH = Hazard("math", "graders.builtin.math_answer:compare", warm_up=(("x^{2}", "\\frac{1}{2}"),))

# JSON schemas of `response_format`. llguidance allocates by a schema's counts, and aborts when allocation fails.
SCHEMA = Hazard("schema", "core.response_format:problem", batch=4, warm_up=(('{"type": "object"}',),))

# Regular expressions of format graders, compiled and matched.
PATTERN = Hazard("pattern", "graders.builtin.format_check:match", warm_up=(("a+", "a"),))

# All regular expressions of a grader, compiled in a single call before the grader is accepted.
PATTERNS = Hazard("patterns", "graders.builtin.format_check:problems", batch=1, warm_up=(("a+",),))

# text_similarity on long texts: rouge_l of 4,000 words each takes three seconds.
SIMILARITY = Hazard(
    "similarity",
    "graders.builtin.text_similarity:measure",
    cpu_s=5.0,
    batch=8,
    warm_up=tuple((metric, "a b", "a c") for metric in ("bleu", "gleu", "meteor", "rouge_l")),
)

# JSON schemas of evals' items, and the items themselves: a `pattern` may backtrack for long.
ITEM_SCHEMA = Hazard("item_schema", "core.evals.schemas:schema_problem", warm_up=(('{"type": "object"}',),))
ITEMS = Hazard(
    "items", "core.evals.schemas:item_problems", cpu_s=5.0, batch=8, warm_up=(('{"type": "object"}', "[{}]"),)
)
