"""JSON schema constraints of answers: the user's format, and the text for the samplers."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from llguidance import LLMatcher, LLTokenizer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# Models that may generate white space anywhere tend to do so everywhere. llguidance reads these options from the
# schema,
# so every engine built on it, including vLLM, allows the same tokens.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# Bounds checked before compilation, in time linear in the schema's size. OpenAI's are 5,000 properties, 1,000 enum
# values and 120,000 characters of names and values. The hazard pool, in which the API compiles each schema first,
# limits
# the cost of compilation within these bounds.
MAX_SCHEMA_CHARACTERS = 200_000
MAX_SCHEMA_DEPTH = 64
MAX_ENTRIES = {
    "properties": 5_000,
    "enum": 1_000,
    "anyOf": 1_000,
    "allOf": 1_000,
    "oneOf": 1_000,
    "prefixItems": 1_000,
}
MAX_COUNTS = {
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), 10_000),
    **dict.fromkeys(("minLength", "maxLength"), 100_000),
}

# Bytes of an answer that are generated to test a schema.
FIRST_BYTES = 16


class SchemaTooLarge(ValueError):
    """An answer reached a place where the schema exceeds llguidance's limits."""


def response_schema(schema: Mapping[str, Any]) -> str:
    """The schema in the format of the samplers."""
    return json.dumps({**schema, "x-guidance": _COMPACT})


def grammar(schema: str) -> str:
    """llguidance's grammar for the result of `response_schema`.

    Raises:
        ValueError: the schema is invalid or uses an unsupported feature.
    """
    made = LLMatcher.grammar_from_json_schema(schema)
    if problem := LLMatcher.validate_grammar(made):
        lines = problem.strip().splitlines()
        # A complaint about a regular expression has its reason in the last line, below a drawing of the place.
        reason = lines[-1].removeprefix("error: ")
        raise ValueError(
            f"a 'pattern' is invalid: {reason}" if lines[0] == "regex parse error:" else lines[0]
        )
    return made


def problem(schema: str) -> str:
    """The reason why the schema cannot be enforced; "" if it can. Runs in the hazard pool only."""
    try:
        made = grammar(schema)
    except ValueError as cause:
        return str(cause)
    # llguidance compiles lazily: some patterns turn out to be too large only during an answer.
    matcher = LLMatcher(_bytes(), made)
    for _ in range(FIRST_BYTES):
        allowed = matcher.compute_bitmask()
        token = next((8 * i + _lowest_bit(byte) for i, byte in enumerate(allowed) if byte), None)
        if token is None or not matcher.consume_token(token) or matcher.is_stopped():
            break
    if not matcher.is_error():
        return ""
    return f"a 'pattern' repeats too much to be enforced ({matcher.get_error().strip().splitlines()[0]})"


@cache
def _bytes() -> LLTokenizer:
    """A tokenizer with one token per byte value."""
    return LLTokenizer("byte")


def _lowest_bit(byte: int) -> int:
    return (byte & -byte).bit_length() - 1


def checked_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema unchanged; raise ValueError with the keyword that exceeds a bound."""
    here: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        here = [below for value in here for below in _below(value)]
        if not here:
            break
    else:
        raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARACTERS:
        raise ValueError(
            f"the schema has {size} characters as JSON, at most {MAX_SCHEMA_CHARACTERS} are supported"
        )
    return schema


def _below(value: Any) -> list[Any]:
    """The objects and arrays in `value`, after checking its bounds."""
    if isinstance(value, dict):
        for keyword in MAX_COUNTS.keys() & value.keys():
            if isinstance(value[keyword], int | float) and value[keyword] > MAX_COUNTS[keyword]:
                count = f"{value[keyword]:.15g}" if value[keyword] < 1e300 else "too large"
                raise ValueError(f"'{keyword}' is {count}, at most {MAX_COUNTS[keyword]} is supported")
        for keyword in MAX_ENTRIES.keys() & value.keys():
            entries = value[keyword]
            if isinstance(entries, dict | list) and len(entries) > MAX_ENTRIES[keyword]:
                raise ValueError(
                    f"'{keyword}' has {len(entries)} entries, at most {MAX_ENTRIES[keyword]} are supported"
                )
        value = value.values()
    return [below for below in value if isinstance(below, dict | list)]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(checked_bounds)] = Field(alias="schema")
    strict: bool | None = None  # schemas are always enforced


class ResponseFormat(BaseModel):
    """method.reinforcement.response_format. Azure also documents a flat spelling, which is normalized to the nested
    one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and "schema" in sent and "json_schema" not in sent:
            return {"type": sent.get("type"), "json_schema": {k: v for k, v in sent.items() if k != "type"}}
        return sent

    def to_row(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def stored_response_schema(stored: Mapping[str, Any] | None) -> str:
    """The schema that a job's samplers enforce; "" for free text."""
    return "" if stored is None else response_schema(stored["json_schema"]["schema"])
