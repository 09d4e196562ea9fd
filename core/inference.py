"""Which inference server answers for a base model and the models tuned from it."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from core.errors import InvalidRequest

ALL_OTHERS = "*"
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]  # ends with /v1
InferenceUrl = Annotated[str, Field(pattern=r"^(https?://[^\s/]+\S*)?$")] | dict[str, Url]


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
