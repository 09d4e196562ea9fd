"""The rows of a run: from an uploaded file, the request or the rollouts of a job (core/evals/regrades.py).

Each has an `item` and perhaps a `sample`, or is itself an item.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from core.storage.datasets import LineError, is_nested_too_deeply, read_objects


@dataclass(frozen=True)
class EvalRow:
    """One row; `line` counts from 1. `rollout` is the stored answer of a regrade.

    `is_flat`: the row has no key `item`, and is itself the item.
    """

    line: int
    item: dict[str, Any]
    sample: dict[str, Any] | None = None
    rollout: dict[str, Any] | None = None
    is_flat: bool = False


def of_file(chunks: Iterable[bytes]) -> Iterator[EvalRow | LineError]:
    """The rows of a JSONL file."""
    for row in read_objects(chunks):
        yield row if isinstance(row, LineError) else _row(*row)


def of_content(content: Iterable[dict[str, Any]]) -> Iterator[EvalRow | LineError]:
    """The rows of `file_content`."""
    for number, row in enumerate(content, 1):
        yield _row(number, row)


def is_flat(row: dict[str, Any]) -> bool:
    """Whether the row is itself the item."""
    return bool(row) and row.keys().isdisjoint({"item", "sample"})


def _row(line: int, row: dict[str, Any]) -> EvalRow | LineError:
    flat = is_flat(row)
    if flat:
        row = {"item": row}
    for name in row:
        if name not in ("item", "sample"):
            return LineError(line, f"has the key '{name}'; a row has 'item' and perhaps 'sample'")
    if "item" not in row:
        return LineError(line, "has no 'item'")
    if not isinstance(row["item"], dict):
        return LineError(line, "must be an object", "item")
    if not isinstance(row.get("sample"), dict | None):
        return LineError(line, "must be an object", "sample")
    if is_nested_too_deeply(row):
        return LineError(line, "is nested too deeply")
    return EvalRow(line, row["item"], row.get("sample"), is_flat=flat)
