from typing import Any

import pytest
from pydantic import ValidationError

from core.response_format import MAX_SCHEMA_DEPTH, ResponseFormat, problem, response_schema


def refused(schema: dict[str, Any]) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(ValidationError) as caught:
        ResponseFormat.model_validate(form)
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "minItems": 10**9}, "'minItems' is 1000000000, at most 10000 is supported"),
        ({"type": "array", "minItems": 10**400}, "'minItems' is too large, at most 10000 is supported"),
        ({"items": {"maxItems": 1e8}}, "'maxItems' is 100000000, at most 10000"),
        ({"properties": {"a": {"minProperties": 10**6}}}, "'minProperties' is 1000000"),
        ({"$defs": {"a": {"maxLength": 10**12}}}, "'maxLength' is 1000000000000, at most 100000"),
        ({"anyOf": [{"enum": list(range(1001))}]}, "'enum' has 1001 entries, at most 1000 are supported"),
        ({"properties": {str(n): {} for n in range(5001)}}, "'properties' has 5001 entries, at most 5000"),
        ({"description": "a" * 200_000}, "characters as JSON, at most 200000 are supported"),
    ],
)
def test_a_schema_beyond_the_bounds_is_refused_before_it_is_compiled_and_the_keyword_is_named(
    schema: dict[str, Any], says: str
) -> None:
    assert says in refused(schema)


def test_a_schema_may_not_be_nested_without_end() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        deep = {"items": deep}

    assert f"nested more than {MAX_SCHEMA_DEPTH} deep" in refused(deep)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"minItems": {"type": "integer"}, "enum": {"type": "string"}}}

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    assert ResponseFormat.model_validate(form).json_schema.schema_ == schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "pattern": "^(a{1000}){1000}{1000}$"}, "too many expressions"),
        (
            {"type": "string", "pattern": "^(?=a)b$"},
            "a 'pattern' is invalid: look-around, including look-ahead",
        ),
        ({"type": "string", "pattern": "^a(b$"}, "a 'pattern' is invalid: unclosed group"),
        ({"type": "string", "pattern": "^(a{1000}){3}$"}, ""),
        ({"type": "string", "maxLength": 0}, ""),
        ({"type": "boolean"}, ""),
        ({"const": {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}, ""),
    ],
)
@pytest.mark.slow
def test_a_schema_that_no_answer_can_be_begun_with_has_a_problem(schema: dict[str, Any], says: str) -> None:
    found = problem(response_schema(schema))

    assert says in found if says else found == ""
