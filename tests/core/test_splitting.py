"""The validation rows of a training file: whole prompts, the same ones every time."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from core.storage import splitting
from core.storage.datasets import InvalidDataset

MOST = 1_000_000


def file(rows: Sequence[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def rows_of(prompts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": text}], "number": n} for n, text in enumerate(prompts)]


def divide(content: bytes, share: float, most: int = MOST) -> tuple[list[Any], list[Any]]:
    hashes = splitting.hashes_of([content])
    chosen = splitting.choose(hashes, share, most)
    sides = (
        splitting.rows_of_split(lambda: [content], hashes, chosen, is_validation=is_valid)
        for is_valid in (False, True)
    )
    training, validation = ([json.loads(line) for line in side] for side in sides)
    return training, validation


def test_the_share_is_taken_and_every_row_is_on_one_side() -> None:
    rows = rows_of([f"prompt {number}" for number in range(200)])
    training, validation = divide(file(rows), 0.1)

    assert len(validation) == 20
    assert sorted([*training, *validation], key=lambda row: row["number"]) == rows


def test_rows_with_one_prompt_stay_together() -> None:
    """Also supervised rows whose answers differ, and dpo rows whose preferences do."""
    rows = rows_of([f"prompt {number % 20}" for number in range(200)])
    for row in rows:
        row["messages"].append({"role": "assistant", "content": str(row["number"])})
    training, validation = divide(file(rows), 0.25)

    prompts = [{row["messages"][0]["content"] for row in side} for side in (training, validation)]
    assert not prompts[0] & prompts[1]
    assert len(validation) == 50
    pairs = [{"input": row["messages"][:1], "preferred_output": row["number"]} for row in rows]
    assert [splitting.prompt_hash(one) for one in pairs[:20]] == [
        splitting.prompt_hash(one) for one in pairs[20:40]
    ]


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = rows_of([f"prompt {number}" for number in range(50)])
    first, second = divide(file(rows), 0.2)[1], divide(file(rows[::-1]), 0.2)[1]

    assert first == second[::-1]


def test_lines_stay_as_they_are() -> None:
    odd = b'\xef\xbb\xbf{"messages":[{"role":"user","content":"a"}],  "x": 1.50}\r\n{"messages": []}\n'
    hashes = splitting.hashes_of([odd])
    chosen = splitting.choose(hashes, 0.5, MOST)
    sides = [
        b"".join(splitting.rows_of_split(lambda: [odd], hashes, chosen, is_validation=one))
        for one in (True, False)
    ]

    assert sorted(sides, key=len)[1] == b'{"messages":[{"role":"user","content":"a"}],  "x": 1.50}\r\n'


def test_the_maximum_of_rows_is_kept() -> None:
    training, validation = divide(file(rows_of([f"prompt {number}" for number in range(100)])), 0.5, most=7)

    assert (len(training), len(validation)) == (93, 7)


@pytest.mark.parametrize("prompts", [["a"], ["a", "a", "a"]])
def test_one_prompt_cannot_be_divided(prompts: list[str]) -> None:
    with pytest.raises(InvalidDataset, match="at least two different prompts"):
        divide(file(rows_of(prompts)), 0.5)


def test_a_line_that_is_no_object_is_named() -> None:
    with pytest.raises(InvalidDataset, match="line 2"):
        splitting.hashes_of([b'{"a": 1}\n[]\n'])
