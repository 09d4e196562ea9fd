"""Carve validation rows out of a training file.

Rows with the same prompt stay together, because a prompt on both sides would measure memory. Which rows are taken
depends on their prompts alone, so the same file is always divided in the same way, in any order of its rows.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from core.storage.datasets import InvalidDataset, LineError, numbered_lines, read_objects

# The largest part of a file that may be taken.
MAX_SHARE = 0.5


def prompt_of(row: Mapping[str, Any]) -> Any:
    """The part of a row that the model reads: dpo's input, or the messages without the assistant's."""
    if "input" in row:
        return row["input"]
    messages = row.get("messages")
    if not isinstance(messages, list):
        return row
    return [one for one in messages if not (isinstance(one, Mapping) and one.get("role") == "assistant")]


def prompt_hash(row: Mapping[str, Any]) -> int:
    """A number below 2**64 for the row's prompt."""
    text = json.dumps(prompt_of(row), sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def validation_size(rows: int, share: float, most: int) -> int:
    """The number of rows that are taken from `rows` with different prompts."""
    return max(1, min(round(share * rows), most))


def choose(hashes: Sequence[int], share: float, most: int) -> frozenset[int]:
    """The prompts whose rows are for validation: those with the lowest hashes, for about `share` of all rows.

    Args:
        hashes: `prompt_hash` of each row.
        share: Between 0 and 1.
        most: The maximum number of rows.

    Raises:
        InvalidDataset: all rows have the same prompt, or too many rows have each.
    """
    counts: dict[int, int] = {}
    for one in hashes:
        counts[one] = counts.get(one, 0) + 1
    wanted, taken = validation_size(len(hashes), share, most), 0
    chosen: set[int] = set()
    for one in sorted(counts):
        if taken >= wanted:
            break
        if taken + counts[one] <= most and len(chosen) + 1 < len(counts):
            chosen.add(one)
            taken += counts[one]
    if not chosen:
        reason = (
            f"each prompt has more than {most} rows, which is the maximum of a validation file"
            if len(counts) > 1
            else "a validation_split needs rows with at least two different prompts"
        )
        raise InvalidDataset([LineError(0, reason)])
    return frozenset(chosen)


def hashes_of(chunks: Iterable[bytes]) -> list[int]:
    """`prompt_hash` of each row. Holds one row at a time.

    Raises:
        InvalidDataset: a line is not a JSON object.
    """
    hashes: list[int] = []
    for row in read_objects(chunks):
        if isinstance(row, LineError):
            raise InvalidDataset([row])
        hashes.append(prompt_hash(row[1]))
    return hashes


def rows_of_split(
    chunks: Callable[[], Iterable[bytes]],
    hashes: Sequence[int],
    chosen: Collection[int],
    *,
    is_validation: bool,
) -> Iterator[bytes]:
    """The lines of one side, unchanged."""
    lines = (line for _, line in numbered_lines(chunks()) if line is not None and line.strip())
    for line, one in zip(lines, hashes, strict=True):
        if (one in chosen) == is_validation:
            yield line + b"\n"
