"""Answers that have to be JSON of a schema: what a user writes, and the text that samplers hold answers to."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# Models that may put white space anywhere tend to put it everywhere. llguidance reads this from the schema itself, so
# every engine that is built on it, vLLM's among them, allows the very same tokens.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class SchemaTooLarge(ValueError):
    """An answer came to a place where the schema allows more than llguidance follows."""


def held_to(schema: Mapping[str, Any]) -> str:
    """The schema as samplers take it."""
    return json.dumps({**schema, "x-guidance": _COMPACT})


def grammar(held: str) -> str:
    """llguidance's grammar of what `held_to` made.

    Raises:
        ValueError: it is no schema, or uses something that answers cannot be held to.
    """
    made = LLMatcher.grammar_from_json_schema(held)
    if problem := LLMatcher.validate_grammar(made):
        raise ValueError(problem.strip().split("\n")[0])
    return made


def _usable(schema: dict[str, Any]) -> dict[str, Any]:
    grammar(held_to(schema))
    return schema


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(_usable)] = Field(alias="schema")
    strict: bool | None = None  # answers are always held to the schema


class ResponseFormat(BaseModel):
    """method.reinforcement.response_format. Azure documents a flat spelling as well; kept is the nested one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and "schema" in sent and "json_schema" not in sent:
            return {"type": sent.get("type"), "json_schema": {k: v for k, v in sent.items() if k != "type"}}
        return sent

    def stored(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def stored_held_to(stored: Mapping[str, Any] | None) -> str:
    """What the samplers of a job hold its answers to; "" where they are free."""
    return "" if stored is None else held_to(stored["json_schema"]["schema"])
