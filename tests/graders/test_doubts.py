from typing import Any

import pytest

from graders.doubts import row_doubts
from graders.spec import parse_grader

CONTAINS = {
    "type": "string_check",
    "name": "mentions",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "like",
}
SIMILAR = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "rouge_2",
}


@pytest.mark.parametrize(
    ("grader", "answer", "says"),
    [
        (CONTAINS, "", "scores all answers 1"),
        (CONTAINS | {"operation": "ilike"}, "", "scores all answers 1"),
        (SIMILAR, "blue", "has 1 of the 2 words that rouge_2 compares: all answers score 0"),
        (SIMILAR, "Ärger im Öl", "does not read the words that are written"),
        (SIMILAR | {"evaluation_metric": "bleu"}, "你好世界", "does not read the words that are written"),
    ],
)
@pytest.mark.parametrize("inside", ["alone", "multi", "select"])
def test_a_row_that_cannot_tell_answers_apart_is_doubtful(
    grader: dict[str, Any], answer: str, says: str, inside: str
) -> None:
    whole = {
        "alone": grader,
        "multi": {"type": "multi", "graders": {"a": grader}, "calculate_output": "a"},
        "select": {"type": "select", "key": "{{item.task}}", "graders": {"a": grader}},
    }[inside]

    [doubt] = row_doubts(parse_grader(whole), {"answer": answer, "task": "a"})

    assert says in doubt


@pytest.mark.parametrize(
    ("grader", "row"),
    [
        (CONTAINS, {"answer": "blue"}),
        (CONTAINS | {"operation": "eq"}, {"answer": ""}),
        (SIMILAR, {"answer": "light blue"}),
        (SIMILAR | {"tokenizer": "unicode"}, {"answer": "Ärger im Öl"}),
        (SIMILAR | {"evaluation_metric": "fuzzy_match"}, {"answer": "你好"}),
        (SIMILAR | {"reference": "{{sample.output_text}}"}, {"answer": ""}),
    ],
)
def test_other_rows_are_not(grader: dict[str, Any], row: dict[str, Any]) -> None:
    assert row_doubts(parse_grader(grader), row) == []
