"""Rows for the scripts whose page leaves the data to the reader."""

from typing import Any

from tests.conformance.helpers import jsonl


def rows(*answers: str) -> list[dict[str, Any]]:
    """One a question, with a reference as most examples name it."""
    return [
        {"messages": [{"role": "user", "content": f"Question {n}?"}], "reference_answer": answer}
        for n, answer in enumerate(answers)
    ]


TRAIN = jsonl(rows("red", "green", "blue", "white"))
TEST = jsonl(rows("black", "brown"))
EXACT: Any = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
    "operation": "eq",
}
SIMILAR: Any = {
    "type": "text_similarity",
    "name": "similar",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
    "evaluation_metric": "fuzzy_match",
}
