"""Made-up answers that satisfy a JSON schema, to try a grader on before a model has given any."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import regex

from graders.template import Path

# A schema that contains itself is followed this far.
MAX_DEPTH = 12
# Schemas are user input. Limits: parts visited, seconds of processor time, length, and seconds per pattern.
MAX_LOOKS, MAX_CPU_S, MAX_LENGTH, PATTERN_S = 10_000, 1.0, 1_000, 0.02
_TEXTS = (
    "text",
    "0",
    "1",
    "a",
    "A",
    "aa",
    "AA",
    "00",
    "0000",
    "A1",
    "1.0",
    "2025-05-08",
    "a@b.org",
    "abc-123",
    "+1 2",
    "",
)
_FORMATS = {
    "date": "2025-05-08",
    "time": "12:00:00Z",
    "date-time": "2025-05-08T12:00:00Z",
    "duration": "P1D",
    "email": "a@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


class NoProbe(ValueError):
    """No answer of this schema was found. It may still have some: only common keywords are understood."""


class TooLarge(NoProbe):
    pass


def probe(
    schema: Mapping[str, Any],
    named: Mapping[str, Any] | None = None,
    placed: Mapping[Path, Any] | None = None,
) -> Any:
    """An answer that satisfies the schema, with the values given here wherever they do.

    Args:
        schema: a JSON schema.
        named: a row; a property takes the value that the row has under the property's name, at any depth.
        placed: values for places in the answer, by path. They win over `named`.

    Raises:
        NoProbe: none was found, or not within MAX_LOOKS and MAX_CPU_S.
    """
    try:
        return Maker(schema, dict(_by_name(named or {})), dict(placed or {})).make(schema, (), 0)
    except (RecursionError, TypeError, AttributeError, LookupError, ArithmeticError) as cause:
        raise NoProbe(f"the schema is not understood: {cause!r}") from cause


def _by_name(row: Any) -> Iterator[tuple[str, Any]]:
    """Every name in a row with its value. Those further out come later: in a dict, they win."""
    if isinstance(row, Mapping):
        for value in row.values():
            yield from _by_name(value)
        yield from row.items()
    elif isinstance(row, list):
        for value in row:
            yield from _by_name(value)


@dataclass(repr=False)  # what is worked out shares parts: written out it could be endless
class Maker:
    """The work on one answer. `looks` counts it: each schema made or checked, each $ref and part of an allOf."""

    root: Mapping[str, Any]
    named: Mapping[str, Any]
    placed: Mapping[Path, Any]
    looks: int = 0
    started: float = field(default_factory=time.thread_time)
    # Resolved targets by $ref, without $ref and allOf at the top level; None while a target is being resolved.
    references: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def _look(self) -> None:
        self.looks += 1
        if self.looks > MAX_LOOKS or time.thread_time() - self.started > MAX_CPU_S:
            raise TooLarge("the schema is too large to generate an answer")

    def make(self, schema: Any, path: Path, depth: int) -> Any:
        self._look()
        if depth > MAX_DEPTH or schema is False:
            raise NoProbe(f"nothing fits at {list(path)}")
        if schema is True or not isinstance(schema, Mapping):
            return "text"
        schema = self._resolved(schema)
        for value in self._values_at(path):
            if self.fits(value, schema):
                return value
        for union in ("anyOf", "oneOf"):
            if union in schema:
                rest = {key: value for key, value in schema.items() if key != union}
                return self._first((_merged(rest, self._resolved(one)) for one in schema[union]), path, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return next((value for value in schema["enum"] if self.fits(value, schema)), schema["enum"][0])
        kinds = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kinds, str):
            return self._of_type(kinds, schema, path, depth)
        return self._first(({**schema, "type": kind} for kind in kinds), path, depth)

    def _first(self, schemas: Iterable[Mapping[str, Any]], path: Path, depth: int) -> Any:
        for schema in schemas:
            try:
                return self.make(schema, path, depth + 1)
            except TooLarge:
                raise
            except NoProbe:
                continue
        raise NoProbe(f"nothing fits at {list(path)}")

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Without $ref and allOf at its top."""
        self._look()
        whole: dict[str, Any] = (
            dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"enum": []}
        )
        reference, parts = whole.pop("$ref", None), whole.pop("allOf", ())
        if isinstance(reference, str):
            whole = _merged(self._referenced(reference), whole)
        for part in parts:
            whole = _merged(whole, self._resolved(part))
        return whole

    def _referenced(self, reference: str) -> Mapping[str, Any]:
        """Return the target of a $ref. Each is resolved once: definitions may refer to each other many times."""
        if reference not in self.references:
            self.references[reference] = None
            self.references[reference] = self._resolved(_pointed(self.root, reference))
        found = self.references[reference]
        if found is None:
            raise NoProbe("a $ref is circular or unresolved")
        return found

    def _values_at(self, path: Path) -> Iterator[Any]:
        for values, key in ((self.placed, path), (self.named, path[-1] if path else None)):
            if key in values:
                value = values[key]  # type: ignore[index]
                yield value
                if isinstance(value, str):
                    with suppress(ValueError, RecursionError):
                        yield json.loads(value)  # what a template made text of
                elif not isinstance(value, (dict, list)):
                    yield str(value)

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: Path, depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, path, depth)
            case "array":
                return self._array(schema, path, depth)
            case "string":
                return self._text(schema)
            case "integer" | "number":
                return self._number(schema)
            case "boolean":
                return False
            case "null":
                return None
        raise NoProbe(f"there is no type {kind!r}")

    def _object(self, schema: Mapping[str, Any], path: Path, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        made = {}
        for name in dict.fromkeys([*properties, *required]):
            try:
                made[name] = self.make(properties.get(name, True), (*path, name), depth + 1)
            except NoProbe as none:
                if name in required or isinstance(none, TooLarge):
                    raise
        return made

    def _array(self, schema: Mapping[str, Any], path: Path, depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        # One element where that may be: graders look into the first.
        count = max(schema.get("minItems", min(1, schema.get("maxItems", 1))), len(first))
        made: list[Any] = []
        for index in range(count):
            of = first[index] if index < len(first) else schema.get("items", True)
            try:
                made.append(self.make(of, (*path, index), depth + 1))
            except NoProbe as none:
                if isinstance(none, TooLarge) or index < schema.get("minItems", 0):
                    raise
                break
        return made

    def _text(self, schema: Mapping[str, Any]) -> str:
        shortest = int(schema.get("minLength", 0))
        tries = [_FORMATS.get(schema.get("format", ""), "text"), *_TEXTS]
        if shortest > MAX_LENGTH:
            raise NoProbe(f"a text of {shortest} characters is too long to try")
        longest = min(int(schema.get("maxLength", max(shortest, 64))), MAX_LENGTH)
        padded = [text.ljust(shortest, "x") for text in tries]
        fitting = (
            text for text in [*tries, *padded, "x" * longest, "0" * longest] if self.fits(text, schema)
        )
        if (text := next(fitting, None)) is not None:
            return text
        raise NoProbe(f"no text was found that matches {schema.get('pattern')!r}")

    def _number(self, schema: Mapping[str, Any]) -> float:
        step = schema.get("multipleOf", 1)
        edges = [
            schema[key]
            for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
            if key in schema
        ]
        middles = [sum(edges) / len(edges)] if edges else []
        for base in (0, *edges, *middles):
            for number in (base, base // step * step, (base // step + 1) * step, (base // step - 1) * step):
                number = int(number) if number == int(number) else number
                if self.fits(number, schema):
                    return number
        raise NoProbe("no number fits")

    def fits(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Whether the value satisfies the schema, as far as common keywords say."""
        self._look()
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return schema is not False
        schema = self._resolved(schema)
        if "const" in schema and not _same(value, schema["const"]):
            return False
        if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
            return False
        kinds = schema.get("type", [])
        if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
            return False
        if any(
            not any(self.fits(value, one, depth + 1) for one in schema[key])
            for key in ("anyOf", "oneOf")
            if key in schema
        ):
            return False
        match value:
            case dict():
                properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
                return all(name in value for name in schema.get("required", [])) and all(
                    self.fits(inner, properties.get(name, others), depth + 1) for name, inner in value.items()
                )
            case list():
                few = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
                return few and all(self.fits(inner, schema.get("items", True), depth + 1) for inner in value)
            case str():
                size = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
                return size and _matches(value, schema.get("pattern"))
            case int() | float() if not isinstance(value, bool):
                return _in_range(value, schema)
        return True


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What satisfies both, for what schemas usually have on the two sides of a $ref or an allOf."""
    merged = {**first, **second}
    if "properties" in first and "properties" in second:
        both = {
            name: {"allOf": [one, other]}
            for name, one in first["properties"].items()
            if (other := second["properties"].get(name, one)) is not one
        }
        merged["properties"] = {**first["properties"], **second["properties"], **both}
    if "required" in first and "required" in second:
        merged["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    return merged


def _pointed(root: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    place: Any = root
    try:
        if not reference.startswith("#"):
            raise KeyError(reference)
        for step in reference[1:].split("/")[1:]:
            place = place[step.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise NoProbe(f"{reference} is unresolved") from None
    return place if isinstance(place, Mapping) else {}


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (
            isinstance(value, float) and (kind == "number" or value.is_integer())
        )
        return whole and not isinstance(value, bool)
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _matches(text: str, pattern: str | None) -> bool:
    try:
        return pattern is None or regex.search(pattern, text, timeout=PATTERN_S) is not None
    except (regex.error, TimeoutError):
        return False


def _in_range(value: float, schema: Mapping[str, Any]) -> bool:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above = schema.get("exclusiveMinimum", value - 1) < value < schema.get("exclusiveMaximum", value + 1)
    return bool(low <= value <= high and above and value % schema.get("multipleOf", value or 1) == 0)
