"""A grader chosen by each row."""

import asyncio
from typing import Any

import pytest

from graders.build import build, item_paths, row_problems
from graders.spec import InvalidGrader, SelectSpec, dump, parse_grader
from graders.types import ErrorKind, Grade, Sample

SUM: dict[str, Any] = {
    "type": "math",
    "name": "sum",
    "input": "{{sample.output_text}}",
    "reference": "{{item.total}}",
}
WORD: dict[str, Any] = {
    "type": "string_check",
    "name": "word",
    "input": "{{sample.output_text}}",
    "reference": "{{item.word}}",
    "operation": "eq",
}
BOTH = {
    "type": "multi",
    "name": "both",
    "graders": {"sum": SUM, "word": WORD},
    "calculate_output": "sum + word",
}
BY_ROW: dict[str, Any] = {
    "type": "select",
    "name": "by row",
    "key": "{{item.grader}}",
    "graders": {"sum": SUM, "a word": WORD, "both": BOTH},
}


def graded(text: str, **item: Any) -> Grade:
    return asyncio.run(build(parse_grader(BY_ROW)).grade(Sample(text), item))


def test_the_row_chooses_the_grader() -> None:
    assert graded("so 4", grader="sum", total="4").score == 1
    assert graded("so 4", grader="a word", word="4").score == 0
    assert graded("4", grader="both", total="4", word="4").score == 2


def test_the_score_is_also_that_of_the_chosen_part_alone() -> None:
    grade = graded("4", grader="both", total="4", word="5")

    assert {key: part.score for key, part in grade.sub_grades.items()} == {"both": 1}
    assert grade.reason == grade.sub_grades["both"].reason


def test_a_row_that_chooses_none_is_not_graded() -> None:
    unknown, absent = graded("4", grader="other"), graded("4", total="4")

    assert (unknown.score, unknown.error) == (None, ErrorKind.invalid_variable_error)
    assert unknown.reason == "the row chooses the grader 'other', which is none of 'sum', 'a word', 'both'"
    assert (absent.score, absent.error) == (None, ErrorKind.invalid_variable_error)


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        ({"grader": "sum", "total": "4"}, []),
        ({"grader": "a word", "word": "x"}, []),
        ({"grader": "sum", "word": "x"}, ["the grader reads {{item.total}}, which this row does not have"]),
        ({"total": "4"}, ["the grader reads {{item.grader}}, which this row does not have"]),
        (
            {"grader": "x", "total": "4"},
            ["the row chooses the grader 'x', which is none of 'sum', 'a word', 'both'"],
        ),
    ],
)
def test_a_row_needs_the_fields_of_its_own_grader(row: dict[str, Any], problems: list[str]) -> None:
    spec = parse_grader(BY_ROW)

    assert row_problems(spec, row) == problems
    assert item_paths(spec) == [("grader",), ("total",), ("word",)]


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"key": "{{sample.output_text}}"}, "grader.key", "the key must read the row"),
        ({"key": "sum"}, "grader.key", "the key must read the row"),
        ({"graders": {}}, "grader.graders", "expected 1 to 100 graders"),
        ({"graders": {"x": BY_ROW}}, "grader.graders.x.type", "cannot contain another select"),
        ({"graders": {"x": SUM | {"input": 1}}}, "grader.graders.x.input", "Invalid type"),
    ],
)
def test_what_cannot_choose_is_refused(changes: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidGrader, match=says) as refused:
        parse_grader(BY_ROW | changes)

    assert refused.value.param == param


def test_a_multi_cannot_contain_one() -> None:
    with pytest.raises(InvalidGrader, match="a multi grader cannot contain a select grader"):
        parse_grader(BOTH | {"graders": {"sum": BY_ROW}})


def test_headers_inside_are_hidden() -> None:
    endpoint = {
        "type": "endpoint",
        "name": "e",
        "url": "https://graders.example/",
        "headers": {"key": "secret"},
    }
    spec = parse_grader(BY_ROW | {"graders": {"mine": endpoint}})

    assert isinstance(spec, SelectSpec)
    assert "secret" not in str(dump(spec, masked=True))
