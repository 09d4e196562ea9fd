"""Filters of stored samples, computed on whole columns: 100,000 samples in about 0.1 s (bench/console.py)."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# The columns of texts, and those of JSON, whose values are searched without their keys.
_TEXTS = ("output_text", "output_reasoning", "reason", "output")
_JSON = ("messages", "item")
SEARCHED = (*_TEXTS, *_JSON)


@dataclass(frozen=True)
class Wanted:
    """A filter; None means any. With `grader` the bounds and `graded` apply to that part of a multi grader."""

    line: int | None = None
    group: int | None = None
    finish_reason: str | None = None
    graded: bool | None = None
    error: str | None = None
    grader: str | None = None
    min_score: float | None = None
    max_score: float | None = None
    has_tokens: bool | None = None  # whether the values of its tokens are stored
    text: str | None = None  # part of the prompt, the item, the answer, or what the grader said; in any case

    @property
    def all(self) -> bool:
        return self == Wanted()

    @property
    def columns(self) -> list[str]:
        """The columns that `mask` reads."""
        equal = [
            name for name in ("line", "group", "finish_reason", "error") if getattr(self, name) is not None
        ]
        equal += [] if self.has_tokens is None else ["has_tokens"]
        return equal + (["sub_scores"] if self.grader is not None else ["score"] if self._has_bounds else [])

    @property
    def _has_bounds(self) -> bool:
        return (self.graded, self.min_score, self.max_score) != (None, None, None)

    def mask(self, table: pa.Table) -> Any:
        """Whether each row of a table with `columns` matches, whatever its texts; None: all rows do."""
        return all_of(self._conditions(table))

    def _conditions(self, table: pa.Table) -> Iterator[Any]:
        for name in ("line", "group", "finish_reason", "error"):
            if (value := getattr(self, name)) is not None:
                yield pc.equal(table[name], value)
        if self.has_tokens is not None:
            yield pc.equal(table["has_tokens"], self.has_tokens)
        if self.grader is not None:
            yield pc.is_valid(
                pc.map_lookup(table["sub_scores"], self.grader, "all")
            )  # null where it has no such key
            scores = pc.map_lookup(table["sub_scores"], self.grader, "first")
        elif self._has_bounds:
            scores = table["score"]
        if self.graded is not None:
            yield pc.is_valid(scores) if self.graded else pc.is_null(scores)
        # A missing score is within no bounds.
        if self.min_score is not None:
            yield pc.greater_equal(scores, self.min_score)
        if self.max_score is not None:
            yield pc.less_equal(scores, self.max_score)


def all_of(conditions: Iterator[Any]) -> Any:
    """The conjunction of columns of booleans, of which null counts as false; None: of no conditions."""
    mask = None
    for condition in conditions:
        condition = pc.fill_null(condition, False)
        mask = condition if mask is None else pc.and_(mask, condition)
    return mask


def contains(table: pa.Table, text: str) -> Any:
    """Whether a text of each row of a table with the columns SEARCHED contains `text`, in any case."""
    mask = None
    for name in SEARCHED:
        column = table[name]
        here = (
            _json_contains(column, text)
            if name in _JSON
            else pc.match_substring(column, text, ignore_case=True)
        )
        here = pc.fill_null(here, False)
        mask = here if mask is None else pc.or_(mask, here)
    return mask


def _json_contains(column: Any, text: str) -> Any:
    """Whether a value of the JSON contains `text`. Only the few rows that contain it anywhere are parsed."""
    maybe = pc.fill_null(pc.match_substring_regex(column, _escaped(text), ignore_case=True), False)
    if not pc.any(maybe).as_py():
        return maybe
    prompts = pc.unique(column.filter(maybe))  # the samples of a group share theirs
    wanted = text.casefold()
    found = [
        one
        for one in prompts.to_pylist()
        if any(wanted in value.casefold() for value in _strings(json.loads(one)))
    ]
    return pc.is_in(column, pa.array(found, prompts.type))


@lru_cache
def _escaped(text: str) -> str:
    r"""A pattern for the text as JSON writes it: an umlaut is `\u00fc` there, whose other case is another number."""
    return "".join(
        f"(?:{'|'.join(_in_json(case) for case in dict.fromkeys((one, one.lower(), one.upper())))})"
        if not one.isascii()
        else _in_json(one)
        for one in text
    )


def _in_json(text: str) -> str:
    return re.escape(json.dumps(text)[1:-1])


def _strings(value: Any) -> Iterator[str]:
    """The texts and numbers of a JSON value, without the keys of its objects and the roles of messages."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += (below for key, below in value.items() if key != "role")
        elif isinstance(value, list):
            left += value
        elif value is not None:
            yield str(value)
