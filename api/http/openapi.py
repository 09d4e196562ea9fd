"""The OpenAPI document: FastAPI's, plus the error responses that follow from the parameters of each operation."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from api.http.shapes import Error

# Description by status. A route with refusals that `refusals_of` does not derive declares them with
# `responses=refusals(…)`.
REFUSALS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "The API key lacks the required scope.",
    404: "The resource does not exist in this project.",
    405: "The eval of a job is read-only.",
    409: "The episode is completed, or its deadline has passed.",
    410: "The stored content is damaged or missing; a retry does not help.",
    413: "The request body is too large.",
    416: "The requested range of bytes is not part of the content.",
    429: "Too many requests; `retry-after` says when to retry.",
    503: "The service is temporarily unavailable.",
    507: "The service is out of storage.",
}


# For the `openapi_extra` of a POST that any key may send, because it is read-only.
FOR_ANY_KEY: dict[str, Any] = {"x-key-scope": "read"}
# The same of a route that takes the key of an episode only.
FOR_KEY_OF_EPISODE: dict[str, Any] = {"x-key-scope": "episode"}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may return these statuses, in the common error shape."""
    return {status: {"model": Error, "description": REFUSALS[status]} for status in statuses}


class Documented(FastAPI):
    """A FastAPI application whose OpenAPI document lists the statuses that belong to its /v1 routes.

    Any of them may also return 503 and 507 during an outage.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    for status in refusals_of(method, path, operation):
                        operation["responses"].setdefault(str(status), _refusal(status))
                    operation["responses"].pop("4XX", None)  # see api/app.py
                    operation["responses"] = dict(sorted(operation["responses"].items()))
        return super().openapi()


def refusals_of(method: str, path: str, operation: dict[str, Any]) -> Iterator[int]:
    """The error statuses that follow from the parameters of an operation."""
    body = "requestBody" in operation
    if body or any(parameter["in"] != "path" for parameter in operation.get("parameters", ())):
        yield 400
    of_episode = operation.get("x-key-scope") == FOR_KEY_OF_EPISODE["x-key-scope"]
    if "security" in operation:
        yield 401
    if "security" in operation and not of_episode:
        yield 429
        if method != "get" and operation.get("x-key-scope") != FOR_ANY_KEY["x-key-scope"]:
            yield 403
    if "{" in path and not of_episode:
        yield 404
    if body:
        yield 413


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{Error.__name__}"}
    return {"description": REFUSALS[status], "content": {"application/json": {"schema": schema}}}
