"""Checks that run user input in the hazard pool. They block, so do not call them in an event loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from graders import complaints
from graders.hazards import table
from graders.hazards.pool import LimitExceeded, shared
from graders.spec import FormatSpec, GraderSpec, InvalidGrader, parts_of


def check_patterns(spec: GraderSpec, param: str = "grader") -> None:
    """Compile all regular expressions of a spec, within the limits of a single call to the hazard pool.

    Raises:
        InvalidGrader: A regular expression is invalid, or compiling them exceeds the time or memory limit.
        HazardFailed: The hazard pool failed.
    """
    patterns = dict(_patterns(spec, param))
    if not patterns:
        return
    try:
        found = shared().submit(table.PATTERNS, *patterns.values()).result()
    except LimitExceeded as exceeded:
        many = "the patterns of this grader are together" if len(patterns) > 1 else "the pattern is"
        found = [f"{many} too expensive: {exceeded}"]
    for where, why in zip(patterns, found, strict=False):
        if why:
            mistake = complaints.invalid_value(where, f"{why}.")
            raise InvalidGrader(mistake.message, mistake.param, mistake.code)


def item_schema_problem(schema: Mapping[str, Any]) -> str:
    """Return a predicate that says why a JSON schema cannot be used; "" if it can.

    Raises:
        HazardFailed: The hazard pool failed.
    """
    try:
        problem: str = shared().submit(table.ITEM_SCHEMA, json.dumps(schema)).result()
    except LimitExceeded as exceeded:
        return f"is too expensive to check: {exceeded}"
    return problem and f"is not a JSON schema: {problem}"


def has_patterns(spec: GraderSpec) -> bool:
    """Return whether `check_patterns` uses the hazard pool."""
    return any(_patterns(spec, ""))


def _patterns(spec: GraderSpec, param: str) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each pattern of a spec."""
    for key, sub in parts_of(spec).items():
        yield from _patterns(sub, f"{param}.graders.{key}")
    if isinstance(spec, FormatSpec) and spec.pattern is not None:
        yield f"{param}.pattern", spec.pattern
