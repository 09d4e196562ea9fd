"""Rows of a dataset that are valid and cannot teach what their author probably means."""

from __future__ import annotations

from graders.build import graders_of, reference_of
from graders.builtin.text_similarity import ignores_words, too_short
from graders.spec import GraderSpec, StringCheckSpec, TextSimilaritySpec
from graders.types import Item


def row_doubts(spec: GraderSpec, row: Item) -> list[str]:
    """Return what is doubtful about this row for the graders of the spec, as an end of the sentence "This row ...".

    Equal faults of different rows have equal texts, so that they can be counted.
    """
    doubts: list[str] = []
    for part in graders_of(spec, row):
        if isinstance(part, StringCheckSpec) and part.operation in ("like", "ilike"):
            if reference_of(part, row) == "":
                doubts.append(
                    f"has an empty reference for '{part.name}', and every answer contains an empty text: "
                    f"'{part.operation}' scores all answers 1"
                )
        elif isinstance(part, TextSimilaritySpec) and (reference := reference_of(part, row)) is not None:
            if (why := too_short(part.evaluation_metric, reference, part.tokenizer)) is not None:
                doubts.append(f"has a reference for '{part.name}' that {why}: all answers score 0")
            elif ignores_words(part.evaluation_metric, reference, part.tokenizer):
                doubts.append(
                    f"has a reference for '{part.name}' in which {part.evaluation_metric} does not read the words "
                    'that are written (letters outside a-z, or no spaces): set "tokenizer": "unicode"'
                )
    return doubts
