"""Which inference server answers for a base model and the models tuned from it."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from core.errors import InvalidRequest, NotReady
from core.outages import Resource, TemporarilyUnavailable

ALL_OTHERS = "*"
_ADDRESS = re.compile(r"https?://[^\s/]+\S*")
_EXAMPLE = "http://host:8100/v1"


def _checked(value: Any) -> Any:
    """Messages omit the address, which may have a password."""
    if isinstance(value, dict):
        if not value:
            raise PydanticCustomError("inference_url", "the map has no servers")
        for model, url in value.items():
            if not isinstance(url, str) or not _ADDRESS.fullmatch(url):
                text = "the server of {model} is not an address such as {example}"
                raise PydanticCustomError("inference_url", text, {"model": str(model), "example": _EXAMPLE})
    elif isinstance(value, str) and value and not _ADDRESS.fullmatch(value):
        text = "is neither an address such as {example} nor a JSON object of addresses by base model"
        raise PydanticCustomError("inference_url", text, {"example": _EXAMPLE})
    return value


InferenceUrl = Annotated[str | dict[str, str], BeforeValidator(_checked)]


class InferenceNotReady(NotReady, TemporarilyUnavailable):
    """The inference server is not reachable, starts, or loads the model."""

    resource = Resource.INFERENCE


def address_of(configured: str | Mapping[str, str], base_model: str) -> str:
    """Return the base URL of the server of `base_model`, without a slash at the end; empty if there is none.

    Args:
        configured: One address for all base models, or addresses by base model, where `*` stands for all others.
    """
    if isinstance(configured, str):
        return configured.rstrip("/")
    return configured.get(base_model, configured.get(ALL_OTHERS, "")).rstrip("/")


def unknown_models(configured: str | Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return the names in `configured` that are not base models."""
    return [] if isinstance(configured, str) else sorted(configured.keys() - {*known, ALL_OTHERS})


def not_served(base_model: str, param: str | None = None) -> InvalidRequest:
    """The error for a base model without an inference server."""
    return InvalidRequest(
        f"This server has no inference server for {base_model}; the operator sets REGRAFT_INFERENCE_URL.",
        param=param,
        code="serving_not_configured",
    )
