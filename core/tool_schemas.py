"""The schema of an answer that must call functions: a list of calls, each with the arguments of its function."""

from collections.abc import Mapping, Sequence
from typing import Any

from core.chat import Tool
from core.response_format import checked_bounds, response_schema

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
# Keywords whose values are data, and those whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Keywords that give a schema or a reference another base than the root of the parameters.
_REBASED = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"})


class InvalidToolSchema(ValueError):
    """The parameters of a function cannot be part of the schema of all calls."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.param = f"tools[{number}].function.parameters"


def schema_of_calls(tools: Sequence[Tool], *, parallel: bool) -> str:
    """The schema of a list of calls, `{"name": ..., "parameters": ...}`, in the format of the samplers.

    References in the parameters of a function are to places in them, so they are rewritten to their new places.

    Raises:
        InvalidToolSchema: the parameters of a function have a reference that cannot be rewritten, or exceed a bound.
    """
    kinds = []
    for number, tool in enumerate(tools):
        place = f"#/items/anyOf/{number}/properties/parameters"
        try:
            given = checked_bounds(tool.function.parameters or NO_ARGUMENTS)
            # At the root these two say nothing about places in the schema.
            root = {key: value for key, value in given.items() if key not in ("$id", "$schema")}
            parameters = _moved(root, place)
        except ValueError as cause:
            raise InvalidToolSchema(number, str(cause)) from None
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [tool.function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    return response_schema(schema if parallel else schema | {"maxItems": 1})


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to the root as references to `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key in _DATA:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _moved(part, place) for name, part in value.items()}
    if key in _REBASED and isinstance(value, str):
        raise ValueError(f"'{key}' is not supported with a tool_choice of 'required'")
    if key == "$ref" and isinstance(value, str):
        if value != "#" and not value.startswith("#/"):
            text = "only '#' and '#/...' are supported with a tool_choice of 'required'"
            raise ValueError(f"the reference {value[:64]!r} is to another schema; {text}")
        return place + value[1:]
    return _moved(value, place)
