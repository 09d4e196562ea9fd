"""Base schemas of requests and responses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from core.database.pages import Page
from core.step_metrics import StepMetrics
from core.storage.datasets import is_nested_too_deeply
from core.strict import StrictModel

T = TypeVar("T")


# Of an object anywhere in a request: as many as a schema may have properties. Pydantic makes a complaint of each
# unknown key, a kilobyte in memory, although only the first is reported.
MAX_KEYS = 5_000
# No body with fewer characters has an object of more keys: one takes at least six (`"":0, `).
_FEW = 6 * MAX_KEYS
# Of objects and arrays in each other: pydantic writes 254, some of which are those around the value in a response.
MAX_LEVELS = 200


class Body(StrictModel):
    """A request body."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, sent: Any) -> Any:
        # Python's parser makes values that are not JSON or not Unicode and that could be neither stored nor returned:
        # infinity of 1e999, lone surrogates.
        if not isinstance(sent, dict):  # pydantic reports it
            return sent
        try:
            text = json.dumps(sent, allow_nan=False, ensure_ascii=False)
            text.encode()
        except UnicodeEncodeError as problem:
            lone = ascii(problem.object[problem.start])
            raise ValueError(f"the body contains the lone surrogate {lone}, which is not text") from None
        except RecursionError:
            raise ValueError("the body nests objects and arrays too deeply") from None
        except ValueError:  # 1e999
            raise ValueError("the body contains a number beyond 1.8e308, which is infinity") from None
        if text.count("{") + text.count("[") > MAX_LEVELS and is_nested_too_deeply(sent, MAX_LEVELS):
            raise ValueError(f"the body nests objects and arrays in more than {MAX_LEVELS} levels")
        if len(text) > _FEW:
            _refuse_many_keys(sent)
        return sent


def _refuse_many_keys(sent: dict[str, Any]) -> None:
    containers: list[Any] = [sent]
    while containers:
        one = containers.pop()
        if isinstance(one, dict):
            if len(one) > MAX_KEYS:
                raise ValueError(
                    f"an object in the body has {len(one)} keys, at most {MAX_KEYS} are supported"
                )
            one = one.values()
        containers += [below for below in one if isinstance(below, dict | list) and below]


@dataclass(frozen=True)
class SchemaOf:
    """Documents a value with the schema of a model.

    The value is returned as it is stored, without validation: the service wrote it itself.
    """

    model: type[BaseModel]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(self.model.__pydantic_core_schema__)


Measured = Annotated[dict[str, Any], SchemaOf(StepMetrics)]
"""The metrics of a step."""


class Listing(BaseModel, Generic[T]):
    """One page of a list. Request the next one with `after=<id of the last item>`."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False


class EndedListing(Listing[T], Generic[T]):
    """A page with the ids of its first and last item."""

    first_id: str | None
    last_id: str | None


class Deleted(BaseModel):
    id: str
    object: str
    deleted: Literal[True] = True


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


After = Annotated[str | None, Query(description="Cursor: start after the item with this id.")]
# Clamped instead of rejected: OpenAI does not publish a maximum.
Limit = Annotated[int, Query(description="Maximum number of items, at most 100.")]


def clamped(limit: int) -> int:
    return max(1, min(limit, 100))


def ends(page: Page[Any]) -> dict[str, str | None]:
    """The first_id and last_id of a page."""
    if not page.items:
        return {"first_id": None, "last_id": None}
    return {"first_id": page.items[0].id, "last_id": page.items[-1].id}


class Money(BaseModel):
    """An amount of money."""

    amount: float
    currency: Annotated[str, Field(description="ISO 4217.")]

    @classmethod
    def of(cls, cost: Mapping[str, Any] | None) -> "Money | None":
        """None: there is no price."""
        return None if cost is None else cls(**cost)


class RunErrorOut(BaseModel):
    """The error that ended a preview or an audit, and the status that a response with it would have."""

    message: str
    type: str
    param: str | None
    code: str | None
    status: int
