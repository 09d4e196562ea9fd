"""Which inference server answers for a base model and the models tuned from it."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from core.addresses import check_http_url
from core.errors import InvalidRequest, NotReady
from core.outages import Resource, TemporarilyUnavailable
from core.outbound.http import is_away

ALL_OTHERS = "*"
_EXAMPLE = "http://host:8100/v1"


def _checked(value: Any) -> Any:
    """Messages omit the address, which may have a password."""
    if isinstance(value, dict):
        if not value:
            raise PydanticCustomError("inference_url", "the map has no servers")
        for model, url in value.items():
            if (problem := _problem(url)) is not None:
                text = "the server of {model} is not an address such as {example}: {problem}"
                context = {"model": str(model), "example": _EXAMPLE, "problem": problem}
                raise PydanticCustomError("inference_url", text, context)
    elif isinstance(value, str) and value and (problem := _problem(value)) is not None:
        text = (
            "is neither an address such as {example} nor a JSON object of addresses by base model: {problem}"
        )
        raise PydanticCustomError("inference_url", text, {"example": _EXAMPLE, "problem": problem})
    return value


def _problem(url: Any) -> str | None:
    if not isinstance(url, str):
        return "must be text"
    try:
        check_http_url(url)
    except PydanticCustomError as invalid:
        return invalid.message()
    return None


InferenceUrl = Annotated[str | dict[str, str], BeforeValidator(_checked)]


class InferenceNotReady(NotReady, TemporarilyUnavailable):
    """The inference server is not reachable, starts, or loads the model."""

    resource = Resource.INFERENCE


class UnknownToInference(InvalidRequest, TemporarilyUnavailable):
    """The inference server does not know the model: its models file may be older than the API's."""

    resource, code = Resource.INFERENCE, "model_not_found"

    def __init__(self, message: str) -> None:
        """`message`: that of the server."""
        super().__init__(f"The inference server: {message}", param="model")


def is_error(content: bytes | str) -> bool:
    """Whether the body is an error in OpenAI's shape, as all errors of our inference server are."""
    try:
        error = json.loads(content)["error"]
        return isinstance(error["message"], str) and "code" in error
    except (ValueError, TypeError, LookupError):
        return False


def is_unreached(status: int, content: bytes | str) -> bool:
    """Whether a proxy answered because it did not reach the inference server."""
    return is_away(status) and not is_error(content)


def says_later(status: int, retry_after: str | None, content: bytes | str) -> bool:
    """Whether the same request may succeed later: the server loads the model or stops, or a proxy did not reach it.

    Without Retry-After its own 503 does not pass by itself, such as that of a model which is too large for the GPU.
    """
    return (status == 503 and retry_after is not None) or is_unreached(status, content)


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
