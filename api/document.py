"""The OpenAPI document: what FastAPI derives from the endpoints, and the refusals that follow from what they take."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from api.wire import Error

# By status: what is said of it. A route that can be refused in other ways than `refusals_of` knows says so
# with `responses=refusals(…)`.
REFUSALS = {
    400: "Something in the request is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The API key may not do this.",
    404: "What the request names does not exist in this project.",
    410: "What the request names is damaged or missing in the service's store; asking again does not help.",
    413: "The body is too large.",
    429: "Too many requests; `retry-after` says when to ask again.",
    503: "The service cannot answer now.",
    507: "The service has no room left to store anything.",
}


# For the `openapi_extra` of a POST that any key may send, because it changes nothing.
FOR_ANY_KEY: dict[str, Any] = {"x-key-scope": "read"}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route: it answers with one of these, in the shape of all errors."""
    return {status: {"model": Error, "description": REFUSALS[status]} for status in statuses}


class Documented(FastAPI):
    """A FastAPI application whose document names every status that its /v1 routes can answer with."""

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
    """The statuses that what an operation takes brings with it."""
    body = "requestBody" in operation
    if body or any(parameter["in"] != "path" for parameter in operation.get("parameters", ())):
        yield 400
    if "security" in operation:
        yield 401
        yield 429
        if method != "get" and operation.get("x-key-scope") != FOR_ANY_KEY["x-key-scope"]:
            yield 403
    if "{" in path:
        yield 404
    if body:
        yield 413


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{Error.__name__}"}
    return {"description": REFUSALS[status], "content": {"application/json": {"schema": schema}}}
