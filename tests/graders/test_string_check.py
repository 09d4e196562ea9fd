import asyncio

import pytest

from graders.builtin.string_check import Operation, StringCheck
from graders.template import Template
from graders.types import ErrorKind, Grade, Sample


def grade(
    operation: Operation,
    got: str,
    want: object,
    *,
    input: str = "{{sample.output_text}}",
    reference: str = "{{item.want}}",
) -> Grade:
    check = StringCheck("check", Template.parse(input), Template.parse(reference), operation)
    return asyncio.run(check.grade(Sample(got), {"want": want}))


@pytest.mark.parametrize(
    ("operation", "got", "want", "score"),
    [
        ("eq", "Paris", "Paris", 1),
        ("eq", "paris", "Paris", 0),
        ("eq", "Paris ", "Paris", 0),
        ("ne", "Paris", "Paris", 0),
        ("ne", "Rome", "Paris", 1),
        ("like", "It is Paris.", "Paris", 1),
        ("like", "It is paris.", "Paris", 0),
        ("like", "Paris", "It is Paris.", 0),
        ("like", "Paris", "P%", 0),
        ("ilike", "It is PARIS.", "paris", 1),
        ("ilike", "STRASSE", "straße", 1),
        ("ilike", "Rome", "paris", 0),
    ],
)
def test_each_operation_compares_the_texts_as_they_are(
    operation: Operation, got: str, want: str, score: int
) -> None:
    assert grade(operation, got, want).score == score


def test_a_number_in_the_row_matches_its_text_in_the_output() -> None:
    assert grade("eq", "42", 42).score == 1.0


def test_the_reason_shows_both_sides() -> None:
    assert grade("eq", "Rome", "Paris").reason == "expected 'Paris', got 'Rome'"
    assert grade("like", "Rome", "Paris").reason == "expected something with 'Paris' in it, got 'Rome'"


@pytest.mark.parametrize("operation", ["like", "ilike"])
def test_an_empty_reference_that_every_answer_contains_is_named_in_the_reason(operation: Operation) -> None:
    assert grade(operation, "Rome", "").reason.endswith("; every answer contains an empty reference")
    assert "empty" not in grade(operation, "Rome", "R").reason


def test_braces_in_the_data_do_not_disturb_the_reason() -> None:
    assert grade("eq", "{0}", "{}").reason == "expected '{}', got '{0}'"


def test_the_reason_stays_short_when_the_output_is_long() -> None:
    assert len(grade("eq", "x" * 100_000, "y" * 100_000).reason) < 300


def test_a_missing_path_leaves_the_sample_ungraded() -> None:
    ungraded = grade("eq", "Paris", "Paris", reference="{{item.answer}}")

    assert ungraded == Grade(None, "item.answer is missing", ErrorKind.invalid_variable_error)


def test_an_output_that_is_not_json_leaves_the_sample_ungraded() -> None:
    ungraded = grade("eq", "Paris", "Paris", input="{{sample.output_json.city}}")

    assert (ungraded.score, ungraded.error) == (None, ErrorKind.sample_parse_error)
