"""JSON responses."""

from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from core.text import storable_json


def encode(content: Any) -> bytes:
    """Serialize models and JSON values.

    Texts with lone surrogates, which UTF-8 cannot encode, are made storable; NaN and infinities become null.
    """
    try:
        return to_json(content, inf_nan_mode="null")
    except PydanticSerializationError:
        return to_json(storable_json(to_jsonable_python(content)), inf_nan_mode="null")


class JSON(JSONResponse):
    """The JSON response of the whole API: it can carry any text, also one that quotes the request."""

    def render(self, content: Any) -> bytes:
        return encode(content)
