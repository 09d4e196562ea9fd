"""Answers made up from a schema: they satisfy it, and have a row's values where these fit."""

from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from worker.supervisor.probes import MAX_LOOKS, Maker, NoProbe, TooLarge, probe


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "plain types": an_object(
        a={"type": "string"},
        b={"type": "integer"},
        c={"type": "number"},
        d={"type": "boolean"},
        e={"type": "null"},
    ),
    "an enum": an_object(verdict={"type": "string", "enum": ["yes", "no"]}),
    "a const": an_object(kind={"const": 3}),
    "several types": an_object(a={"type": ["integer", "null"]}),
    "limits of numbers": an_object(
        a={"type": "integer", "minimum": 3, "maximum": 4},
        b={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        c={"type": "integer", "multipleOf": 5, "minimum": 7},
        d={"type": "integer", "maximum": -3},
    ),
    "limits of texts": an_object(
        a={"type": "string", "minLength": 70},
        b={"type": "string", "maxLength": 1},
        c={"type": "string", "maxLength": 0},
    ),
    "patterns": an_object(
        a={"type": "string", "pattern": "^[A-Z][0-9]$"},
        b={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    ),
    "formats": an_object(a={"type": "string", "format": "date"}, b={"type": "string", "format": "uuid"}),
    "arrays": an_object(
        a={"type": "array", "items": {"type": "integer"}},
        b={"type": "array", "items": {"type": "string"}, "minItems": 3},
        c={"type": "array", "items": {"type": "string"}, "maxItems": 0},
        d={"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    ),
    "objects in arrays": an_object(steps={"type": "array", "items": an_object(text={"type": "string"})}),
    "anyOf": an_object(
        a={"anyOf": [{"type": "string", "pattern": "^never matches by chance 77$"}, {"type": "integer"}]}
    ),
    "allOf": {"allOf": [an_object(a={"type": "string"}), {"properties": {"a": {"minLength": 8}}}]},
    "definitions": an_object(a={"$ref": "#/$defs/word"})
    | {"$defs": {"word": {"type": "string", "maxLength": 3}}},
    "itself": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}},
        "required": ["value"],
    },
    "itself in an array": an_object(children={"type": "array", "items": {"$ref": "#"}}),
    "anything": {},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_an_answer_satisfies_its_schema(schema: dict[str, Any]) -> None:
    jsonschema.validate(probe(schema), schema)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_it_does_whatever_the_row_has_by_the_same_names(schema: dict[str, Any]) -> None:
    for value in ("yes", 4, 0.25, None, [1], {"a": 1}):
        jsonschema.validate(
            probe(schema, dict.fromkeys(("a", "b", "verdict", "kind", "text"), value)), schema
        )


def test_a_property_takes_the_rows_value_of_that_name() -> None:
    schema = an_object(verdict={"enum": ["yes", "no"]}, why={"type": "string"}, score={"type": "integer"})

    assert probe(schema, {"verdict": "no", "gold": {"why": "because"}, "score": "7"}) == {
        "verdict": "no",
        "why": "because",
        "score": 7,
    }


def test_what_lies_further_out_in_the_row_wins() -> None:
    row = {"messages": [{"verdict": "yes"}], "verdict": "no"}

    assert probe(an_object(verdict={"enum": ["yes", "no"]}), row) == {"verdict": "no"}


def test_a_value_that_does_not_fit_is_left_out() -> None:
    assert probe(an_object(verdict={"enum": ["yes", "no"]}), {"verdict": "perhaps"}) == {"verdict": "yes"}


def test_a_value_for_a_place_wins_over_one_for_a_name() -> None:
    schema = an_object(answers={"type": "array", "items": an_object(word={"type": "string"})})

    made = probe(schema, {"word": "by name"}, {("answers", 0, "word"): "by place"})

    assert made == {"answers": [{"word": "by place"}]}


@pytest.mark.parametrize(
    "schema",
    [
        an_object(a={"type": "string", "pattern": "^only this 12345$"}),
        an_object(a={"type": "string", "pattern": "^(a+)+(x+)+(0+)+!$"}),
        an_object(a={"type": "string", "minLength": 10**9}),
        an_object(a={"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
        an_object(a={"$ref": "https://elsewhere.example.org/"}),
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        an_object(a=False),
        {"allOf": [{"$ref": "#"}]},
        an_object(a={"type": "integer", "minimum": "many"}),
    ],
)
def test_what_cannot_be_made_up_is_no_answer(schema: dict[str, Any]) -> None:
    with pytest.raises(NoProbe):
        probe(schema)


def chain(count: int, last: dict[str, Any] | bool, keyword: str = "allOf") -> dict[str, Any]:
    """Definitions a0 to a{count}: each names the next one twice, so that following every name is 2**count steps."""
    twice = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(count)}
    return {"$defs": twice | {f"a{count}": last}, "$ref": "#/$defs/a0"}


class TestTheWorkOnASchemaIsBounded:
    @staticmethod
    def looks(schema: dict[str, Any], row: dict[str, Any] | None = None) -> int:
        """How many it took; that many suffice whether an answer comes of it or not."""
        maker = Maker(schema, row or {}, {})
        with suppress(NoProbe):
            maker.make(schema, (), 0)
        return maker.looks

    def test_a_definition_is_worked_out_once_however_often_it_is_named(self) -> None:
        schema = chain(40, an_object(a={"const": 1}))

        assert probe(schema) == {"a": 1}
        assert self.looks(schema) < 300

    def test_what_both_sides_require_is_required_once(self) -> None:
        schema = chain(40, {"type": "object", "required": ["a", "b"]})

        assert probe(schema) == {"a": "text", "b": "text"}

    def test_properties_of_both_sides_are_not_followed_without_end(self) -> None:
        """Each of two definitions has both of the next two: what their property must satisfy doubles at every step."""
        schema: dict[str, Any] = {"$defs": {}, "$ref": "#/$defs/a0"}
        for n in range(40):
            a, b = {"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/b{n + 1}"}
            schema["$defs"] |= {f"a{n}": {"allOf": [a, b]}, f"b{n}": {"allOf": [b, a]}}
        schema["$defs"] |= {"a40": an_object(x={"type": "string"}), "b40": an_object(x={"minLength": 1})}

        with pytest.raises(TooLarge):
            probe(schema)
        assert self.looks(schema) == MAX_LOOKS + 1

    def test_parts_without_a_name_are_counted(self) -> None:
        schema = {"type": "object", "properties": {"a": {"allOf": [{}] * (MAX_LOOKS + 1)}}}

        with pytest.raises(TooLarge):
            probe(schema)

    @pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
    def test_unions_that_double_are_counted(self, keyword: str) -> None:
        assert self.looks(chain(40, False, keyword)) <= MAX_LOOKS + 1

    def test_so_are_they_where_a_rows_value_is_checked(self) -> None:
        schema = chain(40, False, "anyOf")

        assert self.looks({**schema, "properties": {"a": {"$ref": "#/$defs/a0"}}}, {"a": 1}) <= MAX_LOOKS + 1

    @pytest.mark.parametrize(
        "definitions",
        [
            {"a": {"$ref": "#/$defs/a"}},
            {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}},
            {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            {"a": {"allOf": [{"$ref": "#/$defs/b"}] * 2}, "b": {"allOf": [{"$ref": "#/$defs/a"}] * 2}},
        ],
    )
    def test_definitions_that_lead_in_a_circle_give_no_answer(self, definitions: dict[str, Any]) -> None:
        schema = {"$defs": definitions, "$ref": "#/$defs/a"}

        with pytest.raises(NoProbe):
            probe(schema)
        assert self.looks(schema) < 10
        in_properties = {"$defs": definitions, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}
        assert probe(in_properties) == {}

    def test_it_ends_after_a_second_of_a_processors_time(self) -> None:
        maker = Maker({}, {}, {}, started=float("-inf"))

        with pytest.raises(TooLarge):
            maker.make({}, (), 0)
