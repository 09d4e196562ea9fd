"""Bodies and parameters of client.graders' stored graders, and golden cases as files have them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from regraft.requests import InvalidRequestFile, Source, read_each, read_grader

PATH = "/regraft/graders"
CASE = (
    'expected an object with "sample", the answer to grade, and "expect", a score or {"min": ..., "max": ...}'
)
# The fields of a case that is added. One that the API returned has an id and a time as well.
FIELDS = {"sample", "item", "expect", "note", "rollout_id"}


def body_of(name: str, grader: Source, note: str) -> dict[str, Any]:
    return {"name": name, "grader": read_grader(grader, name=name), "note": note}


def what_to_check(name: str, grader: Source | None, version: str | None) -> dict[str, Any]:
    asked = {"grader": None if grader is None else read_grader(grader, name=name), "version": version}
    return {key: value for key, value in asked.items() if value is not None}


def listed(after: str | None, limit: int) -> Any:
    options = {"after": after, "limit": limit}
    return {"params": {name: value for name, value in options.items() if value is not None}}


def golden_cases(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cases in the API's form, from rows like those of `Graders.test` or from cases that the API returned."""
    return read_each(source, _case)


def _case(number: int, row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping) or row.get("expect") is None:
        raise InvalidRequestFile(f"{where}: {CASE}")
    sample = row.get("sample")
    if isinstance(sample, Mapping):
        return {name: value for name, value in row.items() if name in FIELDS}
    if not isinstance(sample, str):
        raise InvalidRequestFile(f"{where}: {CASE}")
    item = {key: value for key, value in row.items() if key not in ("sample", "expect")}
    return {"sample": {"output_text": sample}, "item": item, "expect": row["expect"]}
