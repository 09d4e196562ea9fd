"""The schema of answers that must call functions."""

import json
from typing import Any

import pytest

from core.chat import Tool
from core.response_format import problem
from core.tool_schemas import InvalidToolSchema, schema_of_calls


def tool(parameters: dict[str, Any]) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})


def moved(parameters: dict[str, Any]) -> Any:
    """The parameters of the second of two functions in the schema of all calls."""
    schema = schema_of_calls([tool({}), tool(parameters)], parallel=True)
    assert problem(schema) == ""
    return json.loads(schema)["items"]["anyOf"][1]["properties"]["parameters"]


@pytest.mark.parametrize("place", ["", "/$defs/City", "/definitions/N", "/properties/y"])
def test_references_of_a_function_are_to_its_own_parameters(place: str) -> None:
    parameters = {
        "$id": "https://x.test/f",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"x": {"$ref": f"#{place}"}, "y": {"enum": ["a"]}},
        "$defs": {"City": {"enum": ["a"]}},
        "definitions": {"N": {"type": "integer"}},
    }

    found = moved(parameters)

    assert found["properties"]["x"] == {"$ref": f"#/items/anyOf/1/properties/parameters{place}"}
    assert (found["$defs"], found["definitions"]) == (parameters["$defs"], parameters["definitions"])
    assert found.keys() == parameters.keys() - {"$id", "$schema"}


def test_data_and_names_that_look_like_references_stay_as_they_are() -> None:
    properties = {"$ref": {"const": {"$ref": "#/x"}}, "enum": {"enum": [{"$ref": "#/x"}]}, "$id": {}}

    assert moved({"type": "object", "properties": properties})["properties"] == properties


def test_definitions_that_are_no_object_are_no_error() -> None:
    assert moved({"type": "object", "$defs": [1]})["$defs"] == [1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"$ref": "https://x.test/y"}}},
        {"properties": {"x": {"$ref": "#anchor"}}},
        {"properties": {"x": {"$id": "https://x.test/y"}}},
        {"minItems": 1_000_000},
    ],
)
def test_what_cannot_be_moved_is_refused_by_its_function(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidToolSchema) as refused:
        schema_of_calls([tool({}), tool(parameters)], parallel=False)

    assert refused.value.param == "tools[1].function.parameters"
